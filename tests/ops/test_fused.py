"""Verification fused with packing or appending: the same as one after the other, everywhere."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.ops.cases import accepted_tokens, ragged_tokens
from jspec.ops.fused import (
    VERIFY_AND_APPEND,
    VERIFY_AND_PACK,
    verify_and_append,
    verify_and_pack,
)
from jspec.ops.verify import verify_greedy
from tests.ops.backends import every_backend, every_case, run_or_skip
from tests.ops.test_pack import assert_packed, random_kv

verify_alone = jax.jit(functools.partial(verify_greedy, implementation="xla"))


def placed(arguments):
    return jax.tree.map(jnp.asarray, arguments)


def assert_verified(got, tokens) -> np.ndarray:
    """Compare with the reference of verification alone; returns the accepted counts."""
    expected = verify_alone(*tokens)
    chex.assert_trees_all_equal(got, expected)
    return np.asarray(expected.accepted)


@every_backend(VERIFY_AND_PACK)
@every_case(VERIFY_AND_PACK)
def test_verify_and_pack(case, backend):
    *tokens, kv = case.arguments
    arguments = (*tokens, kv)
    verified, packed = run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *arguments)
    assert_packed(packed, np.asarray(kv), assert_verified(verified, tokens))


@every_backend(VERIFY_AND_PACK)
def test_verify_and_pack_of_int64_tokens(backend):
    with jax.enable_x64(True):
        tokens = placed(ragged_tokens(20, 6, 2, dtype=np.int64))
        kv = jnp.asarray(random_kv((20, 6, 4), np.float32, seed=6))
        arguments = (*tokens, kv)
        verified, packed = run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *arguments)
        assert verified.tokens.dtype == jnp.int64
        assert_packed(packed, np.asarray(kv), assert_verified(verified, tokens))


@every_backend(VERIFY_AND_PACK)
def test_verify_and_pack_under_vmap(backend):
    parts = [
        (*placed(ragged_tokens(5, 6, 1, seed=i)), jnp.asarray(random_kv((5, 6, 4), np.float32, i)))
        for i in range(3)
    ]
    run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *parts[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    got = jax.vmap(lambda *x: verify_and_pack(*x, implementation=backend))(*stacked)
    for i, (*tokens, kv) in enumerate(parts):
        verified, packed = jax.tree.map(lambda x, i=i: x[i], got)
        assert_packed(packed, np.asarray(kv), assert_verified(verified, tokens))


def test_a_single_block_takes_32_sequences_at_most():
    arguments = (*placed(accepted_tokens(33, 4)), jnp.zeros((33, 4, 4)))
    with pytest.raises(BackendError, match="cuda_single: B=33 must be at most 32"):
        verify_and_pack(*arguments, implementation="cuda_single")


def appended(kv, cache, lengths, accepted) -> np.ndarray:
    """``cache`` with the accepted KV rows behind ``lengths``; a slot past the end is left out."""
    cache = np.array(cache)
    for row, length, count, out in zip(kv, lengths, accepted, cache, strict=True):
        count = max(0, min(count, len(out) - length))
        out[length : length + count] = row[:count]
    return cache


@every_backend(VERIFY_AND_APPEND)
@every_case(VERIFY_AND_APPEND)
def test_verify_and_append(case, backend):
    *tokens, kv, cache, lengths = case.arguments
    arguments = (*tokens, kv, cache, lengths)
    verified, got = run_or_skip(verify_and_append, VERIFY_AND_APPEND, backend, *arguments)
    accepted = assert_verified(verified, tokens)
    wanted = appended(np.asarray(kv), cache, np.asarray(lengths), accepted)
    assert got.shape == cache.shape
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


@every_backend(VERIFY_AND_APPEND)
def test_verify_and_append_under_vmap_and_shard_map(backend):
    tokens = placed(ragged_tokens(16, 6, 1))
    kv = jnp.asarray(random_kv((16, 6, 4), np.float32, seed=6))
    cache = jnp.asarray(random_kv((16, 20, 4), np.int32, seed=9)).astype(jnp.float32)
    lengths = jnp.asarray(np.random.default_rng(3).integers(0, 12, 16), jnp.int32)
    arguments = (*tokens, kv, cache, lengths)
    expected = run_or_skip(verify_and_append, VERIFY_AND_APPEND, backend, *arguments)

    def run(*x):
        return verify_and_append(*x, implementation=backend)

    folded = [x.reshape(2, 8, *x.shape[1:]) for x in arguments]
    got = jax.vmap(run)(*folded)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x, y: x.reshape(y.shape), got, expected), expected
    )
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    chex.assert_trees_all_equal(jax.jit(sharded)(*arguments), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": (2, 4, 8)}, r"kv \(2, 4, 8\) must be \[B, gamma, D\] with \(2, 3\)"),
        ({"cache": (2, 9, 7)}, r"cache float32\(2, 9, 7\) must be float32\[B, S, D\] with B=2"),
        ({"lengths": (3,)}, r"lengths int32\(3,\) must be int32 \[B\] with B=2"),
    ],
    ids=["kv", "cache", "lengths"],
)
def test_bad_shapes_are_refused(change, message):
    shapes = {"kv": (2, 3, 8), "cache": (2, 9, 8), "lengths": (2,)} | change
    tokens = jnp.zeros((2, 4), jnp.int32)
    arrays = [jnp.zeros(shapes[n], jnp.int32 if n == "lengths" else jnp.float32) for n in shapes]
    with pytest.raises(ValueError, match=message):
        verify_and_append(tokens[:, :3], tokens, jnp.zeros((2,), jnp.int32), tokens[:, :1], *arrays)
