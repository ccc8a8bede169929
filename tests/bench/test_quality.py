"""The suite `quality`: what it asks for, what becomes of scores and answers, and its checks."""

import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import jspec
from bench import passes, quality, rejected
from bench.drafters import SAMPLING
from bench.real import check
from bench.settings import Settings
from jspec.decode.draft import Drafted
from jspec.eval.evaluate import Score
from jspec.eval.ruler_bytes import TASKS
from jspec.models.bundled import bundled_path
from jspec.models.hashes import save_hashes
from jspec.policies import Dense, Hata, Streaming
from tests.conftest import OF_BYTES, make_decoder

READ, DRAFT = quality.READING, quality.DRAFTING


def test_every_policy_reads_at_its_budget(monkeypatch):
    """With scores that follow from the settings; the model is not asked."""
    calls = []

    def evaluate_all(model, tokenizer, runs, questions, *, length, batch, on_batch):
        calls.append((runs, questions, length))
        budgets = [getattr(run.policy, "budget", 1.0) for run in runs]
        return [Score(100 * x, dict.fromkeys(TASKS, 100 * x), (1.0,), ("",), None) for x in budgets]

    monkeypatch.setattr(quality, "evaluate_all", evaluate_all)
    rows = list(READ.rows(READ.case("S=2K,questions=1"), Settings(quick=True)))
    ((runs, questions, length),) = calls
    assert (len(questions), length) == (len(TASKS), 2048)
    assert runs[0].policy == Dense()
    assert all(run.policy.hashes for run in runs if isinstance(run.policy, Hata))
    window = next(run.policy for run in runs if isinstance(run.policy, Streaming))
    assert window.window == 1 / 64, "of the context, the sinks included"
    sizes = {row["name"]: row["bytes"] for row in rows}
    assert {sizes[name] for name in quality.EQUAL_BYTES} == {16}
    assert (sizes["exact_topk"], sizes["dense"]) == (256, 0)
    assert next(row["score"] for row in rows if row["name"] == "hata") == 100 / 64
    rows = list(READ.rows(READ.case("S=2K"), Settings(only=("hata", "loki-16"))))
    assert len(rows) == 1 + 2 * (2 + 3)  # dense; two policies at two usual and three more budgets


def test_a_real_model_reads_by_trained_and_by_random_hashes(tmp_path, monkeypatch):
    """With keys of 16 channels, and the questions of RULER in the model's own template."""
    model = make_decoder(OF_BYTES)
    jspec.save_model(model, tmp_path / "tiny")
    shutil.copy(bundled_path() / "tokenizer.json", tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    specs = model.config.layers
    arrays = tuple(np.ones((spec.kv_heads, spec.key_size, 128), np.float32) for spec in specs)
    save_hashes(arrays, tmp_path / "hashes", {})
    asked = []

    def ruler_questions(tokenizer, tasks, length, examples, *, template):
        asked.append(
            (tasks, length, examples, template.render([{"role": "user", "content": "Hello"}]))
        )
        return []

    def evaluate_all(model, tokenizer, runs, questions, **settings):
        asked.append([run.policy for run in runs])
        return [Score(0.0, {}, (), (), None)] * len(runs)

    monkeypatch.setattr(quality, "ruler_questions", ruler_questions)
    monkeypatch.setattr(quality, "evaluate_all", evaluate_all)
    settings = Settings(quick=True, model=tmp_path / "tiny", hashes=tmp_path / "hashes")
    rows = list(READ.rows(READ.case("S=2K"), settings))
    (tasks, *size, text), policies = asked
    assert (len(tasks), size, text) == (11, [2048, 3], "<Hello>")
    by_name = {row["name"]: policy for row, policy in zip(rows, policies, strict=True)}
    assert by_name["hata"].hashes == str(tmp_path / "hashes")
    assert by_name["hata-random"] == Hata(budget=1 / 64)
    assert all(row["case"]["model"] == "tiny" for row in rows)
    sizes = {row["name"]: row["bytes"] for row in rows}
    assert {sizes[name] for name in (*quality.EQUAL_BYTES, "hata-random")} == {16}


def test_needles_are_counted_by_depth(monkeypatch):
    """Of two questions at each depth, a policy finds one in the first half of the text."""

    def evaluate_all(model, tokenizer, runs, questions, **settings):
        assert len(questions) == 2 * len(quality.DEPTHS)
        found = (1.0,) * len(questions), (1.0, 0.0) * 5 + (1.0, 1.0) * 6
        asked = [question.question for question in questions[::2]]
        places.extend(x.prompt.index(x.answers[0]) / len(x.prompt) for x in asked)
        return [Score(100.0, {}, each, (), None) for each in found[: len(runs)]]

    places = []
    monkeypatch.setattr(quality, "evaluate_all", evaluate_all)
    case = quality.NEEDLES.case("S=2K,questions=2")
    dense, hata = quality.NEEDLES.rows(case, Settings(only=("hata",)))
    assert list(dense["depths"]) == [f"{10 * depth}%" for depth in range(11)]
    assert set(dense["depths"].values()) == {100.0}
    assert list(hata["depths"].values()) == [50.0] * 5 + [100.0] * 6
    assert (hata["name"], hata["budget"]) == ("hata", 1 / 64)
    np.testing.assert_allclose(places, quality.DEPTHS, atol=0.1)


def test_acceptance_is_the_ratio_of_the_laws():
    rng = np.random.default_rng(0)
    target, draft = rng.normal(size=(2, 4, 9)), rng.normal(size=(2, 3, 9))
    tokens = rng.integers(0, 9, (2, 3))
    p, q = (softmax(x / 0.8, axis=-1) for x in (target[:, :3], draft))
    expected = [
        [min(1, p[b, t, x] / q[b, t, x]) for t, x in enumerate(row)] for b, row in enumerate(tokens)
    ]
    drafted = Drafted(jnp.asarray(tokens), jnp.full(2, 3), jnp.asarray(draft))
    shares = rejected.acceptance(drafted, jnp.asarray(target), 0.8)
    np.testing.assert_allclose(shares, expected, rtol=1e-5)
    assert 0 < (np.array(expected) < 1).mean() < 1


@pytest.mark.parametrize(("excess", "right"), [(0.0, True), (0.2, False)])
def test_probabilities_by_which_steps_did_not_accept_are_wrong(excess, right):
    """Steps of one row accept by probabilities that are lower than those told."""
    rng = np.random.default_rng(1)
    observed, rejections = [], []
    for _ in range(400):
        shares = rng.uniform(0.5, 0.8, 3)
        failed = np.append(rng.random(3) > shares - excess, True)
        accepted = int(failed.argmax())
        record = SimpleNamespace(drafted=np.array([3]), accepted=np.array([accepted]))
        observed.append((record, shares[None]))
        rejections += [shares[accepted]] if accepted < 3 else []
    row = rejected.figures_of(observed)
    assert row["checked"] is right
    assert row["rejected"] == len(rejections)
    assert row["mean"] == pytest.approx(np.mean(rejections))
    share = np.mean((np.array(rejections) >= 0.5) & (np.array(rejections) < 0.6))
    assert row["below"]["0.6"] == pytest.approx(share)
    assert sum(row["below"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_rejected_tokens_are_of_ordinary_steps(small_bundled, monkeypatch):
    """At a temperature at which the laws of draft and target differ."""
    monkeypatch.setitem(SAMPLING, rejected.SAMPLED, {"temperature": 0.02})
    case = rejected.REJECTED.case("S=128,texts=2,new=48,gamma=3,percent=2")
    (row,) = rejected.REJECTED.rows(case, Settings())
    assert (row["name"], row["checked"]) == ("vegas-first", True)
    assert row["rejected"] > 10


CASE = "S=128,texts=2,B=2,new=12,gamma=3"


@pytest.mark.slow
def test_drafters_are_compared_with_plain_decoding(small_bundled):
    rows = list(DRAFT.rows(DRAFT.case(CASE), Settings(only=("ngram", "vegas-first"))))
    assert [row["name"] for row in rows] == ["none", "vegas-first", "ngram"]
    plain, vegas, ngram = rows
    assert plain["length"] == 1
    assert {row["checked"] for row in rows} == {True}
    assert (vegas["compared"], vegas["flips"]) == (24, 0)
    assert "over vegas-first" not in vegas
    lengths = [np.divide(row["tokens"], row["steps"]) for row in (ngram, vegas)]
    assert ngram["over vegas-first"] == pytest.approx((lengths[0] - lengths[1]).mean())
    assert len(vegas["attempts_at"]) == 3


def test_answers_that_differ_are_wrong_and_the_error_is_that_of_pairs():
    rng = np.random.default_rng(0)
    steps, tokens = rng.integers(5, 20, 9), rng.integers(20, 60, 9)
    measured = {"tokens": tokens, "steps": steps, "attempts_at": [], "accepted_at": []}
    measured |= {"rows": 9, "identical_rows": 7, "compared": 300, "checked": False}
    reference = rng.uniform(1, 4, 9)
    figures = quality.figures_of(measured, reference)
    assert (figures["flips"], figures["reason"]) == (2, "its answers are not the model's")
    differences = tokens / steps - reference
    assert figures["over vegas-first"] == pytest.approx(differences.mean())
    assert figures["standard error"] == pytest.approx(differences.std(ddof=1) / 3)
    assert figures["length"] == pytest.approx(tokens.sum() / steps.sum())


def test_tokens_are_compared_up_to_the_first_that_differs():
    plain = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    answers = [[1, 2, 3], [4, 0, 0], [7, 8, 9]]

    def scorer(rows, texts, params):
        assert (rows, texts) == ([1, 1], [[4, 0], [4, 5]])
        return [np.array([[0.0, 0, 0], [x, 0, 0]]) for x in (-1.0, -1.2)]

    result = check.greedy(scorer, answers, plain, exact=False)
    assert (result["compared"], result["identical_rows"]) == (3 + 2 + 3, 2)
    assert result["flip_margins"] == pytest.approx([0.2])
    assert result["checked"]
    assert not check.greedy(scorer, answers, plain, exact=True)["checked"]


def test_where_nothing_can_be_exact_a_row_says_why(small_bundled):
    (row,) = DRAFT.rows(DRAFT.case(f"{CASE},exact=bits"), Settings(only=("ngram",)))
    assert row["checked"] is None
    assert "Triton needs an NVIDIA GPU" in row["reason"]


def test_cases_and_defaults(monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for benchmark in (READ, DRAFT):
            assert benchmark.grid(Settings())
    for benchmark, text in ((READ, "gamma=2"), (DRAFT, "questions=2"), (DRAFT, "rule=lax")):
        with pytest.raises(ValueError, match="must be one of"):
            benchmark.case(text)


def test_selections_are_those_of_the_mean_logit_of_all_heads():
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((3, 4, 8)), rng.standard_normal((20, 2, 8))
    selected = []
    for query in queries:
        logits = np.array([[key[head // 2] @ query[head] for head in range(4)] for key in keys])
        selected.append(set(np.argsort(logits.mean(axis=1))[-5:]))
    expected = [[len(a & b) / 5 for b in selected] for a in selected]
    np.testing.assert_allclose(quality.shared_selections(queries, keys, 5), expected)
    assert 0 < expected[0][1] < 1


def test_overlaps_are_means_over_layers_and_texts_by_gap(monkeypatch):
    """Each token selects one key: neighbours the same one, tokens two apart another."""
    asked = []

    def prefill(model, text, positions):
        asked.append((len(text), list(positions)))
        queries = np.eye(4, dtype=np.float32)[[0, 0, 1]][:, None]
        return SimpleNamespace(queries=[queries] * 2, keys=lambda layer: np.eye(4)[:, None])

    monkeypatch.setattr(quality, "prefill", prefill)
    case = quality.OVERLAPPING.case("S=4,texts=2,gamma=2,percent=25")
    (row,) = quality.OVERLAPPING.rows(case, Settings())
    assert asked == [(7, [4, 5, 6])] * 2
    assert (row["selected"], row["gap 1"], row["gap 2"]) == (1, 0.5, 0)


def test_positions_are_compared_with_the_same_ones_of_other_passes(monkeypatch):
    """By their likeliest tokens alone, in float32: rounding does not change these.

    In passes of four tokens the second row's third token has other ones.
    """

    def likeliest(logits, factors):
        tokens = logits.argmax(-1)
        tokens = tokens.at[1:, 2].add(1) if logits.shape[1] == 4 else tokens
        return jnp.stack([tokens] * 2, axis=-1)

    monkeypatch.setattr(passes, "digest", likeliest)
    monkeypatch.setattr(jspec, "load_model", lambda path, dtype: make_decoder(OF_BYTES))
    case = passes.PASSES.case("S=43,texts=8,B=8,exact=no")  # no multiple of the lengths
    plain, four, vegas = passes.PASSES.rows(case, Settings(only=("4", "vegas")))
    assert [(row["name"], row["batch"]) for row in (plain, four, vegas)] == [
        ("1", 8),
        ("4", 2),
        ("vegas", 1),
    ]
    assert (vegas["compared"], vegas["differing"], vegas["checked"]) == (8 * 43, 0, None)
    assert four["differing"] == len(range(2, 43, 4)) * 8 // 2
    assert four["first"][1] == 2
    with pytest.raises(ValueError, match=r"texts=5 must be a multiple of B=4"):
        passes.PASSES.case("texts=5,B=4")


def test_one_bit_of_a_logit_changes_both_sums():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 50)).astype(np.float32)
    factors = jnp.asarray(rng.integers(0, 2**32, (2, 50), dtype=np.uint32) | 1)
    sums = passes.digest(jnp.asarray(logits), factors)
    assert (sums.shape, sums.dtype) == ((3, 2), jnp.uint32)
    for bit in (0, 31):
        changed = logits.copy()
        changed.view(np.uint32)[1, 7] ^= np.uint32(1 << bit)
        differs = np.asarray(passes.digest(jnp.asarray(changed), factors) != sums)
        assert differs.tolist() == [[False, False], [True, True], [False, False]]
