"""Verification fused with packing or appending: the same as one after the other, everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.ops.fused import (
    VERIFY_AND_APPEND,
    VERIFY_AND_PACK,
    verify_and_append,
    verify_and_pack,
)
from jspec.ops.verify import verify_greedy
from tests.ops.backends import every_backend, run_or_skip
from tests.ops.test_pack import assert_packed, random_rows

# batch, gamma, width, stop tokens, dtype of the rows, agreement of draft and target
CASES = [
    (1, 1, 4, 1, np.float32, 0.5),
    (1, 0, 4, 1, np.float32, 0.5),
    (4, 8, 16, 2, np.float16, 0.9),
    (32, 8, 64, 1, np.float16, 0.0),
    (32, 8, 64, 0, np.float16, 1.0),
    (19, 33, 7, 3, np.float16, 0.97),
    (32, 128, 24, 40, np.float32, 0.99),
    (6, 200, 9, 1, np.int8, 0.99),
    (70, 5, 8, 1, np.float32, 0.8),
    (1100, 4, 8, 1, np.float32, 0.8),
]
over_cases = pytest.mark.parametrize(
    ("batch", "gamma", "width", "stops", "dtype", "agreement"),
    CASES,
    ids=[f"B{c[0]}-gamma{c[1]}-D{c[2]}-M{c[3]}" for c in CASES],
)


def random_inputs(batch, gamma, width, stops, dtype, agreement, token=jnp.int32):
    """Draft and target tokens, ragged draft lengths, stop tokens, rows."""
    rng = np.random.default_rng(batch + gamma)
    target = rng.integers(0, 30, (batch, gamma + 1))
    draft = np.where(rng.random((batch, gamma)) < agreement, target[:, :-1], -1)
    lengths = np.where(rng.random(batch) < 0.7, gamma, rng.integers(0, gamma + 1, batch))
    stop = np.where(rng.random((batch, stops)) < 0.1, rng.integers(0, 30, (batch, stops)), -1)
    rows = random_rows((batch, gamma, width), dtype, seed=gamma)
    return (
        jnp.asarray(draft, token),
        jnp.asarray(target, token),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(stop, token),
        jnp.asarray(rows),
    )


def assert_verified(got, tokens) -> np.ndarray:
    """Compare with the reference of verification alone; returns the accepted counts."""
    expected = verify_greedy(*tokens, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    return np.asarray(expected.accepted)


@every_backend(VERIFY_AND_PACK)
@over_cases
def test_verify_and_pack(batch, gamma, width, stops, dtype, agreement, backend):
    *tokens, rows = random_inputs(batch, gamma, width, stops, dtype, agreement)
    arguments = (*tokens, rows)
    verified, packed = run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *arguments)
    assert_packed(packed, np.asarray(rows), assert_verified(verified, tokens))


@every_backend(VERIFY_AND_PACK)
def test_verify_and_pack_of_int64_tokens(backend):
    with jax.enable_x64(True):
        *tokens, rows = random_inputs(20, 6, 4, 2, np.float32, 0.9, jnp.int64)
        arguments = (*tokens, rows)
        verified, packed = run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *arguments)
        assert verified.tokens.dtype == jnp.int64
        assert_packed(packed, np.asarray(rows), assert_verified(verified, tokens))


@every_backend(VERIFY_AND_PACK)
def test_verify_and_pack_under_vmap(backend):
    parts = [random_inputs(5, 6, 4, 1, np.float32, a) for a in (0.5, 0.8, 0.95)]
    run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *parts[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    got = jax.vmap(lambda *x: verify_and_pack(*x, implementation=backend))(*stacked)
    for i, (*tokens, rows) in enumerate(parts):
        verified, packed = jax.tree.map(lambda x, i=i: x[i], got)
        assert_packed(packed, np.asarray(rows), assert_verified(verified, tokens))


def test_a_single_block_takes_32_sequences_at_most():
    arguments = random_inputs(33, 4, 4, 1, np.float32, 0.9)
    with pytest.raises(BackendError, match="cuda_single: B=33 must be at most 32"):
        verify_and_pack(*arguments, implementation="cuda_single")


def appended(rows, cache, lengths, accepted) -> np.ndarray:
    """``cache`` with the accepted rows behind ``lengths``; a slot past the end is left out."""
    cache = np.array(cache)
    for row, length, count, out in zip(rows, lengths, accepted, cache, strict=True):
        count = max(0, min(count, len(out) - length))
        out[length : length + count] = row[:count]
    return cache


@every_backend(VERIFY_AND_APPEND)
@over_cases
def test_verify_and_append(batch, gamma, width, stops, dtype, agreement, backend):
    *tokens, rows = random_inputs(batch, gamma, width, stops, dtype, agreement)
    slots = gamma + 5
    cache = jnp.asarray(random_rows((batch, slots, width), dtype, seed=9))
    # Some rows do not fit, which must not harm the row behind.
    lengths = jnp.asarray(np.random.default_rng(3).integers(0, slots + 2, batch), jnp.int32)
    arguments = (*tokens, rows, cache, lengths)
    verified, got = run_or_skip(verify_and_append, VERIFY_AND_APPEND, backend, *arguments)
    accepted = assert_verified(verified, tokens)
    wanted = appended(np.asarray(rows), cache, np.asarray(lengths), accepted)
    assert got.shape == cache.shape
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


@every_backend(VERIFY_AND_APPEND)
def test_verify_and_append_under_vmap_and_shard_map(backend):
    *tokens, rows = random_inputs(16, 6, 4, 1, np.float32, 0.9)
    cache = jnp.asarray(random_rows((16, 20, 4), np.int32, seed=9)).astype(jnp.float32)
    lengths = jnp.asarray(np.random.default_rng(3).integers(0, 12, 16), jnp.int32)
    arguments = (*tokens, rows, cache, lengths)
    expected = run_or_skip(verify_and_append, VERIFY_AND_APPEND, backend, *arguments)

    def run(*x):
        return verify_and_append(*x, implementation=backend)

    folded = [x.reshape(2, 8, *x.shape[1:]) for x in arguments]
    got = jax.vmap(run)(*folded)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.reshape(y.shape), y), got, expected)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(sharded)(*arguments), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (2, 4, 8)}, r"rows \(2, 4, 8\) must be \[B, gamma, D\] with \(2, 3\)"),
        ({"cache": (2, 9, 7)}, r"cache float32\(2, 9, 7\) must be float32\[B, S, D\] with B=2"),
        ({"lengths": (3,)}, r"lengths int32\(3,\) must be int32 \[B\] with B=2"),
    ],
    ids=["rows", "cache", "lengths"],
)
def test_bad_shapes_are_refused(change, message):
    shapes = {"rows": (2, 3, 8), "cache": (2, 9, 8), "lengths": (2,)} | change
    tokens = jnp.zeros((2, 4), jnp.int32)
    arrays = [jnp.zeros(shapes[n], jnp.int32 if n == "lengths" else jnp.float32) for n in shapes]
    with pytest.raises(ValueError, match=message):
        verify_and_append(tokens[:, :3], tokens, jnp.zeros((2,), jnp.int32), tokens[:, :1], *arrays)
