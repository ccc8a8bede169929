"""The cache: columns of each layer under a layout, appended at ragged offsets, undone by length.

A column holds one array of every token: its key, its value, or what a policy keeps beside them. A
page holds what a policy gathers of some tokens side by side, from committed ones alone.
Slots that no committed position lives in hold nothing; their content, NaN included, never reaches
an output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache.layout import Layout
from jspec.config import LayerSpec
from jspec.host import in_host, place_in_host
from jspec.ops.host_rows import DeviceRows
from jspec.sharding import Placing, placed
from jspec.typing import Array

# Of a token in each column, or of a page, with its dtype; None is that of the keys.
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


def nothing(layer: int, spec: LayerSpec) -> Shapes:
    """No columns or pages but a layer's own."""
    return {}


# Of queries and their positions, output and log-sum-exp.
Read = Callable[[Array, Array], tuple[Array, Array]]


class Shards(Protocol):
    """How devices that hold parts of the same rows attend together, inside `jax.shard_map`.

    Frozen and hashable.
    """

    def attended(
        self, read: Read, q: Array, positions: Array, up: Array | None = None
    ) -> tuple[Array, Array]:
        """Attention of the queries ``q [B, T, N, H]`` over the keys of all devices.

        ``read(q, positions)`` gives output and log-sum-exp over the keys of this one; it may be
        called several times, with -1 for the ``positions [B, T]`` of other rows. What comes is of
        the heads whose part of the model's output projection this device has. ``up
        [N, value size, H']``: the map of each head's output that the model asks for.
        """
        ...

    def merged(self, out: Array, lse: Array, up: Array | None = None) -> tuple[Array, Array]:
        """The same, where ``out`` and ``lse`` of all queries have been read already."""
        ...

    def own_heads(self, x: Array) -> Array:
        """What ``x [N, ...]`` has for the heads that `attended` gives."""
        ...

    def over_heads(self, x: Array) -> Array:
        """The sum of ``x`` over the devices that hold the other key-value heads."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "lengths", "pages", "device_rows"],
    meta_fields=["specs", "layouts", "page", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Columns of every layer, and how many positions of each row are committed.

    ``columns``: a layer's arrays by name, each ``[B, S, ...]``: ``keys [B, S, K, key size]``,
    ``values [B, S, K, value size]`` unless they are part of the keys, and a policy's own.
    ``lengths`` int32 ``[B]``. ``specs`` and ``layouts``: one a layer, static. ``pages``: a layer's
    arrays by name, each ``[B, ceil(S / page), ...]``, of ``page`` positions side by side; nothing
    is in a page without a committed position. ``device_rows``: of each layer in the host's memory,
    what the last pass read of it, on the device; set inside a chunk of steps alone. ``shards``: set
    where this is a device's part of it.
    """

    columns: tuple[dict[str, Array], ...]
    lengths: Array
    specs: tuple[LayerSpec, ...]
    layouts: tuple[Layout, ...]
    pages: tuple[dict[str, Array], ...] = ()
    device_rows: tuple[DeviceRows | None, ...] = ()
    page: int = 1
    shards: Shards | None = None

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpec],
        layouts: Sequence[Layout],
        batch: int,
        dtype: Any,
        extra: Callable[[int, LayerSpec], Shapes] = nothing,
        sharding: Placing = None,
        pages: Callable[[int, LayerSpec], Shapes] = nothing,
        page: int = 1,
        host: Collection[int] = (),
    ) -> Cache:
        """An empty cache with keys and values of ``dtype``, and of a layer the ``extra`` columns
        and the ``pages`` of ``page`` positions.

        ``sharding``: of all arrays, as `jspec.start_decoding` takes it. ``host``: layers whose keys
        and values lie in the host's memory.
        """

        def made(kind: str, layer: int, shapes: Shapes, size: int) -> dict[str, Array]:
            arrays = {}
            for name, (own, own_dtype) in shapes.items():
                shape = (batch, size, *own)
                where = placed(f"cache.{kind}.{layer}.{name}", shape, sharding)
                if layer in host and name in ("keys", "values"):
                    arrays[name] = place_in_host(np.zeros(shape, own_dtype or dtype), where)
                else:
                    arrays[name] = jnp.zeros(shape, own_dtype or dtype, device=where)
            return arrays

        def columns_of(layer: int, spec: LayerSpec, layout: Layout) -> dict[str, Array]:
            shapes = {"keys": ((spec.kv_heads, spec.key_size), dtype)}
            if not spec.values_in_keys:
                shapes["values"] = ((spec.kv_heads, spec.value_size), dtype)
            return made("columns", layer, shapes | dict(extra(layer, spec)), layout.size)

        def pages_of(layer: int, spec: LayerSpec, layout: Layout) -> dict[str, Array]:
            return made("pages", layer, pages(layer, spec), -(-layout.size // page))

        layers = list(enumerate(zip(specs, layouts, strict=True)))
        return cls(
            columns=tuple(columns_of(layer, *pair) for layer, pair in layers),
            lengths=jnp.zeros((batch,), jnp.int32),
            specs=tuple(specs),
            layouts=tuple(layouts),
            pages=tuple(pages_of(layer, *pair) for layer, pair in layers),
            page=page,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and pages over all layers."""
        leaves = jax.tree.leaves((self.columns, self.pages))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    def append(self, layer: int, positions: Array, **columns: Array) -> Cache:
        """Write ``columns [B, T, ...]`` of one layer at ``positions [B, T]``; -1 writes nothing.

        Lengths stay as they are until `with_lengths`: what was written past them can be committed
        or, by doing nothing, be undone. Positions ascend in a row, and lie below the capacity of
        the layout, which `jspec.start_decoding` makes sure of before the first step.
        """
        held = self.columns[layer]
        if columns.keys() != held.keys():
            raise ValueError(
                f"layer {layer} keeps {sorted(held)}, but {sorted(columns)} were appended"
            )
        return self.written(layer, self.slots(layer, positions), **columns)

    def written(self, layer: int, slots: Array, **columns: Array) -> Cache:
        """Write some ``columns [B, T, ...]`` of a layer into ``slots [B, T]``, as `slots` gives."""
        self.check_keeps(layer, columns)
        held, rows = self.columns[layer], jnp.arange(slots.shape[0])[:, None]
        return self.replaced(
            layer,
            **{
                name: held[name].at[rows, slots].set(x.astype(held[name].dtype), mode="drop")
                for name, x in columns.items()
            },
        )

    def check_keeps(self, layer: int, names: Iterable[str]) -> None:
        """Raise `ValueError` unless a layer has columns of these ``names``."""
        held = self.columns[layer]
        if missing := set(names) - held.keys():
            raise ValueError(
                f"layer {layer} keeps {sorted(held)} and no {sorted(missing)}; start decoding with "
                "the config of the steps, whose policy says what it keeps"
            )

    def slots(self, layer: int, positions: Array) -> Array:
        """Where a pass at ``positions [B, T]`` writes, int32 ``[B, T]``, each slot once.

        The number of slots, past the end, for -1 and for a position whose slot a later one takes.
        """
        layout = self.layouts[layer]
        return layout.slots(_last(positions, layout.capacity))

    def replaced(self, layer: int, **columns: Array) -> Cache:
        """The cache with these columns of a layer in place of its own; it keeps the others."""
        held = self.columns[layer] | columns
        after = (*self.columns[:layer], held, *self.columns[layer + 1 :])
        return dataclasses.replace(self, columns=after)

    def device_rows_of(self, layer: int) -> DeviceRows | None:
        """The `device_rows` of a layer."""
        return self.device_rows[layer] if self.device_rows else None

    def with_device_rows(self, layer: int, device_rows: DeviceRows) -> Cache:
        """The cache with other `device_rows` of a layer."""
        after = (*self.device_rows[:layer], device_rows, *self.device_rows[layer + 1 :])
        return dataclasses.replace(self, device_rows=after)

    def with_lengths(self, lengths: Array) -> Cache:
        """The same slots with other ``lengths [B]``: shorter rolls back, longer commits."""
        return dataclasses.replace(self, lengths=lengths)

    def grown(self, capacity: int) -> Cache:
        """The same positions with room for ``capacity`` of them; the arrays of this one are freed.

        Raises `ValueError` for pages that lie on several ranks.
        """
        for held, layout in zip(self.pages, self.layouts, strict=True):
            if held and layout.ranks > 1:
                raise ValueError(
                    f"pages of {self.page} slots cannot grow with {layout}, whose slots move to "
                    "other pages; start with the capacity that is needed"
                )
        layouts = tuple(layout.grown(capacity) for layout in self.layouts)
        columns = tuple(
            {name: longer(x, layout.size, parts=layout.ranks) for name, x in held.items()}
            for held, layout in zip(self.columns, layouts, strict=True)
        )
        pages = tuple(
            {name: longer(x, -(-layout.size // self.page)) for name, x in held.items()}
            for held, layout in zip(self.pages, layouts, strict=True)
        )
        return dataclasses.replace(self, columns=columns, layouts=layouts, pages=pages)

    def keys(self, layer: int) -> Array:
        """Keys of a layer, ``[B, S, K, key size]``."""
        return self.columns[layer]["keys"]

    def values(self, layer: int) -> Array:
        """Values of a layer, ``[B, S, K, value size]``."""
        return values_of(self.specs[layer], self.columns[layer])


def longer(x: Array, size: int, fill: int = 0, *, axis: int = 1, parts: int = 1) -> Array:
    """``x [B, S, ...]`` as ``[B, size, ...]`` with ``fill`` behind; its own memory is freed.

    Behind each of ``parts`` equal parts of the ``axis``, each of which its device fills up itself.
    """
    if size == x.shape[axis]:
        return x
    settings = {"size": size, "fill": fill, "axis": axis, "parts": parts}
    if in_host(x):
        found = jax.device_put(_lengthened(np.asarray(x), **settings), x.sharding)
    else:
        found = _lengthening(x.sharding, **settings)(x)
    x.delete()
    return found


@functools.lru_cache(maxsize=64)
def _lengthening(sharding: jax.sharding.Sharding, **settings: int) -> Any:
    return jax.jit(functools.partial(_lengthened, **settings), out_shardings=sharding)


def _lengthened(x: Any, *, size: int, fill: int, axis: int, parts: int) -> Any:
    own, after = x.shape[axis] // parts, size // parts
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    widths = [(0, 0)] * (x.ndim + 1)
    widths[axis + 1] = (0, after - own)
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    found = pad(x.reshape(*before, parts, own, *behind), widths, constant_values=fill)
    return found.reshape(*before, size, *behind)


def values_of(spec: LayerSpec, columns: Mapping[str, Array]) -> Array:
    """The values among a layer's columns, where they may be the first channels of the keys."""
    if spec.values_in_keys:
        return columns["keys"][..., : spec.value_size]
    return columns["values"]


def _last(positions: Array, size: int) -> Array:
    """``positions [B, T]`` with -1 for those whose slot a later one of the same row takes."""
    if positions.shape[1] <= size:
        return positions
    newest = positions.max(axis=1, keepdims=True)
    return jnp.where(positions > newest - size, positions, -1)
