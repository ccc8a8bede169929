"""Verification fused with packing: the same as one after the other, everywhere."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.ops.cases import accepted_tokens, ragged_tokens
from jspec.ops.fused import (
    VERIFY_AND_PACK,
    verify_and_pack,
)
from jspec.ops.verify import verify_greedy
from tests.ops.backends import every_backend, every_case, run_or_skip
from tests.ops.test_packing import assert_packed, random_kv

verify_alone = jax.jit(functools.partial(verify_greedy, implementation="xla"))


def placed(arguments):
    return jax.device_put(arguments)


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
        placed((*ragged_tokens(5, 6, 1, seed=i), random_kv((5, 6, 4), np.float32, i)))
        for i in range(3)
    ]
    run_or_skip(verify_and_pack, VERIFY_AND_PACK, backend, *parts[0])
    stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
    run = jax.vmap(lambda *x: verify_and_pack(*x, implementation=backend))
    got = jax.device_get(jax.jit(run)(*stacked))
    for i, (*tokens, kv) in enumerate(parts):
        verified, packed = jax.tree.map(lambda x, i=i: x[i], got)
        assert_packed(packed, np.asarray(kv), assert_verified(verified, tokens))


def test_a_single_block_takes_up_to_32_sequences():
    arguments = (*placed(accepted_tokens(33, 4)), jnp.zeros((33, 4, 4)))
    with pytest.raises(BackendError, match="cuda_single: B=33 must be at most 32"):
        verify_and_pack(*arguments, implementation="cuda_single")


def test_kv_of_another_shape_is_refused():
    tokens = jnp.zeros((2, 4), jnp.int32)
    arrays = (tokens[:, :3], tokens, jnp.zeros((2,), jnp.int32), tokens[:, :1])
    with pytest.raises(ValueError, match=r"kv \(2, 4, 8\) must be \[B, gamma, D\] with \(2, 3\)"):
        verify_and_pack(*arrays, jnp.zeros((2, 4, 8)))
