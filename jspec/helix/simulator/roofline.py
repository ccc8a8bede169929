"""Times to read the KV cache and the weights of a layer: appendix A of Helix, figure 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.helix.simulator.shapes import ModelShape


def kv_read_us(
    shape: ModelShape,
    batch: ArrayLike,
    context: ArrayLike,
    *,
    tpa: ArrayLike = 1,
    kvp: ArrayLike = 1,
    bytes_per_value: float = 0.5,
    memory_gbps: float = 8000,
) -> NDArray[np.float64]:
    """Time for a GPU to read its share of a layer's keys and values (Helix, appendix A).

    Every rank that serves a query head of a KV head reads that KV head, so ``tpa`` above the number
    of KV heads gains nothing.

    Args:
        shape: sizes of the model.
        batch: rows.
        context: positions of a row.
        tpa: ranks that share the KV heads.
        kvp: ranks that share the positions.
        bytes_per_value: bytes of a cached value.
        memory_gbps: memory bandwidth, gigabytes a second.

    Returns:
        Microseconds, float64, of the broadcast shape of the arguments.
    """
    batch, context, tpa, kvp = (np.asarray(x, float) for x in (batch, context, tpa, kvp))
    values = 2 * np.ceil(shape.kv_heads / tpa) * shape.head_size
    return batch * values * context / kvp * bytes_per_value / (memory_gbps * 1e3)


def weight_read_us(
    shape: ModelShape,
    *,
    tpa: ArrayLike = 1,
    tpf: ArrayLike = 1,
    bytes_per_value: float = 0.5,
    memory_gbps: float = 8000,
) -> NDArray[np.float64]:
    """Time for a GPU to read its share of a layer's weights (Helix, appendix A).

    Args:
        shape: sizes of the model, with a gated feed-forward.
        tpa: ranks that share the projections of attention.
        tpf: ranks that share the feed-forward.
        bytes_per_value: bytes of a weight.
        memory_gbps: memory bandwidth, gigabytes a second.

    Returns:
        Microseconds, float64, of the broadcast shape of the arguments.
    """
    tpa, tpf = np.asarray(tpa, float), np.asarray(tpf, float)
    queries = 2 * shape.hidden * shape.query_heads / tpa * shape.head_size
    keys = 2 * shape.hidden * np.ceil(shape.kv_heads / tpa) * shape.head_size
    feed_forward = 3 * shape.hidden * shape.ffn / tpf
    return (queries + keys + feed_forward) * bytes_per_value / (memory_gbps * 1e3)
