"""Root-mean-square norm."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.typing import Array

CENTERED = "its norm scales by 1 + scale"  # why a kernel refuses one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMS:
    """A root-mean-square norm over the last axis (Zhang and Sennrich 2019).

    ``scale [in]``; ``eps`` is added to the mean of the squares. With ``centered`` the numbers are
    scaled by ``1 + scale`` before they are rounded (Gemma).
    """

    scale: Array
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})
    centered: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        """``x [..., in]``, normed in float32 and rounded before it is scaled; keeps its dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale, range(x.ndim - 1))
        if self.centered:
            return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * scale
