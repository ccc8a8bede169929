"""Caches and queries made on the device, and a check of attention over them.

Keys, values and queries are normal numbers in bfloat16, or keys and values in 8 bits. The values of
what a query must not read are large, and so are those of the last one that it must: reading one
slot too many or too few changes the output by more than the check allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import heads
from jspec.ops.cached import FLOAT8, as_cached
from jspec.typing import Array

DTYPE = jnp.bfloat16
CACHES = ("bfloat16", str(FLOAT8))  # dtypes of keys and values
TOLERANCE = 0.02  # of the norm of a head's output: bfloat16 weights and outputs stay under 0.005
LSE_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Inputs:
    """``q [B, T, N, H]``, ``k`` and ``v [B, S, K, H]``, ``positions`` int32 ``[B, T]`` of the
    queries, ``lengths`` int32 ``[B]``: how many slots the last query reads."""

    q: Array
    k: Array
    v: Array
    positions: Array
    lengths: np.ndarray


def lengths(case: Mapping[str, Any]) -> np.ndarray:
    """Lengths of the rows, int32 ``[B]``: S, or random between S/4 and S with a fixed seed."""
    batch, slots = case["B"], case["S"]
    if case["lengths"] == "full":
        return np.full(batch, slots, np.int32)
    rng = np.random.default_rng([workload.SEED, batch, slots])
    return rng.integers(max(slots // 4, case["T"]), slots, batch, np.int32, endpoint=True)


def dense(case: Mapping[str, Any]) -> Inputs:
    """Queries of the last tokens of rows with ``lengths`` slots."""
    ends, tokens = lengths(case), case["T"]
    positions = (ends - tokens)[:, None] + np.arange(tokens, dtype=np.int32)
    large = np.arange(case["S"]) >= (ends - tokens)[:, None]
    return Inputs(*random_cache(case, large[..., None], ends), jnp.asarray(positions), ends)


def random_cache(
    case: Mapping[str, Any], large: Array | np.ndarray, reads: np.ndarray
) -> tuple[Array, Array, Array]:
    """Queries, keys and values.

    ``large [B, S, K or 1]``: slots whose values are larger than the output of a query that reads
    ``reads [B]`` slots.
    """
    (query_heads, kv_heads), size = heads(case), case["H"]
    q_shape = (case["B"], case["T"], query_heads, size)
    kv_shape = (case["B"], case["S"], kv_heads, size)
    large, counts = jnp.asarray(large), jnp.asarray(reads, jnp.float32)
    return _random_cache(q_shape, kv_shape, case.get("cache", str(DTYPE.dtype)), large, counts)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _random_cache(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], cached: str, large: Array, reads: Array
) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(workload.SEED), 3)
    shapes = (q_shape, kv_shape, kv_shape)
    q, k, v = (jax.random.normal(key, s, DTYPE) for key, s in zip(keys, shapes, strict=True))
    # An output is about a value divided by the root of the number of values read.
    by = jnp.where(large, (jnp.sqrt(reads) / 4)[:, None, None], jnp.float32(1)).astype(DTYPE)
    return q, as_cached(k, cached), as_cached(v * by[..., None], cached)


@dataclasses.dataclass(frozen=True)
class Check:
    """Compares an output ``[B, T, N, H]`` and a log-sum-exp ``[B, T, N]`` with the reference's."""

    out: np.ndarray
    lse: np.ndarray

    def output(self, out: Any) -> bool:
        """Whether each head's output of each token is within `TOLERANCE` of its norm."""
        expected = np.asarray(self.out, np.float32)
        error = np.linalg.norm(np.asarray(out, np.float32) - expected, axis=-1)
        return bool((error <= TOLERANCE * np.linalg.norm(expected, axis=-1)).all())

    def both(self, outputs: Any) -> bool:
        """Whether an output and its log-sum-exp are within their tolerances."""
        lse = np.abs(np.asarray(outputs[1]) - self.lse)
        return self.output(outputs[0]) and bool((lse <= LSE_TOLERANCE).all())


def bytes_of(reads: int, case: Mapping[str, Any]) -> int:
    """Bytes of ``reads`` keys and values of every KV head, and of the queries and outputs."""
    query_heads, kv_heads = heads(case)
    width = jnp.dtype(DTYPE).itemsize
    read = reads * kv_heads * jnp.dtype(case.get("cache", DTYPE)).itemsize
    return 2 * case["H"] * (read + case["B"] * case["T"] * query_heads * width)
