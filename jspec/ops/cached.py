"""Keys and values as a cache holds them, and the dtype in which attention multiplies them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.typing import Array

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
MAX_FLOAT8 = float(jnp.finfo(FLOAT8).max)


def as_cached(x: Array, dtype: DTypeLike) -> Array:
    """``x`` in the dtype of a cache; numbers past the largest of 8 bits become that one."""
    return (jnp.clip(x, -MAX_FLOAT8, MAX_FLOAT8) if dtype == FLOAT8 else x).astype(dtype)


def compute_dtype(q: Array, k: Array) -> np.dtype:
    """The dtype in which queries and keys of a cache are multiplied.

    That of the queries where keys have the same or 8 bits, which wider types hold exactly; float32
    otherwise.
    """
    return q.dtype if k.dtype in (q.dtype, FLOAT8) else np.dtype(np.float32)
