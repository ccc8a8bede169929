"""The suite `rollouts`: its figures, its checks, and its rival's weights."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from bench.report import rollouts, systems
from bench.report.runs import Run
from bench.rivals import tunix
from bench.rollouts import SUITE, differences, grpo, prefill, speed, weights
from bench.settings import Settings
from tests.conftest import OF_BYTES, make_decoder

BENCHMARKS = {x.name: x for x in SUITE.benchmarks}


def rows(op: str, text: str, *names: str) -> list[dict]:
    benchmark = BENCHMARKS[op]
    return list(benchmark.rows(benchmark.case(text), Settings(quick=True, only=names)))


def test_time_to_a_reward_is_that_of_all_parts_of_all_steps():
    def step(reward: float, rollout: float) -> dict:
        parts = {"score": 0.5, "train": 1.0, "update": 0.25}
        return {"reward": reward, "difference": reward / 10, "rollout": rollout, **parts}

    good, late = [step(0.5, 1.0), step(0.9, 3.0)], [step(0.95, 2.0)]
    result = grpo.figures([good, late], 0.9)
    assert result["seconds"] == [pytest.approx(4 + 2 * 1.75), pytest.approx(3.75)]
    assert (result["steps"], result["rewards"]) == ([2, 1], [[0.5, 0.9], [0.95]])
    assert result["to_reward_s"] == pytest.approx((7.5 + 3.75) / 2)
    assert (result["rollout_ms"], result["train_ms"]) == (2000, 1000)
    assert result["difference"] == pytest.approx(0.095)
    missed = grpo.figures([good, [step(0.8, 1.0)]], 0.9)
    assert missed["seconds"] == [pytest.approx(7.5), None]
    assert "to_reward_s" not in missed


def test_bins_are_those_of_numpy():
    """With the traps: zero, the smallest number, the edges themselves, and no number at all."""
    edges, rng = np.array(differences.EDGES), np.random.default_rng(0)
    some = np.concatenate([10 ** rng.uniform(-8, 2, 1000), edges, edges, [0, 0, 5e-324]])
    result = differences.histogram(some)
    expected, _ = np.histogram(some, [0, 5e-324, *edges, np.inf])
    assert (result["counts"], result["max"]) == (expected.tolist(), some.max())
    assert differences.histogram(np.zeros(3, np.float32))["counts"] == [3] + [0] * 14
    lost = differences.histogram(np.array([0.2, np.nan]))
    assert (lost["counts"][-1], sum(lost["counts"])) == (1, 2)
    assert np.isnan(lost["max"])


def test_an_answer_is_the_end_of_its_text():
    scores = [np.array([-9, -1, -2], np.float32), np.array([-9, -9], np.float32)]
    result = differences.between([[-1.0, -2.5], []], scores)
    assert result["max"] == 0.5
    assert np.flatnonzero(result["counts"]).tolist() == [0, 13]


def test_cases_of_uneven_groups_are_refused():
    with pytest.raises(ValueError, match="B=6 is no multiple of group=4"):
        BENCHMARKS["sampler"].case("B=6,group=4")


def test_a_group_is_prefilled_once_and_conversations_go_on(small_bundled):
    shared, apart = rows("group", "B=3,S=80,new=4")
    assert (shared["name"], apart["name"]) == ("shared", "apart")
    assert shared["checked"]
    assert apart["checked"]
    assert apart["prefilled"] == 3 * 80
    assert shared["prefilled"] < 80 + 3
    assert shared["cache_bytes"] == 4 * 256 * OF_BYTES.num_layers * 2 * 2 * 16 * 4
    assert shared["compilations"] == apart["compilations"] == 0


def test_the_measured_call_finds_nothing_of_the_one_before(tiny):
    engine = jspec.Engine(tiny, slots=2, capacity=96, draft=None, prefill_chunk=16)
    params, prompt = prefill.params_of(2), [1 + i % 40 for i in range(80)]
    asked, figures = prefill.measured(
        engine, partial(prefill.answered, engine, [prompt, prompt], params)
    )
    # The second one's last token is computed again, for its first draw.
    assert (figures["prefilled"], figures["prefilled_share"]) == (81, 81 / 160)
    assert engine.stats.prompt_tokens == 2 * figures["prefilled"]
    assert figures["tokens_per_s"] == pytest.approx(4 / figures["seconds"])
    assert [len(x.request.tokens) for x in asked] == [2, 2]


def test_users_send_their_turns_in_order(tiny):
    case = {"B": 2, "turns": 3, "S": 5, "message": 2, "new": 3}
    whole = [list(range(1, 9)), [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
    engine = jspec.Engine(tiny, slots=2, capacity=20, draft=None)
    asked = prefill.conversed(engine, whole, case, apart=False)
    assert sorted(x.turn for x in asked) == [0, 0, 1, 1, 2, 2]
    for user in (1, 2):
        first, second, third = (x for x in asked if whole[user][0] in x.prompt)
        assert first.prompt == [1, 2, 3, 4, 5, *whole[user][:2]]
        assert second.prompt == [*first.prompt, *first.request.tokens, *whole[user][2:4]]
        assert third.prompt == [*second.prompt, *second.request.tokens, *whole[user][4:]]
    assert all(x.first_ms > 0 and len(x.request.tokens) == 3 for x in asked)
    apart = prefill.conversed(engine, whole, case, apart=True)
    assert len({x.prompt[0] for x in apart}) == 6


def test_new_weights_are_those_of_the_engine(monkeypatch):
    monkeypatch.setattr(weights, "drawn", lambda name, layers: make_decoder(OF_BYTES))
    monkeypatch.setattr(weights, "REPEATS", 1)
    copy, taken, cast = rows("update", "")
    assert [x["name"] for x in (copy, taken, cast)] == ["copy", "taken", "cast"]
    assert all(x["checked"] and x["ms"] > 0 for x in (copy, taken, cast))
    assert taken["GB_per_s"] == 0
    right = jspec.Engine.update

    def wrong(self, new):
        return right(self, jax.tree.map(lambda x: x * 2, new))

    monkeypatch.setattr(jspec.Engine, "update", wrong)
    assert [x["checked"] for x in rows("update", "", "taken", "copy")] == [True, False]


@pytest.mark.parametrize(
    ("error", "checked", "reason"),
    [
        (ModuleNotFoundError("none", name="tunix"), None, "tunix is not installed"),
        (ValueError("too few"), False, "failed: ValueError: too few"),
    ],
)
def test_an_engine_that_cannot_run_is_a_row(error, checked, reason, small_bundled, monkeypatch):
    """With the reason; only one that failed counts as wrong."""

    def raises(name):
        raise error

    monkeypatch.setattr(tunix, "module", raises)
    for op, text in (("sampler", "B=2,group=1,S=8,new=4"), ("grpo", "answers=2,new=4,steps=1")):
        measured = rows(op, text, "tunix", "none")
        assert [x["name"] for x in measured] == ["tunix", "none"]
        for row in measured:
            assert (row["operation"], row["case"]["model"]) == (op, "bundled")
            assert (row["checked"], row["reason"]) == (checked, reason)


def test_the_report_has_what_was_measured_on_a_gpu():
    """With the trap of each table: a missed target, a row with a reason, a rate of nothing."""
    sampler = {"model": "m", "B": 64, "new": 512, "sampling": "t1", "exact": "no"}
    speed = {"operation": "sampler", "case": sampler, "checked": True, "first_call_s": 20.0}
    grpo = {"model": "m", "target": 0.8}
    parts = {"rollout_ms": 5.0, "train_ms": 6.0, "update_ms": 7.0, "compilations": 0}
    counts = [2, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 549, 9]
    update = {"operation": "update", "case": {"model": "m"}, "checked": True}
    group = {"operation": "group", "case": {"model": "m", "B": 16, "S": 4096}, "checked": True}
    group |= {"first_token_ms": 1.0, "tokens_per_s": 9.0, "cache_bytes": 1.5e9}
    phase = {"operation": "serving", "checked": True, "name": "ngram", "tokens_per_s": 3.0}
    measured = [
        {**speed, "name": "tunix", "tokens_per_s": 1000.0, "vs_tunix": 1.0},
        {**speed, "name": "none", "tokens_per_s": 2500.0, "vs_tunix": 2.5}
        | {"differences": {"max": 0.25}},  # of a result without counts
        {**speed, "case": sampler | {"exact": "bits"}, "name": "none", "tokens_per_s": 2000.0}
        | {"differences": {"max": 0.0, "counts": [2000] + [0] * 14}}
        | {"trainer_differences": {"bfloat16": {"max": 0.5, "counts": counts}}},
        {**speed, "name": "ngram", "checked": False, "reason": "its tokens are wrong"},
        {"operation": "grpo", "case": grpo, "name": "none", "checked": None, **parts}
        | {"seconds": [1.5, None], "steps": [3, 9], "difference": 0.5},
        {**update, "name": "taken", "ms": 0.5, "GB_per_s": 0.0},
        {**update, "name": "copy", "ms": 2.0, "GB_per_s": 1500.0},
        {**group, "name": "shared", "prefilled": 4096, "prefilled_share": 1 / 16}
        | {"engine_bytes": 1.6e9},
        {**phase, "case": {"mix": "rollout", "B": 32, "gamma": "auto"}, "half_free_s": 0.5},
        {**phase, "case": {"mix": "reasoning", "B": 32, "gamma": "auto"}},
    ]
    result = {"machine": {"device": "NVIDIA H200"}, "rows": measured}
    tables = rollouts.tables([Run("h200", "rollouts", "", result)])
    assert [len(x.splitlines()) - 4 for x in tables.values()] == [3, 4, 1, 1, 1, 1]
    assert "| jspec, no drafts | 2,500 | 2.50x | 20.0 | 0.2 |" in tables["speed"]
    *_, head, _, none, some, _, link = tables["differences"].splitlines()
    assert link.endswith("(rollouts-differences.png)")
    assert head.endswith("| 0 | to 0.001 | to 0.01 | to 0.03 | to 0.1 | to 0.3 | above | largest |")
    assert none.endswith("| score_tokens | 2,000 | 100.0% |  |  |  |  |  |  | 0 |")
    # Bins 0; 1 to 7; 8 and 9; 10; 11; 12; 13 and 14.
    shares = "0.1% | 17.5% | 9.5% | 10.0% | 15.0% | 20.0% | 27.9%"
    assert some == f"|  |  |  |  | trainer, bfloat16 | 2,000 | {shares} | 0.5 |"
    assert "| t1 | jspec, no drafts, exact=bits |" in none
    assert "| 1.5, missed | 3, 9 | 5.0 | 6.0 | 7.0 | 0 | 0.5 |" in tables["grpo"]
    assert "| H200 | m | 0.50 | 2.00 (1,500 GB/s) |" in tables["weights"]
    assert "| shared | 4,096 (6.2%) | 1.0 | 9 | 1.50 / 1.60 |" in tables["shared"]
    assert "| H200 | 32 | auto | ngram | 3 | 0.50 | 0 |" in tables["phases"]
    served = {**phase, "case": {"mix": "rollout", "load": "full"}, "vs_plain": 2.0}
    only = {**result, "rows": [served]}
    assert not list(systems.served([Run("h200", "serving", "", only)]))  # it is in that table
    result["machine"]["device"] = "cpu"
    assert not any(rollouts.tables([Run("cpu", "rollouts", "", result)]).values())


def test_a_picture_has_a_panel_for_each_sampled_rollout_with_counts(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    figure, path = figures.Figure(), tmp_path / "histograms.png"
    monkeypatch.setattr(rollouts.figures, "new", lambda to: nullcontext(figure))
    counts = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0]
    found = {"max": 0.2, "counts": counts}
    case = {"model": "m", "B": 1, "new": 4, "sampling": "t1", "exact": "no"}
    old = {"operation": "sampler", "case": case, "name": "none", "differences": {"max": 0.1}}
    new = old | {"differences": found, "trainer_differences": {"float32": found}}
    others = [new | {"name": "ngram"}, new | {"case": case | {"sampling": "greedy"}}]

    def drawn(*rows, device="NVIDIA H200"):
        result = {"machine": {"device": device}, "rows": rows}
        return rollouts.draw([Run("some", "rollouts", "", result)], path)

    assert not drawn(old, *others)
    assert not drawn(new, device="cpu")
    exact = new | {"case": case | {"exact": "bits"}}
    assert drawn(old, *others, new, exact, new | {"name": "tunix"}, exact | {"name": "tunix"})
    titles = ["m, H200\njspec, no drafts", "m, H200\njspec, no drafts, exact=bits"]
    assert [x.get_title() for x in figure.axes] == [*titles, "m, H200\nTunix's sampler"]
    for axes in figure.axes:
        one, other = axes.patches
        assert [one.get_label(), other.get_label()] == ["score_tokens", "trainer, float32"]
        np.testing.assert_allclose(one.get_data().values, np.array(counts) / 4)
        words = {
            x.get_text(): at
            for x, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)
        }
        edges = one.get_data().edges
        assert edges[0] < words["0"] < edges[1]
        assert (words["1e-06"], words["0.1"], words["1"]) == (edges[2], edges[12], edges[14])


@pytest.fixture
def _promotes():
    """Dtypes and ranks are promoted, as Tunix and optax need."""
    pytest.importorskip("tunix", reason="Tunix is not installed: pip install '.[tunix]'")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_promotes", "small_bundled")
@pytest.mark.parametrize("sampling", ["greedy", "t1"])
def test_both_rollouts_give_answers_of_the_model(sampling, monkeypatch):
    measured = rows("sampler", f"B=4,group=2,S=12,new=6,sampling={sampling}", "tunix", "none")
    assert [x["name"] for x in measured] == ["tunix", "none"]
    assert all(x["checked"] for x in measured)
    ours = measured[1]
    assert ours["vs_tunix"] == pytest.approx(ours["tokens_per_s"] / measured[0]["tokens_per_s"])
    assert ours["compilations"] == 0
    for row in measured:
        assert list(row["trainer_differences"]) == ["float32"]
        for found in (row["differences"], *row["trainer_differences"].values()):
            assert found["max"] < 1e-4
            assert sum(found["counts"][:6]) == row["tokens"][0]
    right = tunix.actor_of

    def wrong(model, *dtypes):
        actor: Any = right(model, *dtypes)
        actor.final_norm.w[...] = -actor.final_norm.w[...]
        return actor

    monkeypatch.setattr(tunix, "actor_of", wrong)
    (row,) = rows("sampler", f"B=4,group=2,S=12,new=6,sampling={sampling}", "tunix")
    assert (row["checked"], row["reason"]) == (False, "its tokens are wrong")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_promotes")
def test_log_probabilities_are_compared_with_both_forwards(monkeypatch):
    """With `exact=bits` with those of an exact `jspec.score_tokens`, which must be the same ones;
    with a trainer's forward, which is Tunix's own."""
    _, tokenizer = jspec.load_bundled()
    model = jspec.Decoder(OF_BYTES, dtype="bfloat16", rngs=nnx.Rngs(0))
    ids, rng = [[1, 2, 3, 4], [70, 80]], np.random.default_rng(0)
    answers = [rng.integers(1, 99, size) for size in (3, 7, 1, 5, 6, 2)]
    texts = [[*ids[row // 3], *map(int, answer)] for row, answer in enumerate(answers)]
    case = {"B": 6, "group": 3, "S": 4, "new": 8, "sampling": "t1", "exact": "bits"}
    trial = speed.Trial(case, "m", model, tunix.Prompts.of(tokenizer, model, ids))
    actors = {
        name: tunix.actor_of(model, *[jnp.dtype(name)] * 2) for name in ("bfloat16", "float32")
    }
    programs = differences._forward._cache_size()
    scores = differences.trainer_scores(actors["float32"], texts, 12)
    common, unused = pytest.importorskip("tunix.rl.common"), trial.prompts.unused
    left, right = np.full((6, 4), unused), np.full((6, 8), unused)
    for row, answer in enumerate(answers):
        prompt = ids[row // 3]
        left[row, 4 - len(prompt) :], right[row, : len(answer)] = prompt, answer
    ends = {"pad_id": unused, "eos_id": unused}
    theirs = common.compute_per_token_logps(*nnx.split(actors["float32"]), left, right, **ends)
    ours = [x[len(x) - len(answer) :].copy() for x, answer in zip(scores, answers, strict=True)]
    for row, own in enumerate(ours):
        np.testing.assert_allclose(own, theirs[row, : len(own)], atol=1e-5)

    def exact_scores(given, given_texts, exact):
        assert (given, exact) == (engine.model, "bits")
        return [scores[texts.index(text)] for text in given_texts]

    monkeypatch.setattr(jspec, "score_tokens", exact_scores)
    engine: Any = SimpleNamespace(model=object())
    output = SimpleNamespace(tokens=answers, logprobs=ours)
    result = trial.compared([output], engine)
    assert result["differences"] == {"max": 0, "counts": [24] + [0] * 14}
    both = result["trainer_differences"]
    assert both["float32"] == result["differences"]
    assert both["bfloat16"]["max"] > 1e-3
    output.logprobs[1][6] += 0.05
    monkeypatch.setattr(speed, "SCORED", 4)
    found = trial.compared([output, output], engine)
    counts = found["differences"]["counts"]
    assert (counts[0], counts[11]) == (46, 2)  # of all answers
    counts = found["trainer_differences"]["float32"]["counts"]
    assert (counts[0], counts[11]) == (15, 1)  # of the first four
    assert differences._forward._cache_size() == programs + 2  # one for each dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_promotes")
@pytest.mark.parametrize("bias", [False, True])
def test_the_rival_has_the_weights_of_a_model(bias):
    """Also where it has biases, or no norms of queries and keys."""
    config = dataclasses.replace(OF_BYTES, qkv_bias=bias, family="qwen2" if bias else "llama")
    model, (_, tokenizer) = make_decoder(config), jspec.load_bundled()
    if bias:
        layer: Any = model.layers[0]
        bias_of = layer.attention.qkv.bias
        bias_of[...] = jax.random.normal(jax.random.key(1), bias_of.shape)
    prompts = tunix.Prompts.of(tokenizer, model, [[1, 2, 3], [70, 80]])
    settings = tunix.config_of(prompts, 5, temperature=0.0, top_p=None)
    output = tunix.sampler_of(tunix.actor_of(model), prompts, settings).generate(
        ["0", "1"], settings
    )
    params = jspec.SamplingParams(max_new_tokens=5, ignore_eos=True)
    plain = jspec.generate(model, prompts.ids, params, draft=None).tokens
    for one, other in zip(output.tokens, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="no model for gemma"):
        tunix.actor_of(make_decoder(dataclasses.replace(config, family="gemma")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_promotes", "small_bundled")
def test_a_row_of_grpo_has_its_parts(monkeypatch):
    monkeypatch.setattr(grpo, "SEEDS", 1)
    (row,) = rows("grpo", "answers=2,new=4,steps=2,target=1.0", "none")
    assert (row["compilations"], row["steps"]) == (0, [2])
    assert 0 < row["difference"] < 1e-4
    assert all(row[f"{part}_ms"] > 0 for part in grpo.PARTS)
    assert 0 < max(row["rewards"][0]) < 1
