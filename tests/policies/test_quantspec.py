"""QuantSpec: 4 bits as numpy has them, what is read in them, and drafts that lose nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout, StripedLayout
from jspec.config import LayerSpec
from jspec.decode.convert_state import convert_state
from jspec.decode.draft import Chain, SelfDraft, SuffixDraft, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import PLAIN, StepConfig
from jspec.policies import QuantSpec
from jspec.policies.attend import SelectedAttend
from jspec.policies.dense import DenseAttend
from jspec.policies.policy import create_cache
from jspec.policies.quantspec import from_4_bits, in_4_bits
from tests.decode.common import prompts, requests
from tests.policies.common import random

SPEC = LayerSpec(kv_heads=2, key_size=8, value_size=4)
POLICY = QuantSpec(group=4)


def reference(x: np.ndarray, group: int) -> np.ndarray:
    """Each group of channels between its lowest and highest number, in 15 equal steps."""
    restored = np.empty(x.shape)
    for index in np.ndindex(*x.shape[:-1]):
        for at in range(0, x.shape[-1], group):
            part = x[*index, at : at + group].astype(np.float64)
            low, step = part.min(), (part.max() - part.min()) / 15
            codes = np.round((part - low) / step) if step else np.zeros(group)
            restored[*index, at : at + group] = low + step * codes
    return restored


def test_numbers_in_4_bits():
    x = np.array(random(2, 3, 2, 8, seed=3))
    x[0, 0, 0, :4] = 0.25  # a group of equal numbers
    there = jax.jit(in_4_bits, static_argnums=1)
    back_again = jax.jit(lambda x: from_4_bits(*in_4_bits(x, 4)))
    codes, scales = there(x, 4)
    assert (codes.shape, codes.dtype) == ((2, 3, 2, 4), jnp.uint8)
    assert scales.shape == (2, 3, 2, 2, 2)
    np.testing.assert_allclose(back_again(x), reference(x, 4), rtol=1e-5, atol=1e-6)
    half = x.astype(jnp.bfloat16)
    back = np.float64(back_again(half))
    spread = np.float64(half).reshape(2, 3, 2, 2, 4)
    # Half a step, and what bfloat16 leaves of the lowest number, the step and their sum.
    tolerance = (spread.max(-1) - spread.min(-1)) / 30 + 0.02 * np.abs(spread).max(-1)
    assert (
        np.abs(back - np.float64(half)) <= np.repeat(tolerance, 4, axis=-1).reshape(half.shape)
    ).all()


def attended(q, keys, values) -> np.ndarray:
    """Causal attention of the last tokens, of queries ``q [T, N, H]``, in float64."""
    keys, values = (np.repeat(np.float64(x), 2, axis=1) for x in (keys, values))
    logits = np.einsum("tnh,snh->tns", np.float64(q), keys) * keys.shape[-1] ** -0.5
    visible = np.arange(len(keys)) <= len(keys) - len(q) + np.arange(len(q))[:, None]
    weights = np.where(visible[:, None], np.exp(logits), 0)
    return np.einsum("tns,snh->tnh", weights / weights.sum(-1, keepdims=True), values)


def filled(layout, lengths) -> tuple[Cache, np.ndarray, np.ndarray]:
    """A layer with random tokens, NaN in unused slots, and these keys and values."""
    shape = len(lengths), layout.size, 2
    k, v = np.array(random(*shape, 8, seed=1)), np.array(random(*shape, 4, seed=2))
    return _filled(layout, np.array(lengths, np.int32), k, v), k, v


@functools.partial(jax.jit, static_argnums=0)
def _filled(layout, context_len, k, v) -> Cache:
    batch, size = k.shape[:2]
    cache = create_cache(POLICY, [SPEC], [layout], batch, jnp.float32)
    junk = {
        name: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in cache.columns[0].items()
    }
    index = jnp.arange(size, dtype=jnp.int32)[None]
    positions = jnp.where(index < context_len[:, None], index, -1)
    more = POLICY.encoder(None, 0)(k, v)
    cache = cache.replaced(0, **junk).append(0, positions, keys=k, values=v, **more)
    return cache.with_lengths(context_len)


@pytest.mark.parametrize(
    "layout", [LinearLayout(24), StripedLayout(24, 3, 2)], ids=["linear", "striped"]
)
def test_a_draft_reads_4_bits_and_new_tokens_as_they_are(layout):
    lengths = [20, 3, 0]
    cache, k, v = filled(layout, lengths)
    q = random(3, 2, 4, 8, seed=5)
    new_k, new_v = random(3, 2, 2, 8, seed=6), random(3, 2, 2, 4, seed=7)

    @jax.jit
    def run(cache, *new):
        positions = cache.lengths[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        return SelectedAttend(positions, cache.lengths, 2, policy=POLICY)(0, *new, cache)

    out, after = run(cache, q, new_k, new_v)
    for row, length in enumerate(lengths):
        keys, values = (
            np.concatenate([reference(x[row, :length], 4), np.asarray(new[row])])
            for x, new in ((k, new_k), (v, new_v))
        )
        np.testing.assert_allclose(out[row], attended(q[row], keys, values), rtol=2e-4, atol=2e-5)
    # The cache itself keeps its keys.
    slots = jax.jit(layout.slots)(np.arange(lengths[0]))
    keys = np.asarray(after.columns[0]["keys"])
    np.testing.assert_array_equal(keys[0, slots], k[0, : lengths[0]])


def test_verification_reads_the_cache_as_it_is():
    cache, k, v = filled(LinearLayout(24), [20, 3, 0])
    q, new_k, new_v = random(3, 1, 4, 8), random(3, 1, 2, 8, seed=6), random(3, 1, 2, 4, seed=7)

    @jax.jit
    def run(cache, *new):
        return DenseAttend(cache.lengths[:, None], policy=POLICY)(0, *new, cache)

    out, after = run(cache, q, new_k, new_v)
    keys, values = np.concatenate([k[0, :20], new_k[0]]), np.concatenate([v[0, :20], new_v[0]])
    np.testing.assert_allclose(out[0], attended(q[0], keys, values), rtol=1e-4, atol=1e-5)
    # The new token is kept in 4 bits too.
    columns = after.columns[0]
    got = jax.jit(from_4_bits)(columns["value_codes"], columns["value_scales"])[0, 20]
    np.testing.assert_allclose(got, reference(np.asarray(new_v[0, 0]), 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "draft",
    [
        SelfDraft(QuantSpec(group=8)),
        pytest.param(
            Chain(SuffixDraft(), SelfDraft(QuantSpec(group=8)), inner=2, rounds=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alone", "in-a-chain"],
)
def test_greedy_tokens_are_those_of_plain_decoding(draft, sharp):
    plain = generate(sharp, prompts(), requests(), draft=None)
    got = generate(sharp, prompts(), requests(), draft=draft, gamma=3)
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


def test_one_prefill_serves_it(tiny):
    config = StepConfig(3, SelfDraft(QuantSpec(group=8)))
    direct = start_decoding(tiny, prompts((9, 20)), config=config)
    got = convert_state(tiny, start_decoding(tiny, prompts((9, 20)), config=PLAIN), config)
    assert jax.tree.structure(got) == jax.tree.structure(direct)
    for expected, columns in zip(direct.cache.columns, got.cache.columns, strict=True):
        for name in expected:
            np.testing.assert_allclose(columns[name][1, :19], expected[name][1, :19], atol=1e-5)


def test_its_memory_is_what_the_docs_say():
    spec = LayerSpec(kv_heads=8, key_size=128, value_size=128)
    kinds = create_cache(QuantSpec(), [spec], [LinearLayout(64)], 1, jnp.bfloat16).columns[0]
    exact = sum(kinds[name].nbytes for name in ("keys", "values"))
    more = sum(x.nbytes for x in kinds.values()) - exact
    assert more / exact == 5 / 16
    assert more / (64 * 8) == 160


def test_what_cannot_be_is_said():
    assert named_draft("quantspec:group=16") == SelfDraft(QuantSpec(group=16))
    with pytest.raises(ValueError, match="group=3 must be an even number of channels"):
        QuantSpec(group=3)
    with pytest.raises(ValueError, match="group=32 must divide the key size 8"):
        QuantSpec().columns(0, SPEC)
    with pytest.raises(ValueError, match="this layer has them in its keys"):
        POLICY.columns(0, LayerSpec(1, key_size=8, value_size=4, values_in_keys=True))
