"""Rotary position embedding with the linear, Llama 3 and YaRN scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import RopeScaling
from jspec.typing import Array


def rope_frequencies(
    head_size: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 ``[H / 2]`` (radians a token) and the factor on cos and sin."""
    exponent = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    inverse = theta**-exponent
    if scaling is None:
        return inverse.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (inverse / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling).astype(np.float32), 1.0
    return _yarn(inverse, head_size, theta, scaling)


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: keep waves shorter than the old context / high, divide those longer than / low."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = scaling.original_context * inverse / (2 * math.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1 - keep) / scaling.factor)


def _yarn(
    inverse: np.ndarray, head_size: int, theta: float, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.2): interpolate dimensions that turn seldom, ramp between.

    The factor on cos and sin, ``0.1 ln(factor) + 1``, is the attention temperature of equation 22.
    """

    def dimension(rotations: float) -> float:
        wavelength = scaling.original_context / (rotations * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    span = max(last - first, 1e-3)
    interpolate = np.clip((np.arange(head_size // 2) - first) / span, 0.0, 1.0)
    frequencies = inverse * (1 - interpolate + interpolate / scaling.factor)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies.astype(np.float32), factor


def rope_angles(positions: Array, frequencies: Array, factor: float) -> tuple[Array, Array]:
    """Cosine and sine, float32 ``[B, T, 1, H / 2]``, of absolute ``positions [B, T]``."""
    # XLA makes one kernel of cosine and sine if they share an array that it does not know.
    frequencies = jax.lax.optimization_barrier(frequencies)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate_pairs(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate ``x [B, T, N, H]``, whose neighbouring channels are pairs; keeps its dtype.

    The first channels of all pairs come out before the second ones, which no product of two arrays
    that are rotated so can tell.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
