"""QuantSpec: drafts that read a 4-bit copy of the cache (Tiwari et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.policies.policy import Encoder, Policy
from jspec.policies.selection import Selection
from jspec.typing import Array

LEVELS = 15  # of 4 bits, above the lowest


@dataclasses.dataclass(frozen=True)
class QuantSpec(Policy):
    """All positions, with keys and values in 4 bits; the draft itself at full precision.

    Each ``group`` of channels of a token's key or value has a minimum and a step in the cache's
    dtype: ``low + step * code``, codes in 0..15 (arXiv 2502.10424, section 4.2). The paper keeps 4
    upper and 4 lower bits in place of the cache, and is lossless to those 8. Here verification
    reads the cache itself, and the 4 bits are kept in addition: in bfloat16 and with groups of 32,
    keys and values take 31 % more memory.

    Raises `ValueError` for layers whose sizes no group divides, or whose values are in their keys.
    """

    group: int = 32

    def __post_init__(self) -> None:
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group={self.group} must be an even number of channels, 2 or more")

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        if spec.values_in_keys:
            raise ValueError("quantspec keeps values, and this layer has them in its keys")
        shapes: Shapes = {}
        for name, size in (("key", spec.key_size), ("value", spec.value_size)):
            if size % self.group:
                raise ValueError(
                    f"group={self.group} must divide the {name} size {size} of each layer"
                )
            shapes[f"{name}_codes"] = ((spec.kv_heads, size // 2), jnp.uint8)
            shapes[f"{name}_scales"] = ((spec.kv_heads, size // self.group, 2), None)
        return shapes

    def encoder(self, policy_params: Any, layer: int) -> Encoder:
        def encode(k: Array, v: Array | None) -> dict[str, Array]:
            assert v is not None  # `columns`
            columns = {}
            columns["key_codes"], columns["key_scales"] = in_4_bits(k, self.group)
            columns["value_codes"], columns["value_scales"] = in_4_bits(v, self.group)
            return columns

        return encode

    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        columns = cache.columns[layer]
        return Selection(
            columns={
                f"{name}s": from_4_bits(columns[f"{name}_codes"], columns[f"{name}_scales"])
                for name in ("key", "value")
            }
        )


def in_4_bits(x: Array, group: int) -> tuple[Array, Array]:
    """Quantize ``x [..., H]`` in groups of ``group`` channels.

    Returns codes uint8 ``[..., H / 2]``, two channels per byte, and ``[..., H / group, 2]`` in the
    dtype of ``x``: minimum and step of each group.
    """
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
    low, high = parts.min(axis=-1), parts.max(axis=-1)
    scales = jnp.stack([low, (high - low) / LEVELS], axis=-1).astype(x.dtype)
    # By the numbers as they are kept, so that rounding them adds no error of its own.
    low, step = jnp.moveaxis(scales.astype(jnp.float32)[..., None], -2, 0)
    codes = jnp.round((parts - low) / jnp.where(step > 0, step, 1))
    codes = jnp.clip(codes, 0, LEVELS).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales


def from_4_bits(codes: Array, scales: Array) -> Array:
    """Dequantize what `in_4_bits` returned: ``codes [..., H / 2]`` and ``scales``."""
    pairs = jnp.stack([codes & LEVELS, codes >> 4], axis=-1)
    parts = pairs.reshape(*scales.shape[:-1], -1).astype(jnp.float32)
    low, step = jnp.moveaxis(scales.astype(jnp.float32)[..., None], -2, 0)
    return (low + step * parts).reshape(*codes.shape[:-1], -1).astype(scales.dtype)
