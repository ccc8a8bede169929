"""Rotary position embedding with the linear, Llama 3, YaRN and LongRoPE scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec.parts import Rope, RopeScaling
from jspec.typing import Array


def rope_frequencies(head_size: int, rope: Rope) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 ``[H / 2]`` (radians a token) and the factor on cos and sin.

    Frequencies are 0 where ``rope`` does not rotate; the factor is of the channels that it rotates.
    """
    rotated = head_size if rope.rotated is None else rope.rotated
    inverse, factor = _frequencies(rotated, rope.theta, rope.scaling)
    return np.pad(inverse, (0, (head_size - rotated) // 2)), factor


def _frequencies(
    head_size: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """`rope_frequencies` of channels that are all rotated."""
    exponent = np.arange(0, head_size, 2, dtype=np.float64) / max(head_size, 1)
    inverse = theta**-exponent
    if scaling is None:
        return inverse.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (inverse / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling).astype(np.float32), 1.0
    if scaling.kind == "longrope":
        return _longrope(inverse, scaling)
    return _yarn(inverse, head_size, theta, scaling)


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: keep waves shorter than the old context / high, divide those longer than / low."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = scaling.original_context * inverse / (2 * math.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1 - keep) / scaling.factor)


def _longrope(inverse: np.ndarray, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al. 2024), with the attention temperature of the authors' models."""
    frequencies = (inverse / np.asarray(scaling.wave_factors)).astype(np.float32)
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    growth = math.log(scaling.factor) / math.log(max(scaling.original_context, 2))
    return frequencies, math.sqrt(1.0 + growth)


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


def channel_order(head_size: int, rope: Rope, *, interleaved: bool) -> np.ndarray:
    """The channel in a file of each channel of a head in jspec, whose pairs are i and i + H / 2.

    ``interleaved``: whether the file rotates neighbouring channels; else the first half of the
    rotated ones with the second.
    """
    rotated = head_size if rope.rotated is None else rope.rotated
    pairs = (
        np.arange(rotated).reshape(-1, 2) if interleaved else np.arange(rotated).reshape(2, -1).T
    )
    others = np.arange(rotated, head_size).reshape(2, -1).T  # any pairs, as long as all agree
    return np.concatenate([pairs, others]).T.reshape(-1)


def rope_angles(
    positions: Array, frequencies: Array, factor: float | np.ndarray
) -> tuple[Array, Array]:
    """Cosine and sine, float32 ``[B, T, 1, H / 2]``, of absolute ``positions [B, T]``.

    ``factor`` multiplies both: one number, or float32 ``[H / 2]``.
    """
    factor = factor[None, None, None] if isinstance(factor, np.ndarray) else factor
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
