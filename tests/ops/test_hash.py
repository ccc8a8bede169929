"""Hash codes and Hamming scores against plain numpy, by every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash import (
    BITS,
    HAMMING_SCORES,
    HASH_ENCODE,
    hamming_scores,
    hash_encode,
    hash_encode_both,
)
from tests.ops.backends import every_backend, every_case, run_or_skip


def codes_of(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Bit by bit: the sign of each sum, packed by numpy."""
    x, w = np.float64(x), np.repeat(np.float64(w), x.shape[2] // w.shape[0], axis=0)
    bits = np.einsum("btnh,nhr->btnr", x, w) > 0
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def shared_bits(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How many bits of each key agree, summed over the queries that read it, ``[B, K, S]``."""
    q, k = (np.unpackbits(x.view(np.uint8), axis=-1).astype(np.int64) for x in (q, k))
    group = q.shape[2] // k.shape[2]
    k = np.repeat(k, group, axis=2)
    same = (q[:, :, None] == k[:, None]).sum(axis=-1).sum(axis=1)
    return np.swapaxes(
        same.reshape(*same.shape[:2], same.shape[2] // group, group).sum(axis=-1), 1, 2
    )


@every_backend(HASH_ENCODE)
@every_case(HASH_ENCODE)
def test_codes_are_the_signs(case, backend):
    q, k, w = case.build()
    got = run_or_skip(HASH_ENCODE, HASH_ENCODE, backend, *case.arguments)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got[0], codes_of(q, w))
        if k is not None:
            np.testing.assert_array_equal(got[1], codes_of(k, w))
    assert (got[1] is None) == (k is None)


def test_encode_has_no_derivative_and_both_are_each():
    rng = np.random.default_rng(0)
    q, k, w = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((2, 3, 4, 8), (2, 3, 2, 8), (2, 8, 64))
    )
    encode = jax.jit(hash_encode)
    both = jax.jit(hash_encode_both)(q, k, w)
    np.testing.assert_array_equal(both[0], encode(q, w))
    np.testing.assert_array_equal(both[1], encode(k, w))

    def loss(q, w):
        codes = hash_encode(q, w)
        return hamming_scores(codes, codes[:, :, ::2]).sum().astype(jnp.float32)

    assert not any(np.any(g) for g in jax.jit(jax.grad(loss, (0, 1)))(q, w))


@every_backend(HAMMING_SCORES)
@every_case(HAMMING_SCORES)
def test_scores_are_shared_bits(case, backend):
    q, k, lengths, norms = case.build()
    got = run_or_skip(HAMMING_SCORES, HAMMING_SCORES, backend, *case.arguments)
    want = shared_bits(q, k)
    read = np.arange(k.shape[1]) < lengths[:, None, None]
    if norms is None:
        np.testing.assert_array_equal(got, np.where(read, want, -1))
        return
    total = q.shape[2] // k.shape[2] * q.shape[1]
    distance = total * 32 * k.shape[3] - want
    estimate = total - 2 * distance / (32 * k.shape[3])
    # One rounding, of the product.
    want = np.float32(np.swapaxes(norms, 1, 2).astype(np.float64) * estimate)
    np.testing.assert_array_equal(got, np.where(read, want, -np.inf))


def test_without_lengths_every_slot_is_scored():
    codes = jnp.zeros((1, 3, 2, 4), jnp.uint32)
    assert hamming_scores(codes[:, :1], codes).tolist() == [[[128] * 3] * 2]


@pytest.mark.parametrize(
    ("q", "k", "w", "message"),
    [
        ((1, 1, 3, 8), (1, 1, 2, 8), (2, 8, 32), "with N a multiple of K"),
        ((1, 1, 4, 8), (1, 1, 4, 8), (2, 8, 32), "with N a multiple of K"),
        ((1, 1, 4, 8), (1, 1, 2, 8), (2, 4, 32), "with N a multiple of K"),
        ((1, 1, 4, 8), (1, 1, 2, 8), (2, 8, 48), "R=48 bits of w must be one of 32, 64, 128, 256"),
    ],
)
def test_encode_refuses_what_does_not_fit(q, k, w, message):
    with pytest.raises(ValueError, match=message):
        hash_encode_both(jnp.zeros(q), jnp.zeros(k), jnp.zeros(w))


@pytest.mark.parametrize(
    ("q", "k", "change", "message"),
    [
        ((2, 1, 3, 4), (2, 9, 2, 4), {}, "with N a multiple of K"),
        ((2, 1, 4, 4), (1, 9, 2, 4), {}, "with N a multiple of K"),
        ((2, 1, 4, 3), (2, 9, 2, 3), {}, "3 words a code must be 1, 2, 4 or 8"),
        ((2, 2**16, 4, 8), (2, 9, 1, 8), {}, "are over 16777216; score fewer tokens at once"),
        ((2, 1, 4, 4), (2, 9, 2, 4), {"lengths": jnp.zeros(3, jnp.int32)}, r"int32\[3\] must be"),
        ((2, 1, 4, 4), (2, 9, 2, 4), {"norms": jnp.zeros((2, 2, 9))}, r"must be float32 \[B, S, K"),
    ],
)
def test_scores_refuse_what_does_not_fit(q, k, change, message):
    codes = (jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in (q, k))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(hamming_scores, **change), *codes)


def test_every_number_of_bits_is_tried():
    assert {case.build()[2].shape[2] for case in HASH_ENCODE.cases()} == set(BITS)
    assert {32 * case.build()[1].shape[3] for case in HAMMING_SCORES.cases()} == set(BITS)
