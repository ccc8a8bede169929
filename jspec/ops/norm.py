"""Root-mean-square norm."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMS:
    """A root-mean-square norm over the last axis (Zhang and Sennrich 2019).

    ``scale [in]``; ``eps`` is added to the mean of the squares.
    """

    scale: Array
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        """``x [..., in]``, normed in float32 and rounded before it is scaled; keeps its dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(self.scale, range(x.ndim - 1))
