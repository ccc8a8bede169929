"""Where the columns of a layer lie: on the device, or keys and values in host memory.

A pass that reads all of a layer in host memory works on a copy of it. One that reads a selection
fetches its rows into a small buffer. Both store the new keys and values in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jspec.config import LayerSpec
from jspec.host import in_host
from jspec.ops.cached import as_cached
from jspec.ops.host_rows import DeviceRows, PrefetchedRows, fetch_ahead, fetch_rows, store_rows
from jspec.typing import Array

TOKEN_COLUMNS = ("keys", "values")


@dataclasses.dataclass(frozen=True)
class HostStorage:
    """Keys and values of layers in host memory; a policy's columns and pages on the device.

    Layers with a sliding window stay on the device.

    Attributes:
        first_layer: The first layer in host memory; those before it stay on the device.
        prefetch_share: What a layer will select is predicted while the layer before it computes,
            and this share of the budget, of the highest scores, is fetched meanwhile. 0 predicts
            nothing.
        reuse: Whether the rows that a step read stay on the device for the next step of its chunk.
    """

    first_layer: int = 0
    prefetch_share: float = 0.75
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.first_layer < 0:
            raise ValueError(f"first_layer={self.first_layer} must be at least 0")
        if not 0 <= self.prefetch_share <= 1:
            raise ValueError(
                f"prefetch_share={self.prefetch_share} must be a share of the budget in [0, 1]"
            )

    def layers(self, specs: Sequence[LayerSpec]) -> tuple[int, ...]:
        """The layers in host memory."""
        return tuple(
            layer
            for layer, spec in enumerate(specs)
            if layer >= self.first_layer and spec.window is None
        )


def is_in_host(columns: Mapping[str, Array]) -> bool:
    """Whether the keys and values among a layer's columns lie in host memory."""
    return in_host(columns["keys"])


def token_columns(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Keys and values among a layer's columns."""
    return {name: columns[name] for name in TOKEN_COLUMNS if name in columns}


def copy_to_device(columns: Mapping[str, Array], lengths: Array) -> dict[str, Array]:
    """Keys and values on the device up to ``lengths [B]``, zeros in the slots after that.

    By the operation that fetches rows: copies by XLA begin with the program, those of all layers.
    """
    batch, size, heads, _ = columns["keys"].shape
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    slots = jnp.where(slots < lengths[:, None], slots, -1)[:, None]
    return fetch_slots(columns, jnp.broadcast_to(slots, (batch, heads, size)))


def fetch_slots(
    columns: Mapping[str, Array],
    slots: Array,
    device_rows: DeviceRows | None = None,
    prefetched: PrefetchedRows | None = None,
) -> dict[str, Array]:
    """Keys and values at ``slots [B, K, n]``, ``[B, n, K, H]`` on the device."""
    source = token_columns(columns)
    rows = fetch_rows(tuple(source.values()), slots, device_rows=device_rows, prefetched=prefetched)
    return dict(zip(source, rows, strict=True))


def prefetch_slots(
    columns: Mapping[str, Array], slots: Array, through: Array, device_rows: DeviceRows | None
) -> tuple[PrefetchedRows, Array]:
    """Start to fetch keys and values at ``slots [B, K, n]``, as `jspec.ops.host_rows.fetch_ahead`.

    Returns the rows, and ``through`` to compute with.
    """
    return fetch_ahead(
        tuple(token_columns(columns).values()), slots, through, device_rows=device_rows
    )


def store_slots(
    columns: Mapping[str, Array], new: Mapping[str, Array], slots: Array
) -> dict[str, Array]:
    """Keys and values in host memory, with ``new`` ones ``[B, T, K, H]`` at ``slots [B, T]``."""
    target = token_columns(columns)
    rows = [as_cached(new[name], x.dtype) for name, x in target.items()]
    stored = store_rows(tuple(target.values()), rows, slots)
    return dict(zip(target, stored, strict=True))


def empty_device_rows(columns: Mapping[str, Array], count: int) -> DeviceRows:
    """Room on the device for ``count`` rows of each KV head of a layer."""
    source = token_columns(columns).values()
    rows = tuple(jnp.zeros((len(x), count, *x.shape[2:]), x.dtype) for x in source)
    batch, _, heads, _ = columns["keys"].shape
    return DeviceRows(rows, jnp.full((batch, heads, count), -1, jnp.int32))
