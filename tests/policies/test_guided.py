"""What a guided policy picks: against the top of means that are written out one by one."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, StripedLayout
from jspec.config import LayerSpec
from jspec.decode.draft import GuidedDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.policies import Dense, Guided, SparseSpec, SpecExtend, Vegas, named_policy
from jspec.policies.attend import run_selected
from jspec.policies.collect import Collecting, CollectingAttend, picks
from jspec.policies.dense import DenseAttend
from jspec.policies.guided import Guidance, mean_query
from jspec.policies.policy import create_cache
from jspec.policies.prepare import prepare_params
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts
from tests.parameters import default_run
from tests.policies.common import BATCH, CAPACITY, LENGTHS, SPEC, arrays_of, filled, random

SOME: dict[str, Any] = {"budget": 5, "least": 0}
GUIDED = {
    "ends": Vegas(**SOME),
    "all-per-head": Vegas(**SOME, collect="all", per_head=True),
    "accepted": Vegas(**SOME, collect="accepted"),
    "last-weight": Vegas(**SOME, collect="last", score="weight"),
    "ends-weight": Vegas(**SOME, score="weight"),
    "ratio": Vegas(budget=0.3, least=2, sinks=1, recent=1),
    "softmax": Vegas(**SOME, score="softmax"),
    "last-softmax": Vegas(**SOME, collect="last", score="softmax"),
    "last-softmax-per-head": Vegas(**SOME, collect="last", score="softmax", per_head=True),
    "ahead": Vegas(**SOME, ahead=2),
    "softmax-ahead": Vegas(**SOME, collect="all", score="softmax", ahead=1, sinks=1, recent=1),
    "weight-ahead-per-head": SparseSpec(**SOME, ahead=3),
    "sparsespec": SparseSpec(**SOME),
    "specextend": SpecExtend(budget=12, least=0, page=4),
}
# The second row drafted one token of the three, the last one none.
DRAFTED, ACCEPTED = (3, 1, 0), (2, 1, 0)
POSITIONS = np.array(
    [[n + i if i <= d else -1 for i in range(4)] for n, d in zip(LENGTHS, DRAFTED, strict=True)]
)


def tokens_that_score(policy: Guided, row: int) -> list[int]:
    return {
        "ends": sorted({0, DRAFTED[row]}),
        "all": list(range(DRAFTED[row] + 1)),
        "accepted": list(range(ACCEPTED[row] + 1)),
        "last": [ACCEPTED[row]],
    }[policy.collect]


def expected_picks(policy: Guided, q, keys, sinks, row: int) -> list[set[int]]:
    """The positions that each KV head reads, from logits or softmax weights of every query.

    Of the weights a sink of each head, ``sinks [N]``, takes its share.
    """
    context_len = int(LENGTHS[row])
    means = np.zeros((2, context_len))
    for head in range(4):
        for token in tokens_that_score(policy, row):
            logits = (
                keys[row, : context_len + token + 1, head // 2] @ q[row, token, head] / np.sqrt(8)
            )
            weights = np.exp(logits) / (np.exp(logits).sum() + np.exp(sinks[head]))
            means[head // 2] += (weights if policy.score == "weight" else logits)[:context_len]
    if policy.score == "softmax":
        means /= 2 * len(tokens_that_score(policy, row))
        means = np.exp(means) / np.exp(means).sum(axis=1, keepdims=True)
    return best_of(policy, means, context_len)


def best_of(policy: Guided, means, context_len: int) -> list[set[int]]:
    """What each KV head reads, by its scores ``[K, context_len]``; ties go to the first."""
    if not policy.per_head:
        means = np.broadcast_to(means.sum(axis=0), means.shape)
    if policy.ahead:
        means = np.array(
            [[m[max(p - policy.ahead, 0) : p + 1].max() for p in range(context_len)] for m in means]
        )
    size = policy.page_size
    starts = range(0, context_len, size)
    means = np.array([[m[s : s + size].mean() for s in starts] for m in means])
    last, count = means.shape[1] - 1, int(policy.budget) // size
    if isinstance(policy.budget, float):
        count = max(math.ceil(policy.budget * context_len), policy.least)
    positions = []
    for scores in means:
        forced = {p for p in (0, last) if p >= 0 and (policy.sinks or (size > 1 and p == last))}
        order = sorted(range(len(scores)), key=lambda p: (p not in forced, -scores[p]))
        pages = order[:count]
        positions.append(
            {p for s in pages for p in range(s * size, min((s + 1) * size, context_len))}
        )
    return positions


LINEAR = LinearLayout(CAPACITY)
EACH = {name: (name, LINEAR) for name in GUIDED}
EACH |= {
    f"{name}-striped": (name, StripedLayout(CAPACITY, 3, 2))
    for name in ("ends", "ratio", "sparsespec")
}
# Each score, each choice of tokens that score, pages, and a layout where slots are not positions.
FIRST = ("all-per-head", "accepted", "last-weight", "softmax", "weight-ahead-per-head")
FIRST += ("specextend", "ratio-striped")


@pytest.mark.parametrize(("name", "layout"), default_run(EACH, *FIRST))
def test_it_picks_the_highest_means(name, layout):
    """In ragged rows, one of them without a past, with NaN in all slots that hold nothing."""
    policy = GUIDED[name]
    cache = filled(Dense(), layout, junk=np.nan)
    positions, accepted = np.array(POSITIONS, np.int32), np.array(ACCEPTED, np.int32)
    q, k, v = random(BATCH, 4, 4, 8, seed=5), random(BATCH, 4, 2, 8), random(BATCH, 4, 2, 4)
    sinks = np.float32([9.0, -9.0, 0.0, 3.0])

    @jax.jit
    def run(q, k, v, cache):
        attend = CollectingAttend(positions, policy=policy)
        out, after = attend(0, q, k, v, Collecting(cache), sinks=jnp.asarray(sinks))
        picked = picks(policy, after.cache, after.collected, positions, accepted)
        dense, _ = DenseAttend(positions)(0, q, k, v, cache, sinks=jnp.asarray(sinks))
        return (out, dense), keys_of(after.cache), picked

    def keys_of(cache):
        return jnp.take(cache.keys(0), layout.slots(jnp.arange(CAPACITY, dtype=jnp.int32)), axis=1)

    outs, keys, (picked,) = run(q, k, v, cache)
    np.testing.assert_allclose(*outs, atol=2e-6)
    keys = np.float64(keys)
    picked = np.asarray(picked)
    assert picked.ndim == 2 + policy.per_head
    for row in range(BATCH):
        per_head = picked[row] if policy.per_head else np.stack([picked[row]] * 2)
        right = expected_picks(policy, np.float64(q), keys, np.float64(sinks), row)
        for got, best in zip(per_head, right, strict=True):
            got = got[got >= 0].tolist()
            assert len(set(got)) == len(got)
            assert set(got) == best


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])
def test_layers_that_are_alike_select_together(per_head):
    """Layers 0 and 2 have a layout in common, 1 has another one, and 3 other heads."""
    layouts = [LINEAR, StripedLayout(CAPACITY, 3, 2), LINEAR, LINEAR]
    specs = [SPEC, SPEC, SPEC, dataclasses.replace(SPEC, kv_heads=1)]
    cache = create_cache(Dense(), specs, layouts, BATCH, jnp.float32)
    scores = {i: random(BATCH, x.kv_heads, CAPACITY, seed=i) for i, x in enumerate(specs)}
    policy, ends = Vegas(**SOME, per_head=per_head), jnp.array(LENGTHS, jnp.int32)
    picked = jax.jit(lambda scores: policy.pick(scores, cache, ends))(scores)
    assert picked.keys() == scores.keys()
    for layer, positions in picked.items():
        slots = layouts[layer].slots(np.arange(CAPACITY, dtype=np.int32))
        in_order = np.asarray(scores[layer])[..., np.asarray(slots)]
        by_list = in_order if per_head else in_order.sum(axis=1, keepdims=True)
        lists = np.asarray(positions).reshape(*by_list.shape[:2], -1)
        for row, end in enumerate(LENGTHS):
            for of_list, got in zip(by_list[row, :, :end], lists[row], strict=True):
                assert set(got[got >= 0]) == set(np.argsort(-of_list)[:5])


REFRESHED = {
    "refreshed": Vegas(**SOME, refresh=1, score="softmax"),
    "refreshed-ratio": Vegas(budget=0.3, least=2, sinks=1, recent=1, refresh=1),
    "refreshed-more-than-there-is": SparseSpec(budget=100, least=0, refresh=9),
    "refreshed-ahead-per-head": SparseSpec(**SOME, ahead=2, refresh=1),
    "refreshed-pages": SpecExtend(budget=12, least=0, page=4, refresh=1),
}


@pytest.mark.parametrize(
    "layout", [LinearLayout(CAPACITY), StripedLayout(CAPACITY, 3, 2)], ids=["", "striped"]
)
@pytest.mark.parametrize("name", REFRESHED)
def test_it_picks_again_by_shared_bits(name, layout):
    """Below where the last verification began, and all since; the last row has no past."""
    policy = REFRESHED[name]
    hata = policy.cache_policy
    cache, hashes = filled(hata, layout, junk=np.nan), arrays_of(hata)
    since = np.array([[16, 17, 18, 19, -1], [-1] * 5, [-1] * 5], np.int32)
    q = random(BATCH, 1, 4, 8, seed=5)
    policy_params = Guidance((None,), jnp.asarray(since), hashes)
    select = jax.jit(lambda *args: policy.select(args[0], 0, *args[1:]).positions)
    selected = np.asarray(select(policy_params, cache, q, cache.lengths))
    keys, w = np.float64(random(BATCH, CAPACITY, 2, 8, seed=1)), np.float64(hashes[0])
    for row, begin in enumerate((16, 3, 0)):
        bits = [keys[row, :begin, h] @ w[h] > 0 for h in range(2)]
        query_bits = [np.float64(q[row, 0, n]) @ w[n // 2] > 0 for n in range(4)]
        shared = [(bits[n // 2] == query_bits[n]).sum(axis=-1) for n in range(4)]
        shared = np.array([shared[0] + shared[1], shared[2] + shared[3]])
        per_head = selected[row] if policy.per_head else np.stack([selected[row]] * 2)
        for got, best in zip(per_head, best_of(policy, shared, begin), strict=True):
            got = got[got >= 0].tolist()
            assert len(set(got)) == len(got)
            assert set(got) == best | {p for p in since[row].tolist() if p >= 0}


def test_layers_that_follow_read_what_their_leader_picks_again():
    """A dense first layer and one with a window keep no codes."""
    windows = (None, None, 4, None, None, None)
    layers = tuple(dataclasses.replace(TINY.layers[0], window=w) for w in windows)
    model = make_decoder(dataclasses.replace(TINY, layers=layers), seed=3)
    policy = Vegas(**SOME, refresh=2, every=2, dense_layers=1)
    config = StepConfig(3, GuidedDraft(policy))
    models = Models(model, policy=prepare_params(config.cache_policy, model))
    state = start_decoding(models, prompts((30, 7)), config=config)
    assert ["codes" in x for x in state.cache.columns] == [False, True, False, True, True, True]
    _, policy_params = config.draft.view(models, state.draft, state.cache)

    @jax.jit
    def read(models, policy_params, state):
        tokens, context_len = state.last_token[:, None], state.cache.lengths
        args = (models.target, tokens, context_len[:, None], state.cache, context_len, 3)
        return run_selected(*args, policy=policy, policy_params=policy_params.for_refresh())[2]

    selections = read(models, policy_params, state)
    assert [x is None for x in selections] == [True, False, True, False, False, False]
    np.testing.assert_array_equal(selections[1], selections[3])
    np.testing.assert_array_equal(selections[4], selections[5])
    assert not np.array_equal(selections[1], selections[4])
    after = policy_params.with_selections(selections).read
    assert [x is None for x in after] == [True, False, True, True, False, True]
    np.testing.assert_array_equal(after[4], selections[4])


def test_the_first_draft_reads_first_and_last_positions():
    context_len = jnp.array([100, 12, 0], jnp.int32)
    first = np.asarray(Vegas(budget=0.1, least=8).initial_selection(2, 200, context_len))
    rows = [set(row[row >= 0].tolist()) for row in first]
    assert rows == [{0, 1, 2, 3, *range(94, 100)}, {0, 1, 2, 3, *range(8, 12)}, set()]
    assert Vegas(per_head=True).initial_selection(2, 200, context_len).shape == (3, 2, 200)
    (few,) = Vegas(budget=2, least=0, recent=1).initial_selection(2, 200, context_len[:1])
    assert sorted(few.tolist()) == [0, 99]


@pytest.mark.parametrize(
    ("settings", "leaders"),
    [
        ({}, (0, 1, None, 3, 4, 5)),
        ({"dense_layers": 1}, (None, 1, None, 3, 4, 5)),
        ({"every": 2}, (0, 0, None, 3, 3, 5)),
        ({"every": 9}, (0, 0, None, 0, 0, 0)),
        ({"every": 9, "per_head": True}, (0, 0, None, 0, 4, 4)),
    ],
    ids=str,
)
def test_layers_that_pick_and_layers_that_follow(settings, leaders):
    """The third layer has a sliding window; the last two have other KV heads."""
    spec = LayerSpec(kv_heads=2, key_size=8, value_size=8)
    windowed, heads4 = (dataclasses.replace(spec, **x) for x in ({"window": 4}, {"kv_heads": 4}))
    assert Vegas(**settings).leaders([spec, spec, windowed, spec, heads4, heads4]) == leaders


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (Vegas, {"collect": "some"}, "collect='some' must be one of ends, all, accepted, last"),
        (Vegas, {"score": "norm"}, "score='norm' must be one of logit, softmax, weight"),
        (Vegas, {"least": -1}, "least=-1 must be at least 0"),
        (Vegas, {"ahead": -1}, "ahead=-1 must be at least 0"),
        (Vegas, {"refresh": -1}, "refresh=-1 must be at least 0"),
        (SpecExtend, {"ahead": 1}, "ahead=1 goes with single positions"),
        (SpecExtend, {"page": 0}, "page=0 must be at least 1 position"),
    ],
    ids=["collect", "score", "least", "ahead", "refresh", "pages-ahead", "page"],
)
def test_bad_settings_are_refused(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        policy(**settings)


def test_it_is_no_policy_to_read_by():
    with pytest.raises(ValueError, match="policy 'vegas' reads what verification attended to"):
        named_policy("vegas")


def test_the_pooled_query_is_the_mean_of_the_scoring_tokens():
    """A token that scores twice counts once; the query of padding, a NaN, does not count."""
    q = np.array(random(3, 4, 6, 5))
    q[1, 3] = q[2] = np.nan
    scoring = [[0, 2], [1, 1], [-1, -1]]
    means = mean_query(jnp.asarray(q), jnp.asarray(scoring), 2)
    heads = q.reshape(3, 4, 2, 3, 5)
    expected = [heads[0, [0, 2]].mean(axis=(0, 2)), heads[1, 1].mean(axis=1), np.zeros((2, 5))]
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)
