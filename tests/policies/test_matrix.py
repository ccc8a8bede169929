"""Every policy: drafts that leave the output as it is, and reads of what it selected alone."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, StripedLayout
from jspec.config import SamplingParams
from jspec.decode.draft import SelfDraft
from jspec.decode.generation import generate
from jspec.ops.attention.dense import attention
from jspec.policies import POLICIES, Policy, Selection
from jspec.policies.attend import SelectedAttend
from jspec.policies.compact import Compact, CompactAttend
from jspec.policies.dense import DenseAttend
from jspec.policies.policy import create_cache
from tests.decode.common import prompts, requests
from tests.parameters import default_run
from tests.policies.common import (
    BATCH,
    CAPACITY,
    LENGTHS,
    MATRIX,
    SPEC,
    arrays_of,
    filled,
    query,
    random,
)

LAYOUTS = {"linear": LinearLayout(CAPACITY), "striped": StripedLayout(CAPACITY, 3, 2)}


def test_every_policy_of_the_table_is_in_the_matrix():
    # JAX computes with no array in the host's memory: `test_hata_off` has its own.
    kinds = {name: kind for name, kind in POLICIES.items() if name != "hata_off"}
    assert set(kinds) <= set(MATRIX)
    for name, kind in kinds.items():
        assert isinstance(MATRIX[name], kind)


@pytest.fixture(scope="module")
def plain(sharp):
    return generate(sharp, prompts(), requests(), draft=None)


WEIGHTED = {"magicpig weighted": dataclasses.replace(MATRIX["magicpig"], weights=True)}


# Drafts of these are in other tests, or have a sibling here.
ELSEWHERE = ("dense", "streaming", "exact_topk", "shared top-k", "hata", "norms", "magicpig")


@pytest.mark.parametrize(
    "name",
    default_run((*MATRIX, *WEIGHTED), "quest", slow=ELSEWHERE),
)
def test_as_a_drafter_it_leaves_greedy_tokens_as_they_are(name, plain, sharp):
    policy = (MATRIX | WEIGHTED)[name]
    policy_params = arrays_of(policy, sharp.config.layers)
    settings = {"draft": SelfDraft(policy), "policy_params": policy_params}
    got = generate(sharp, prompts(), requests(), gamma=3, **settings)
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


@functools.partial(jax.jit, static_argnums=0)
def select(policy, policy_params, cache, q):
    return policy.select(policy_params, 0, cache, q, cache.lengths).positions


@functools.partial(jax.jit, static_argnums=0)
def attend_selected(policy, policy_params, cache, q, k, v):
    positions = cache.lengths[:, None]
    attend = SelectedAttend(positions, cache.lengths, 3, policy=policy, policy_params=policy_params)
    return attend(0, q, k, v, cache)


masked = jax.jit(functools.partial(attention, implementation="xla"))


def selected_by(policy, cache, q) -> np.ndarray:
    """Which positions each KV head reads, bool ``[B, K, CAPACITY]``, the query's own included."""
    chosen = select(policy, arrays_of(policy), cache, q)
    itself = np.arange(CAPACITY)[None, None] == LENGTHS[:, None, None]
    if chosen is None:
        return np.broadcast_to(np.arange(CAPACITY) <= LENGTHS[:, None, None], (BATCH, 2, CAPACITY))
    chosen = np.asarray(chosen)
    chosen = chosen if chosen.ndim == 3 else np.repeat(chosen[:, None], 2, axis=1)
    read = (chosen[..., None] == np.arange(CAPACITY)).any(axis=2)
    return read | itself


@pytest.mark.parametrize(
    ("name", "layout"),
    default_run(
        itertools.product(MATRIX, LAYOUTS),
        *(f"{name}-linear" for name in MATRIX),
        "hata-striped",
        "quest-striped",
    ),
)
def test_attention_reads_what_it_selects(name, layout):
    """Against attention with everything that was not selected masked, a head at a time."""
    policy = MATRIX[name]
    cache = filled(policy, LAYOUTS[layout])
    q, k, v = query()
    out, after = jax.device_get(attend_selected(policy, arrays_of(policy), cache, q, k, v))

    read = selected_by(policy, cache, q)
    slots = np.asarray(LAYOUTS[layout].slots(jnp.arange(CAPACITY, dtype=jnp.int32)))
    q, keys, values = np.asarray(q), after.keys(0)[:, slots], after.values(0)[:, slots]
    for head in range(2):
        expected, _ = masked(
            q[:, :, 2 * head : 2 * head + 2],
            keys[:, :, head : head + 1],
            values[:, :, head : head + 1],
            LENGTHS[:, None],
            key_positions=np.where(read[:, head], np.arange(CAPACITY, dtype=np.int32), -1),
        )
        np.testing.assert_allclose(out[:, :, 2 * head : 2 * head + 2], expected, atol=2e-6)
    np.testing.assert_array_equal(keys[0, 20], k[0, 0])


@dataclasses.dataclass(frozen=True)
class Everything(Policy):
    """All positions, in each layer as in one with a window."""

    reads_queries = False

    def select(self, policy_params, layer, cache, q, context_len, budget_share=1.0):
        return Selection()


def test_a_compact_copy_of_a_whole_layer_has_its_committed_positions():
    cache = filled(MATRIX["dense"], LinearLayout(CAPACITY))
    compact = jax.jit(lambda cache: Compact.of(cache, Everything(), None, spare=1))(cache)
    index = np.arange(CAPACITY)[None]
    expected = np.where(index < LENGTHS[:, None], index, -1)
    np.testing.assert_array_equal(compact.positions[0][:, :-1], expected)
    np.testing.assert_array_equal(compact.positions[0][:, -1], LENGTHS)


def test_a_compact_copy_reads_what_the_cache_would():
    policy = MATRIX["streaming"]
    cache = filled(policy, LinearLayout(CAPACITY))
    compact = jax.jit(lambda cache: Compact.of(cache, policy, None, spare=3))(cache)

    @jax.jit
    def both(cache, compact, positions, left, q, k, v):
        attend = SelectedAttend(positions, LENGTHS, 3, policy=policy)
        return (
            attend(0, q, k, v, cache),
            CompactAttend(positions, left)(0, q, k, v, compact),
        )

    for step in range(3):
        positions = (LENGTHS + np.int32(step))[:, None]
        results = both(cache, compact, positions, np.int32(3 - step), *query(seed=10 * step))
        (expected, cache), (got, compact) = results
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", MATRIX)
def test_what_is_not_selected_never_reaches_an_output(name):
    """NaN in it, and in all slots that hold nothing, changes no bit."""
    policy = MATRIX[name]
    q, k, v = query()
    policy_params = arrays_of(policy)
    clean = filled(policy, LinearLayout(CAPACITY))
    expected, _ = attend_selected(policy, policy_params, clean, q, k, v)
    unread = ~selected_by(policy, clean, q)
    junk = np.where(np.swapaxes(unread, 1, 2)[..., None], np.float32(np.nan), np.float32(0))
    # What a policy scores by must stay as it is, or it would select something else.
    keys = np.asarray(clean.keys(0))
    keys = keys if name in ("shared top-k", "exact_topk") else keys + junk
    columns = clean.columns[0] | {"keys": keys, "values": np.asarray(clean.values(0)) + junk}
    got, _ = attend_selected(
        policy, policy_params, dataclasses.replace(clean, columns=(columns,)), q, k, v
    )
    np.testing.assert_array_equal(got, expected)


def test_sinks_and_a_projection_follow_their_formulae():
    """gpt-oss's sink takes its share of the softmax; ``up`` maps each head's output."""
    cache = filled(MATRIX["dense"], LinearLayout(CAPACITY))
    q, k, v = query()
    positions = jnp.asarray(LENGTHS)[:, None]
    sinks, up = random(4, seed=8), random(4, 4, 5, seed=9)
    out, _ = DenseAttend(positions)(0, q, k, v, cache, sinks=sinks, up=up)

    after = cache.append(0, positions, keys=k, values=v)
    for row, head in np.ndindex(BATCH, 4):
        visible = slice(0, LENGTHS[row] + 1)
        keys, values = (
            np.float64(x[row, visible, head // 2]) for x in (after.keys(0), after.values(0))
        )
        scores = keys @ np.float64(q[row, 0, head]) / np.sqrt(8)
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(np.float64(sinks[head])))
        np.testing.assert_allclose(
            out[row, 0, head], weights @ values @ np.float64(up[head]), atol=2e-5
        )


def test_requests_share_a_batch_whatever_drafts(sharp, plain):
    """A request alone gets the tokens it gets among others."""
    draft = SelfDraft(MATRIX["norms"])
    for row in (0, 5):
        got = generate(sharp, prompts()[row : row + 1], requests()[row], draft=draft)
        assert got.tokens == plain.tokens[row : row + 1]


def test_sampled_requests_keep_their_seed(sharp):
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    draft = SelfDraft(MATRIX["shared top-k"])
    first, again = (generate(sharp, prompts()[:2], params, draft=draft).tokens for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", ["hata", "loki", "quest"])
def test_a_layer_that_reads_all_there_is_keeps_nothing_to_select_by(name):
    """The first layer is dense, the third has a window; the second selects."""
    policy = dataclasses.replace(MATRIX[name], dense_layers=1)
    specs = [SPEC, SPEC, dataclasses.replace(SPEC, window=4)]
    cache = create_cache(policy, specs, [LinearLayout(CAPACITY)] * 3, 2, jnp.float32)
    columns_per_layer = [
        (*column, *page) for column, page in zip(cache.columns, cache.pages, strict=True)
    ]
    assert columns_per_layer[0] == columns_per_layer[2] == ("keys", "values")
    assert len(columns_per_layer[1]) > 2
