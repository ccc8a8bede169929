"""The suite `real`: prompts, answers that repeat, checks of answers, whole rows, going on."""

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jspec
from bench.__main__ import main
from bench.ceilings import Ceilings
from bench.drafters import (
    ALL,
    BY_A_MODEL,
    BY_HASHES,
    LOSSY,
    PLAIN,
    SAMPLING,
    Drafting,
    params_of,
)
from bench.real import _todo, case, check, figures, grid, tables, texts
from bench.real.answers import per_step, repeats
from bench.real.cell import SAMPLES, WARMUPS, Cell
from bench.settings import Settings
from jspec.decode.programs import PROGRAMS
from jspec.decode.state import StepRecord
from jspec.models.bundled import bundled_path
from jspec.models.hashes import save_hashes
from tests.conftest import OF_BYTES, make_decoder
from tests.parameters import default_run

CONFIG = dataclasses.replace(OF_BYTES, max_context=4096)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
LIMITS = Ceilings(1e10, None)
# What pydoc shows of these has addresses and the environment; of all modules it takes seconds.
DOCUMENTED = {"some": ["collections", "os"], "all": texts.MODULES}


@pytest.fixture(scope="module", autouse=True)
def short_documentation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "MODULES", DOCUMENTED["some"])
        texts._documentation.cache_clear()
        yield
    texts._documentation.cache_clear()


@pytest.fixture(scope="module")
def tokenizer():
    return jspec.load_tokenizer(bundled_path())


@pytest.fixture(scope="module")
def prompts(tokenizer):
    template = jspec.ChatTemplate(TEMPLATE, {}, "test")
    return texts.prompts(tokenizer, template, 16, 400)


@pytest.fixture(scope="module")
def cell(tokenizer, prompts):
    # A sharp model, so that some drafts are accepted and others are not.
    model = make_decoder(CONFIG, seed=1, head=3.0)
    rows = [prompt.tokens for prompt in prompts[:4]]
    made = Cell(model, tokenizer, rows, 2, exact=None, limits=LIMITS)
    plain = Drafting.of(PLAIN, 3)
    made.compile([(plain, "greedy"), (plain, "t0.8")])
    assert made.row(plain, "greedy", 12)["checked"]
    return made


def test_a_chunk_is_timed_with_the_next_one_on_its_way(cell, monkeypatch):
    """The host, which reads a chunk and starts another, is then no part of a step's time."""
    events, run, read = [], PROGRAMS.timed(), jax.device_get

    def start(*args, **static):
        events.append("start")
        return run(*args, **static)

    def reading(x):
        events.extend(["read"] * isinstance(x, StepRecord))
        return read(x)

    monkeypatch.setattr(PROGRAMS, "timed", lambda: start)
    monkeypatch.setattr(jax, "device_get", reading)
    row = cell._step_time(Drafting.of(PLAIN, 3), "t0.8")
    assert len(row["step_ns"]) == SAMPLES
    assert events == ["start"] * (WARMUPS + 2) + ["start", "read"] * SAMPLES


@pytest.mark.exhaustive
def test_prompts_fit_and_cover_every_kind_with_every_question(prompts, tokenizer):
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert 396 <= lengths[0] <= 400
    assert max(lengths) <= 400
    assert min(lengths) >= 270
    pairs = Counter((prompt.kind, prompt.question) for prompt in prompts)
    assert len(pairs) == 12
    assert {kind: sum(n for (k, _), n in pairs.items() if k == kind) for kind, _ in pairs} == {
        "code": 8,
        "docs": 4,
        "metadata": 4,
    }
    for prompt in prompts:
        text = tokenizer.decode(prompt.tokens)
        assert text.startswith("<user>")
        assert text.endswith("<answer>")
    assert len({tuple(prompt.tokens[:200]) for prompt in prompts}) == 16


def test_the_same_prompts_again(prompts, tokenizer):
    template = jspec.ChatTemplate(TEMPLATE, {}, "test")
    again = texts.prompts(tokenizer, template, 16, 400)
    assert texts.digest(again) == texts.digest(prompts)
    assert texts.digest(again[1:]) != texts.digest(prompts)
    with pytest.raises(ValueError, match="no room for a question"):
        texts.prompts(tokenizer, template, 1, 40)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        (range(200), False),
        ([7] * 17, False),  # 16 tokens in a row occur twice
        ([7] * 18, True),
        ([*range(16), 99] * 3, True),
        ([*range(15), 98, *range(15), 99, *range(15)], False),
    ],
)
def test_answers_that_repeat(tokens, expected):
    assert repeats(list(tokens)) is expected


def test_the_error_of_tokens_per_step_against_the_bootstrap():
    rng = np.random.default_rng(0)
    steps = rng.integers(20, 60, 60)
    tokens = np.round(steps * rng.normal(4, 0.7, 60)).astype(int)
    result = per_step(tokens.tolist(), steps.tolist())
    assert result is not None
    assert result.mean == tokens.sum() / steps.sum()
    resampled = stats.bootstrap(
        (tokens, steps), lambda t, s: t.sum() / s.sum(), paired=True, vectorized=False, rng=rng
    )
    assert result.error == pytest.approx(resampled.standard_error, rel=0.1)
    assert per_step([], []) is None
    alone = per_step([10], [4])
    assert alone is not None
    assert (alone.mean, np.isnan(alone.error)) == (2.5, True)


@pytest.mark.parametrize("sampling", default_run(["t0.8", "paper"], "paper"))
def test_scores_of_answers_against_the_sampling_law(cell, sampling):
    """Mean and variance of the log-probability, from logits without a cache."""
    params = params_of(sampling, 1, 1)[0]
    answer = list(np.random.default_rng(1).integers(0, 256, 5))
    (scores,) = cell._score([3], [answer], params)

    def attend(layer, q, k, v, cache):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache

    @jax.jit
    def forward(model, tokens):
        hidden, _ = model(tokens, jnp.arange(tokens.shape[1])[None], attend, None)
        return model.logits(hidden)

    tokens = np.array([[*cell.prompts[3], *answer]], np.int32)
    logits = np.asarray(forward(cell.model, tokens))[0, -len(answer) - 1 : -1]
    shares = jspec.ops.token_probabilities(logits, params)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(shares)
        terms = np.where(shares > 0, shares * logs, 0)
        squares = np.where(shares > 0, shares * logs**2, 0)
    chosen = logs[np.arange(len(answer)), answer]
    mean = terms.sum(axis=-1)
    np.testing.assert_allclose(scores[:, 0], chosen, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scores[:, 1], mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scores[:, 2], squares.sum(axis=-1) - mean**2, rtol=1e-2, atol=1e-4)


def test_sampled_answers_pass_at_their_temperature_alone(cell):
    plain = Drafting.of(PLAIN, 3)
    params = [dataclasses.replace(p, ignore_eos=True) for p in params_of("t0.8", 400, 2)]
    answers = [row for index in (0, 1) for row in cell.generate(plain, params, index).tokens]
    right = check.sampled(cell._score, answers, jspec.SamplingParams(temperature=0.8))
    assert right["checked"], right
    assert abs(right["deviations"]) < 3
    for temperature in (0.4, 1.6):
        wrong = check.sampled(cell._score, answers, jspec.SamplingParams(temperature=temperature))
        assert not wrong["checked"], wrong
    # Tokens that a filter leaves out are told apart from unlikely ones.
    assert not check.sampled(cell._score, answers, jspec.SamplingParams(temperature=1.0, top_k=1))[
        "checked"
    ]


@pytest.mark.parametrize("name", default_run(["ngram", "ngram-tree", "vegas"], "ngram"))
def test_a_row_of_a_drafter_and_no_further_program(cell, name):
    drafting = Drafting.of(name, 3)
    cell.compile([(drafting, "greedy"), (drafting, "t0.8")])
    programs = len(PROGRAMS._compiled)
    greedy, sampled = (cell.row(drafting, sampling, 12) for sampling in ("greedy", "t0.8"))
    assert len(PROGRAMS._compiled) == programs
    assert greedy["checked"]
    assert greedy["identical_rows"] == greedy["rows"] == 4
    assert sampled["checked"]
    for row in (greedy, sampled):
        assert all(t <= 4 * s for t, s in zip(row["tokens"], row["steps"], strict=True))
        assert row["attempts_at"][0] >= row["accepted_at"][0]
        assert len(row["step_ns"]) >= 1


def test_a_step_with_trees_says_which_operations_fell_back(cell):
    drafting = Drafting.of("ngram-tree", 3, backends="pallas")
    cell.compile([(drafting, "paper")])
    row = cell.row(drafting, "paper", 12)
    assert row["checked"]
    reasons = {choice["operation"]: choice["reason"] for choice in row["backends"]}
    assert reasons["tree_attention"] == "it has no backend pallas"
    for operation in ("verify_tree", "pack_path"):
        assert reasons[operation].startswith("Mosaic GPU ")


def test_wrong_answers_are_not_timed(cell, monkeypatch):
    drafting = Drafting.of("ngram", 3)
    right = cell._measured

    def wrong(*arguments):
        measured = right(*arguments)
        answers = [(*row[:4], (row[4] + 1) % 256, *row[5:]) for row in measured.answers]
        return dataclasses.replace(measured, answers=answers)

    monkeypatch.setattr(cell, "_measured", wrong)
    row = cell.row(drafting, "greedy", 12)
    assert row["checked"] is False
    assert "not the model's" in row["reason"]
    assert "step_ns" not in row
    assert not figures.is_timed(row)


def test_exact_rows_may_not_differ_at_all():
    plain = [(1, 2, 3), (4, 5, 6)]
    scorer = None  # of exact answers nothing is scored
    assert check.greedy(scorer, plain, plain, exact=True)["checked"]
    assert not check.greedy(scorer, [(1, 2, 3), (4, 5, 7)], plain, exact=True)["checked"]


def test_an_answer_that_ends_early_differs():
    def scorer(rows, answers, params):
        assert rows == [0, 0]
        assert answers == [(1, 2), (1, 2)]
        return [np.zeros((2, 3)), np.zeros((2, 3))]

    result = check.greedy(scorer, [(1, 2)], [(1, 2, 3)], exact=False)
    assert result["identical_rows"] == 0


def synthetic(name: str, step_ms: float, steps: list[int], run: int = 0, **rest) -> dict:
    at = case("B=2,S=4K,new=10") | {"model": "m"}
    row = {"case": at, "name": name, "run": run, "checked": True, "tokens": [10, 10]}
    row |= {"steps": steps, "repeats": [False, True], "step_ns": [round(step_ms * 1e6)] * 3}
    row |= {"decode_s_samples": [0.02 if name == PLAIN else 0.01], "prefill_s": 0.01}
    return row | {"switch_s": 0.0, "plain_floor_ns": 0.5e6} | rest


def test_speeds_of_a_row():
    plain = synthetic(PLAIN, 1.0, [10, 10])
    row = synthetic("vegas", 2.0, [4, 2])
    rows = [plain, row, synthetic(PLAIN, 4.0, [10, 10], run=1)]
    mean, every = (figures.committed_per_step(row, repetitive=x) for x in (False, True))
    assert mean is not None
    assert every is not None
    assert (mean.mean, mean.rows, every.mean) == (2.5, 1, 20 / 6)
    assert figures.steady_rate(row) == pytest.approx(2 * 2.5 / 0.002)
    assert figures.over_plain(row, rows, figures.steady_rate) == pytest.approx(1.25)
    assert figures.over_plain(row, rows, figures.batch_rate) == pytest.approx(2.0)
    assert figures.over_plain(row, rows, figures.end_to_end_rate) == pytest.approx(1.5)
    assert figures.floor_rate(row) == pytest.approx(4000)
    # Plain decoding of another run, or one that is not right, compares with nothing.
    assert figures.over_plain(row | {"run": 2}, rows, figures.steady_rate) is None
    assert figures.over_plain(row, [plain | {"checked": False}], figures.steady_rate) is None


def test_packing_has_a_share_of_the_step_of_a_tree():
    chain = synthetic("ngram-1", 2.0, [4, 2], parts_ns={"verification": 1e6}, floors_ns={})
    tree = synthetic("ngram-tree", 2.0, [4, 2], parts_ns={"packing": 5e3, "verification": 1e6})
    words = [tables.limits_line(figures.limits(row | {"floors_ns": {}})) for row in (chain, tree)]
    assert "packing" not in words[0]
    assert words[1].endswith("verification 50%; packing 0.25%")


def test_the_cells_of_jspec_are_cases_with_one_headline():
    for context, cells in ((8192, 4), (32768, 9)):
        asked = [case(text) for text in grid(context)]
        ordinary = [x for x in asked if x["exact"] == "no"]
        assert len({(x["B"], x["S"]) for x in ordinary}) == cells
        headline = [x for x in asked if x["drafts"] == "all"]
        assert [x["sampling"] for x in headline] == list(SAMPLING)
        assert len({(x["B"], x["S"]) for x in headline}) == 1
        assert max(x["S"] + x["new"] for x in asked) <= context


def test_every_drafter_is_known():
    for name in (*ALL, *BY_A_MODEL, *BY_HASHES, *LOSSY):
        assert Drafting.of(name, 3).config.backends.preferred is None
        assert Drafting.of(name, 3, backends="triton").config.backends.preferred == "triton"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model directory with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    jspec.save_model(make_decoder(CONFIG, seed=1), path)
    shutil.copy(bundled_path() / "tokenizer.json", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.mark.exhaustive
def test_a_run_and_one_that_goes_on(folder, tmp_path, capsys):
    file = tmp_path / "real.json"
    asked = ["real", "--model", str(folder), "--case", "B=4,S=300,new=6,gamma=2"]
    asked += ["--json", str(file)]
    assert main([*asked, "--backend", "ngram"]) == 0
    first = json.loads(file.read_text())
    # A row that failed is measured again.
    failed = first["rows"][1] | {"name": "suffix", "checked": False, "reason": "out of luck"}
    file.write_text(json.dumps(first | {"rows": [*first["rows"], failed]}))
    assert [(row["name"], row["run"]) for row in first["rows"]] == [(PLAIN, 0), ("ngram", 0)]
    assert first["model"]["name"] == "tiny"
    assert main([*asked, "--backend", "ngram", "--backend", "suffix", "--resume"]) == 0
    second = json.loads(file.read_text())
    assert second["rows"][:2] == first["rows"]
    assert [(x["name"], x["run"]) for x in second["rows"][2:]] == [(PLAIN, 1), ("suffix", 1)]
    shown = capsys.readouterr().out
    assert "acceptance measured. tiny: 4 rows of up to 300 tokens, greedy" in shown
    assert max(map(len, shown.splitlines())) <= 100
    # Another model's result is not gone on with.
    result = second | {"model": second["model"] | {"name": "other"}}
    file.write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        main([*asked, "--resume"])
    assert "is of real and other and cpu, not of real, tiny and cpu" in capsys.readouterr().err
    file.write_text("[]")
    with pytest.raises(SystemExit):
        main([*asked, "--resume"])
    assert "--resume cannot read" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_second_model_drafts(folder, tmp_path, capsys):
    second, file = tmp_path / "second", tmp_path / "real.json"
    jspec.save_model(make_decoder(dataclasses.replace(CONFIG, vocab_size=272), seed=2), second)
    asked = ["real", "--model", str(folder), "--case", "B=4,S=300,new=6,gamma=2"]
    asked += ["--backend", "model", "--backend", "model>vegas", "--json", str(file)]
    assert main([*asked, "--draft-model", str(second)]) == 0
    result = json.loads(file.read_text())
    assert result["draft_model"] == "second"
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [PLAIN, "model", "model>vegas"]
    assert all(row["checked"] for row in rows.values())
    # Drafts of the model itself would all be accepted.
    assert sum(rows["model"]["accepted_at"]) < sum(rows["model"]["attempts_at"])
    drafted = [rows[name]["floors_ns"]["draft passes"] for name in ("model", "model>vegas")]
    assert 0 < drafted[0] < drafted[1]
    with pytest.raises(SystemExit):
        main([*asked, "--draft-model", str(folder), "--resume"])
    assert "has drafts by second, not by tiny" in capsys.readouterr().err


def test_hashes_draft_and_read(folder, tmp_path, capsys, monkeypatch):
    # The model has few layers, which the policy itself would read whole.
    monkeypatch.setitem(LOSSY, "hata-lossy", "hata:budget=8,sinks=0,recent=1,dense_layers=0")
    model, hashes, file = jspec.load_model(folder), tmp_path / "hashes", tmp_path / "real.json"
    rng = np.random.default_rng(0)
    shapes = [(spec.kv_heads, spec.key_size, 128) for spec in model.config.layers]
    arrays = tuple(rng.standard_normal(shape, np.float32) for shape in shapes)
    save_hashes(arrays, hashes, {}, model)
    asked = ["real", "--model", str(folder), "--json", str(file), "--hashes", str(hashes)]
    asked += ["--case", "B=4,S=300,new=6,gamma=2"]
    assert main([*asked, "--backend", "hata", "--backend", "hata-lossy"]) == 0
    result = json.loads(file.read_text())
    assert result["hashes"] == "hashes"
    assert [row["name"] for row in result["rows"]] == [PLAIN, "hata", "hata-lossy"]
    assert all(row["checked"] for row in result["rows"])
    _, hata, lossy = result["rows"]
    assert sum(hata["accepted_at"]) < sum(hata["attempts_at"])
    assert lossy["steps"] == lossy["tokens"]
    assert 0 < lossy["agreement"] < 1
    assert lossy["identical_rows"] < 8
    assert lossy["log_probability"] < lossy["plain_log_probability"]
    assert figures.steady_rate(lossy) is not None
    assert "hata-lossy: lossy, without verification" in " ".join(capsys.readouterr().out.split())
    save_hashes((arrays[0],) * 9, tmp_path / "other", {})
    with pytest.raises(SystemExit):
        main([*asked, "--hashes", str(tmp_path / "other")])
    assert "hashes of 9 layers do not fit a model of" in capsys.readouterr().err


def test_a_lossy_policy_runs_where_its_answers_can_be_compared():
    settings = Settings(hashes=Path("hashes"))
    names = {}
    for text in ("B=4", "B=4,sampling=t0.8", "B=4,exact=bits", "B=4,backends=xla"):
        ((_, names[text]),) = _todo(settings, [case(text)], {"model": "m", "run": 0}, set())
    assert all(set(BY_HASHES) < set(x) for x in names.values())
    assert [text for text, x in names.items() if set(LOSSY) & set(x)] == ["B=4"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((1, 2, 3, 4), 1.0), ((1, 2, 0, 4), 0.5), ((1, 2, 3), 0.5), ((0, 2, 3, 4), 0.0)],
)
def test_the_agreement_of_a_lossy_answer(tokens, expected):
    def scorer(rows, texts, params):
        return [np.array([[-len(text), 0, 0]] * len(text)) for text in texts]

    result = check.agreement(scorer, [tokens], [(1, 2, 3, 4)])
    assert result["agreement"] == expected
    assert (result["log_probability"], result["plain_log_probability"]) == (-len(tokens), -4)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("real", "real needs --model"),
        ("real --model . --hashes nowhere", "--hashes nowhere does not exist"),
        ("real --model . --backend hata", "--backend hata needs trained hashes of the model"),
        ("verify --hashes .", "--hashes does not apply to verify"),
        ("quality --hashes . --case op=read", "--hashes does not apply to quality, only to real"),
        ("quality --hashes . --case op=flips", "with --model, to op=read and op=flips of quality"),
        ("quality --hashes . --model . --case op=trees", "--hashes does not apply to quality"),
        ("quality --model . --case op=read --case op=draft", "--model does not apply to quality"),
        (
            "quality --model .",
            "only to real, defaults, rollouts, op=read, op=trees, op=passes, ",
        ),
        ("quality --model nowhere --case S=2K", "--model nowhere does not exist"),
        ("real --model . --draft-model nowhere", "--draft-model nowhere does not exist"),
        ("real --model . --backend model", "--backend model drafts with a second model; name it"),
        ("verify --draft-model .", "--draft-model does not apply to verify"),
        ("real --model nowhere", "--model nowhere does not exist"),
        ("real --model . --resume", "--resume needs --json"),
        ("verify --resume", "--resume does not apply to verify"),
        ("real --model . --case drafts=some", "drafts=some must be one of few, all"),
        ("real --model . --backend gpt", "--backend gpt must be one of"),
    ],
)
def test_what_cannot_be_asked(asked, error, capsys):
    with pytest.raises(SystemExit):
        main(asked.split())
    assert error in capsys.readouterr().err


def test_a_model_without_a_chat_template(folder, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit):
        main(["real", "--model", str(bare), "--case", "B=4,S=300"])
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("modules", default_run(DOCUMENTED, "some"))
def test_the_documentation_has_nothing_of_the_process(modules, monkeypatch):
    """Prompts are compared by a hash where a run is resumed."""
    monkeypatch.setattr(texts, "MODULES", modules)
    shown = texts._documentation.__wrapped__()
    assert not re.search(r" at 0x[0-9a-f]{8}|handle [0-9a-f]{8}|environb? = ", shown)
