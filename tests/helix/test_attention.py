"""Attention on a KVP x TPA mesh against numpy's, row by row, over 8 virtual devices."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jspec
from jspec.cache import Cache, StripedLayout
from jspec.config import LayerSpec
from jspec.cuda_ffi import all_to_all as cuda
from jspec.helix import HelixConfig, cache_specs, layouts_on, part_of, whole_of
from jspec.helix.attention import all_to_all_merge
from jspec.helix.mesh import STRATEGIES, Strategy
from jspec.ops.attention.dense import attention
from jspec.ops.attention.merge import merge_attention
from jspec.policies.read import in_slots, selected_columns
from jspec.policies.selection import Selection
from tests.parameters import default_run

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
BLOCK, SIZE = 4, 8
# Shards without a token, blocks that end before, in and after a pass.
LENGTHS = (0, 1, 3, 4, 15, 30, 37)
HEADS = {"gqa": (8, 2), "mha": (8, 8), "mqa": (8, 1), "gqa4": (16, 4)}
LATENT, MAPPED = 6, 5  # channels of the keys that are values, and of what a head makes of them
MESHES = [(k, t) for k in (1, 2, 4, 8) for t in (1, 2, 4, 8) if k * t in (1, 2, 4, 8)]
FIRST = (  # each mesh, head layout and T occurs, and what crosses most blocks
    *((8, 1, "mqa", 9), (4, 2, "gqa", 4), (2, 4, "gqa4", 9), (1, 8, "mha", 1)),
    *((2, 1, "gqa", 1),),
)
EVERY = [
    (kvp, tpa, heads, tokens)
    for (kvp, tpa), heads, tokens in itertools.product(MESHES, HEADS, (1, 4, 9))
    if tpa <= HEADS[heads][1]
]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def reference(q, k, v, begin: int, window: int | None = None, sinks=None) -> np.ndarray:
    """One row: ``q [T, N, H]`` at positions from ``begin`` on over ``k, v [S, K, H]``.

    A sink of each head, ``sinks [N]``, takes its share of the softmax.
    """
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1).astype(np.float64) for x in (k, v))
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for token in range(len(q)):
        last = begin + token + 1
        first = 0 if window is None else max(last - window, 0)
        scores = np.einsum("nh,snh->ns", q[token], k[first:last]) / np.sqrt(q.shape[-1])
        weights = np.exp(scores)
        of_sinks = 0 if sinks is None else np.exp(np.float64(sinks))[:, None]
        weights /= weights.sum(axis=1, keepdims=True) + of_sinks
        out[token] = np.einsum("ns,snh->nh", weights, v[first:last])
    return out


def attended(
    helix: HelixConfig, spec: LayerSpec, q, k, v, lengths, tokens: int, up=None, sinks=None
):
    """``q`` of ``tokens`` after each of ``lengths``, in a cache that was poisoned before.

    The prefix comes in two passes, whose queries are its keys; then a draft that is rejected, and
    what takes its place. Outputs of the prefix, of ``q``, and the cache. With ``up``, the map of
    latent attention's values, ``v`` is in the keys, and there are no ``sinks [N]``.
    """
    specs, capacity = (spec,), k.shape[1]
    layouts = layouts_on(helix, specs, capacity, tokens - 1)
    begin = np.array(lengths, np.int32)

    def poisoned():
        cache = Cache.create(specs, layouts, len(lengths), jnp.float32)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.ndim == 4 else x, cache)

    def body(cache, q, k, v, sinks):
        cache = part_of(helix, cache)
        half = capacity // 2

        def run(q, k, v, positions, cache):
            attend: Any = jspec.policies.DenseAttend(positions)
            if up is None:
                return attend(0, q, k, v, cache, sinks=sinks)
            return attend(0, q, k, None, cache, up=jnp.asarray(up))

        prefix = []
        group = q.shape[2] // k.shape[2]
        for start in (0, half):
            index = start + jnp.arange(half, dtype=jnp.int32)[None]
            where = jnp.where(index < begin[:, None], index, -1)
            part = slice(start, start + half)
            queries = jnp.repeat(k[:, part], group, axis=2)
            outputs, cache = run(queries, k[:, part], v[:, part], where, cache)
            prefix.append(outputs)
        where = begin[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        new_k, new_v = (jnp.take_along_axis(x, where[..., None, None], axis=1) for x in (k, v))
        _, cache = run(q, -new_k, 3 * new_v, where, cache)
        out, cache = run(q, new_k, new_v, where, cache)
        return jnp.concatenate(prefix, axis=1), out, whole_of(helix, cache)

    spec_of = cache_specs(helix, jax.eval_shape(poisoned))
    heads = P(None, None, "tpa")
    run = jax.shard_map(
        body,
        mesh=helix.mesh,
        in_specs=(spec_of, heads, heads, heads, P("tpa")),
        out_specs=(*[P(None, None, helix.axes)] * 2, spec_of),
    )
    return jax.jit(lambda *arrays: run(poisoned(), *arrays))(q, k, v, sinks)


def check(kvp, tpa, heads, tokens, strategy: Strategy = "helix", window=None) -> None:
    num_heads, kv_heads = HEADS[heads]
    helix = HelixConfig(kvp=kvp, tpa=tpa, block=BLOCK, strategy=strategy)
    spec = LayerSpec(kv_heads=kv_heads, key_size=SIZE, value_size=SIZE, window=window)
    helix.check_layer(0, num_heads, spec)
    rows = len(LENGTHS)
    q, k, v = (
        random(rows, *shape, seed=i)
        for i, shape in enumerate(
            [(tokens, num_heads, SIZE), (64, kv_heads, SIZE), (64, kv_heads, SIZE)]
        )
    )
    sinks = random(num_heads, seed=3)
    *passes, cache = attended(helix, spec, q, k, v, LENGTHS, tokens, sinks=sinks)
    prefix, out = map(np.asarray, passes)
    for row, length in enumerate(LENGTHS):
        right = reference(q[row], k[row], v[row], length, window, sinks)
        np.testing.assert_allclose(out[row], right, rtol=1e-5, atol=1e-5)
        queries = np.repeat(k[row, :length], num_heads // kv_heads, axis=1)
        right = reference(queries, k[row], v[row], 0, window, sinks)
        np.testing.assert_allclose(prefix[row, :length], right, rtol=1e-5, atol=1e-5)
    # Every device holds its share and no more.
    slots = 64 if window is None else min(window + tokens, 64)
    rounded = -(-slots // (BLOCK * helix.stripes)) * BLOCK if helix.stripes > 1 else slots
    shares = {x.data.shape for x in cache.keys(0).addressable_shards}
    assert shares == {(rows, rounded, kv_heads // tpa, SIZE)}


@pytest.mark.parametrize(
    ("kvp", "tpa", "heads", "tokens"), default_run(FIRST, "4-2-gqa-4"), ids=str
)
def test_attention_is_that_of_one_device(kvp, tpa, heads, tokens):
    check(kvp, tpa, heads, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tpa", "heads", "tokens"), EVERY, ids=str)
def test_attention_is_that_of_one_device_on_every_mesh(kvp, tpa, heads, tokens):
    check(kvp, tpa, heads, tokens)


FIRST_OF_LATENTS = ((8, 4, "after"), (2, 9, "before"))
MORE_OF_LATENTS = sorted(
    {*itertools.product((1, 2, 4, 8), (1, 4, 9), ("before", "after"))} - {*FIRST_OF_LATENTS}
)


@pytest.mark.parametrize(
    ("kvp", "tokens", "where"),
    [
        *default_run(FIRST_OF_LATENTS, "2-9-before"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_OF_LATENTS),
    ],
    ids=str,
)
def test_latent_attention_is_that_of_one_device(kvp, tokens, where):
    """All heads read one latent a token, whose values go through a map of each head's own."""
    helix = HelixConfig(kvp=kvp, block=BLOCK, up_projection=where)
    spec = LayerSpec(1, SIZE, LATENT, values_in_keys=True)
    helix.check_layer(0, 8, spec)
    rows = len(LENGTHS)
    q, k = random(rows, tokens, 8, SIZE), random(rows, 64, 1, SIZE, seed=1)
    up = random(8, LATENT, MAPPED, seed=2)
    *passes, cache = attended(helix, spec, q, k, k, LENGTHS, tokens, up)
    prefix, out = map(np.asarray, passes)

    def right(q, k, begin):
        read = reference(q, k, k[..., :LATENT], begin)
        return np.einsum("tnv,nvh->tnh", read, up.astype(np.float64))

    for row, length in enumerate(LENGTHS):
        expected = right(q[row], k[row], length)
        np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-5)
        expected = right(np.repeat(k[row, :length], 8, axis=1), k[row], 0)
        np.testing.assert_allclose(prefix[row, :length], expected, rtol=1e-5, atol=1e-5)
    assert cache.columns[0].keys() == {"keys"}
    shares = {x.data.shape for x in cache.keys(0).addressable_shards}
    assert shares == {(rows, 64 // kvp, 1, SIZE)}


@pytest.mark.parametrize(
    ("kvp", "tpa", "kv_heads"),
    [(kvp, tpa, heads) for kvp, tpa in MESHES for heads in (1, 2, 4) if tpa > heads],
    ids=str,
)
def test_more_devices_than_key_value_heads_are_refused(kvp, tpa, kv_heads):
    """With the mesh to take instead, which is not refused; latents are one key-value head."""
    latent = {"value_size": LATENT, "values_in_keys": kv_heads == 1}
    spec = LayerSpec(kv_heads, SIZE, **latent)
    instead = rf"hold copies of the cache; .* kvp={kvp * tpa // kv_heads}, tpa={kv_heads}$"
    with pytest.raises(ValueError, match=rf"tpa={tpa} is more than the {kv_heads} .*{instead}"):
        HelixConfig(kvp=kvp, tpa=tpa).check_layer(0, 8, spec)
    HelixConfig(kvp=kvp * tpa // kv_heads, tpa=kv_heads).check_layer(0, 8, spec)


@pytest.mark.parametrize("strategy", default_run(STRATEGIES[1:], "gather"))
def test_what_helix_is_compared_with_is_as_exact(strategy):
    """Two of four devices would hold copies of a key-value head under tensor parallelism."""
    check(2, 2, "gqa", 4, strategy)


@pytest.mark.parametrize(
    ("kvp", "tpa", "tokens", "window"),
    [
        (4, 2, 4, 13),
        *(pytest.param(*case, 6, marks=pytest.mark.slow) for case in [(1, 2, 4), (8, 1, 9)]),
        *(pytest.param(2, 1, 9, n, marks=pytest.mark.slow) for n in (1, 7, 8, 20, 50, 64)),
    ],
)
def test_a_layer_with_a_sliding_window_keeps_a_ring_on_each_rank(kvp, tpa, tokens, window):
    """The prefix and the rejected draft wrap it, and a pass crosses owners."""
    check(kvp, tpa, "gqa", tokens, window=window)


def merged_on_a_mesh(outs, lses, by) -> tuple[Any, Any]:
    """The parts ``outs [4, B, T, N, H]`` of four ranks, merged on a mesh of eight devices."""
    helix = HelixConfig(kvp=4, tpa=2, exchange=by)
    if reason := helix.refuses_all_to_all():
        pytest.skip(reason)
    run = jax.shard_map(
        lambda out, lse: all_to_all_merge(out[0], lse[0], "kvp", by),
        mesh=helix.mesh,
        in_specs=(P("kvp", None, None, "tpa"), P("kvp", None, None, "tpa")),
        out_specs=P(None, None, helix.axes),
    )
    return jax.jit(run)(outs, lses)


@pytest.mark.parametrize(
    ("dtype", "by"), [("float32", "xla"), ("bfloat16", "xla"), ("bfloat16", "cuda")]
)
def test_the_merge_has_the_bits_of_one_device(dtype, by):
    """The same parts, merged on one device: ranks are summed in order, and no bit is lost."""
    outs = jnp.asarray(random(4, 2, 3, 16, SIZE), dtype)
    lses = random(4, 2, 3, 16, seed=1) * 20
    lses[1] = -np.inf  # a rank without a token, and a query that no rank has a key for
    lses[:, 0, 1] = -np.inf
    merged, alone = merged_on_a_mesh(outs, lses, by), jax.jit(merge_attention)(outs, lses)
    for x, y in zip(merged, alone, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert not np.isnan(np.asarray(merged[0], np.float32)).any()


@pytest.mark.parametrize(
    ("size", "limit", "launches"),
    [(SIZE, 8 * 40, 1), (SIZE + 1, 2**20, 0), (SIZE, 8 * 39, 0)],
    ids=["one kernel", "no whole lines", "too large"],
)
def test_cuda_sums_parts_of_equal_weight_in_the_order_of_ranks(size, limit, launches, monkeypatch):
    """To the bit: shares of a fourth are exact, and other orders have other sums.

    A rank gets two heads of four tokens: 40 lines of 8 bytes.
    """
    monkeypatch.setattr(cuda, "MAX_BYTES", limit)
    outs, lses = random(4, 2, 2, 16, size) * 100, np.zeros((4, 2, 2, 16), np.float32)
    expected = functools.reduce(np.add, outs / 4)
    assert (functools.reduce(np.add, outs[::-1] / 4) != expected).any()
    out, lse = merged_on_a_mesh(outs, lses, "cuda")
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(lse, np.log(np.float32(4)), rtol=1e-6)
    text = str(jax.make_jaxpr(functools.partial(merged_on_a_mesh, by="cuda"))(outs, lses))
    assert text.count("jspec_all_to_all_merge") == launches


def test_a_rank_attends_as_one_device_does_to_its_part():
    """Slots up to a number stand for positions up to the query's: no mask by position is needed."""
    helix, spec = HelixConfig(kvp=4, block=BLOCK), LayerSpec(1, SIZE, SIZE)
    whole = layouts_on(helix, (spec,), 64, 0)[0]
    assert isinstance(whole, StripedLayout)
    layout = whole.part("kvp")
    positions = jnp.asarray([[-1, 0, 3, 4, 16, 17, 40, 63]], jnp.int32)
    q, k, v = (random(1, n, 1, SIZE) for n in (8, 16, 16))

    def body(q, k, v):
        by_slots = attention(q, k, v, layout.last_slots(positions))
        newest = jnp.asarray([63], jnp.int32)
        by_positions = attention(q, k, v, positions, key_positions=layout.slot_positions(newest))
        return jax.tree.map(lambda x: x[None], (by_slots, by_positions))

    run = jax.shard_map(body, mesh=helix.mesh, in_specs=P(), out_specs=P("kvp"))
    (out, lse), (right, right_lse) = jax.jit(run)(q, k, v)
    np.testing.assert_allclose(out, right, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)
    assert (np.asarray(lse)[1:, 0, 1] == -np.inf).all()  # position 0 is on rank 0 alone


@pytest.mark.parametrize(("size", "wraps"), [(64, False), (32, True)], ids=["row", "ring"])
def test_stripes_on_a_device_are_its_part_of_the_whole(size, wraps):
    helix = HelixConfig(kvp=4, block=BLOCK)
    spec = LayerSpec(1, SIZE, SIZE, window=17 if wraps else None)
    whole = layouts_on(helix, (spec,), 61, 0)[0]
    assert isinstance(whole, StripedLayout)
    assert whole == StripedLayout(size, 4, BLOCK, wraps)
    positions = jnp.arange(-1, 64, dtype=jnp.int32)
    newest = jnp.asarray([-1, 0, 22, 63], jnp.int32)

    is_read_by_slots = []

    def body():
        layout = whole.part("kvp")
        for window in (None, 17):  # a window is one of positions
            local = dataclasses.replace(spec, window=window)
            cache = Cache.create((local,), (layout,), 1, jnp.float32)
            is_read_by_slots.append(in_slots(cache, 0, positions[None])[1] is None)
        slots = jnp.arange(layout.size, dtype=jnp.int32)
        parts = layout.slots(positions), layout.slot_positions(newest), layout.at(slots)
        read = selected_columns(cache, 0, Selection(positions[None]), positions[None])[1]
        return jax.tree.map(lambda x: x[None], (*parts, layout.last_slots(positions), read))

    run = jax.shard_map(body, mesh=helix.mesh, in_specs=(), out_specs=P("kvp"))
    slots, stored, at, last_slots, read = jax.device_get(jax.jit(run)())
    assert is_read_by_slots == [not wraps, False]
    np.testing.assert_array_equal(
        np.concatenate(list(stored), axis=1), whole.slot_positions(newest)
    )
    share = size // 4
    ranks, local = np.divmod(np.asarray(whole.slots(positions)), share)
    for rank in range(4):
        np.testing.assert_array_equal(slots[rank], np.where(ranks == rank, local, share))
        expected = np.where(ranks == rank, local, -1)  # another device has the others
        for of_positions in (read.selected, read.new):
            np.testing.assert_array_equal(of_positions[rank, 0], expected)
        assert read.counts[rank] == np.flatnonzero(expected >= 0)[-1] + 1
        if wraps:
            continue
        upto = [((at[rank] <= position) & (position >= 0)).sum() for position in range(-1, 64)]
        np.testing.assert_array_equal(last_slots[rank], np.array(upto) - 1)


def test_what_is_exchanged_is_one_message():
    """Outputs and log-sum-exp together, and nothing as large as the cache."""
    helix = HelixConfig(kvp=4, tpa=2)
    shapes = (
        jax.ShapeDtypeStruct((2, 3, 16, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 3, 16), jnp.float32),
    )
    run = jax.shard_map(
        functools.partial(all_to_all_merge, axes="kvp"),
        mesh=helix.mesh,
        in_specs=(P(None, None, "tpa"), P(None, None, "tpa")),
        out_specs=P(None, None, helix.axes),
        check_vma=False,
    )
    text = str(jax.make_jaxpr(run)(*shapes))
    assert text.count("all_to_all") == 1
    assert "u16[2,3,4,2,130]" in text
