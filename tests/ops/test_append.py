"""Norm, rotation and cache write, against float64 from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.append import APPEND_ENCODE, QKRope, rotate_and_append, rotate_append_encode
from jspec.ops.norm import RMS

B, T, N, K, H, V, S = 2, 3, 4, 2, 8, 6, 12
SLOTS = np.array([[4, S, 5], [11, 0, S]], np.int32)


def arrays(normed):
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jax.device_put(rng.standard_normal(shape).astype(np.float32))

    angle = 3 * np.asarray(normal(B, T, 1, H // 2))
    norms = (RMS(normal(H), 1e-2), RMS(normal(H), 1e-1)) if normed else ()
    qk_rope = QKRope(*jax.device_put((np.cos(angle), np.sin(angle))), *norms)
    q, k, v = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, V)
    return q, k, v, qk_rope, normal(B, S, K, H), normal(B, S, K, V)


def rotated(x, norm, angle):
    """A head, normed, and its first half as real, its second as imaginary parts, rotated."""
    x = np.float64(x)
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x) + norm.eps) * np.float64(norm.scale)
    y = (x[: H // 2] + 1j * x[H // 2 :]) * angle
    return np.concatenate([y.real, y.imag])


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_equals_the_definition(normed):
    q, k, v, qk_rope, keys, values = arrays(normed)
    got = jax.jit(rotate_and_append)(q, k, v, qk_rope, keys, values, SLOTS)
    q, k, v = map(np.asarray, (q, k, v))
    angle = np.float64(qk_rope.cosine) + 1j * np.float64(qk_rope.sine)
    want = np.float64(q), np.float64(keys), np.float64(values)
    for row, token in np.ndindex(B, T):
        by = angle[row, token, 0]
        for head in range(N):
            want[0][row, token, head] = rotated(q[row, token, head], qk_rope.q_norm, by)
        if (slot := SLOTS[row, token]) < S:
            for head in range(K):
                want[1][row, slot, head] = rotated(k[row, token, head], qk_rope.k_norm, by)
            want[2][row, slot] = v[row, token]
    for have, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(have, expected, rtol=1e-5, atol=1e-5)


def test_codes_are_the_signs_of_the_new_keys():
    """Whatever the column held of other slots it still holds."""
    arguments = next(case for case in APPEND_ENCODE.cases() if case.name == "normed").arguments
    *_, before, w, slots = arguments
    q, keys, values, codes = jax.device_get(jax.jit(rotate_append_encode)(*arguments))
    appended = jax.jit(rotate_and_append)(*arguments[:6], slots)
    for have, want in zip((q, keys, values), appended, strict=True):
        np.testing.assert_array_equal(have, want)
    want = np.array(before)
    for row, token in np.ndindex(slots.shape):
        if (slot := slots[row, token]) < keys.shape[1]:
            signs = np.einsum("kh,khr->kr", np.float64(keys[row, slot]), np.float64(w)) > 0
            want[row, slot] = np.packbits(signs, axis=-1, bitorder="little").view("<u4")
    np.testing.assert_array_equal(codes, want)
    with pytest.raises(ValueError, match=r"codes uint32\[2, 20, 2, 2\] and w \[2, 16, 32\] must"):
        rotate_append_encode(*arguments[:7], w[..., :32], slots)


def test_shapes_that_do_not_fit_are_named():
    q, k, v, qk_rope, keys, values = arrays(False)
    with pytest.raises(ValueError, match=r"slots \(2, 2\) must be \[B, T, N, H\]"):
        rotate_and_append(q, k, v, qk_rope, keys, values, jnp.asarray(SLOTS[:, :2]))
    with pytest.raises(ValueError, match=r"v \(2, 3, 2, 5\)"):
        rotate_and_append(q, k, v[..., :5], qk_rope, keys, values, jnp.asarray(SLOTS))
