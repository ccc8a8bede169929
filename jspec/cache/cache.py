"""The cache: columns of each layer under a layout, appended at ragged offsets, undone by length.

A column has one entry per token: its key, its value, or what a policy keeps in addition. A page has
what a policy computes from several neighbouring tokens, committed ones only. Slots without a
committed position are undefined; their content, NaN included, never reaches an output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cache.layout import Layout, PagedLayout, Stripe
from jspec.cache.storage import TOKEN_COLUMNS, HostStorage
from jspec.config import LayerSpec
from jspec.host import in_host, place_in_host
from jspec.ops.cached import as_cached
from jspec.ops.host_rows import DeviceRows
from jspec.ops.path import pack_path
from jspec.sharding import Placing, placed
from jspec.typing import Array

# Shape and dtype of an entry by the name of a column or page; a dtype of None is that of the keys.
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


def no_shapes(layer: int, spec: LayerSpec) -> Shapes:
    """No further columns or pages."""
    return {}


# Maps queries and their positions to output and log-sum-exp.
Read = Callable[[Array, Array], tuple[Array, Array]]


class Shards(Protocol):
    """How devices that hold parts of the same rows attend together, inside `jax.shard_map`.

    Frozen and hashable.
    """

    def attended(
        self, read: Read, q: Array, positions: Array, up: Array | None = None
    ) -> tuple[Array, Array]:
        """Attention of queries over the keys of all devices.

        Args:
            read: ``read(q, positions)`` returns output and log-sum-exp over the keys of this
                device. It may be called several times, with -1 for the positions of other rows.
            q: ``[B, T, N, H]``: queries.
            positions: int32 ``[B, T]``: their positions.
            up: ``[N, value size, H']``: the linear map of each head's output that the model asks
                for.

        Returns:
            Output and log-sum-exp of the heads whose part of the model's output projection this
            device has.
        """
        ...

    def merged(self, out: Array, lse: Array, up: Array | None = None) -> tuple[Array, Array]:
        """`attended`, from the result of ``read`` for all queries.

        Args:
            out: The output of all queries over the keys of this device.
            lse: Its log-sum-exp.
            up: ``[N, value size, H']``: the linear map of each head's output that the model asks
                for.

        Returns:
            Output and log-sum-exp of the heads whose part of the model's output projection this
            device has.
        """
        ...

    def local_heads(self, x: Array) -> Array:
        """The entries of ``x [N, ...]`` for the heads that `attended` returns."""
        ...

    def over_positions(self, lse: Array) -> Array:
        """The log-sum-exp over the keys of all devices, by ``lse`` over those of this one."""
        ...

    def over_heads(self, x: Array) -> Array:
        """The sum of ``x`` over the devices that hold the other key-value heads."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "lengths", "layouts", "pages", "device_rows", "table"],
    meta_fields=["specs", "page", "storage", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Columns of every layer, and how many positions of each row are committed.

    Attributes:
        columns: Per layer, arrays by name, each ``[B, S, ...]``: ``keys [B, S, K, key size]``,
            ``values [B, S, K, value size]`` unless they are part of the keys, and a policy's
            columns; of a `PagedLayout` ``[blocks, block, ...]``.
        lengths: int32 ``[B]``: committed positions per row.
        specs: The `LayerSpec` of each layer, static.
        layouts: The layout of each layer.
        pages: Per layer, arrays by name, each ``[B, ceil(S / page), ...]``, one entry for ``page``
            neighbouring positions; a page without a committed position is undefined.
        device_rows: Per layer in host memory, the rows that the last pass read of it, on the
            device; set inside a chunk of steps only.
        table: int32 ``[B, W]``: the block table of all layers with a `PagedLayout`: the number of
            the block of the positions from ``i * block`` on, -1 for none. What is written there is
            dropped. None without such layers.
        page: Positions of a page, static.
        storage: Which layers lie in host memory, static; None for no layer.
        shards: How devices attend together, where this is one device's part of the cache.
    """

    columns: tuple[dict[str, Array], ...]
    lengths: Array
    specs: tuple[LayerSpec, ...]
    layouts: tuple[Layout, ...]
    pages: tuple[dict[str, Array], ...] = ()
    device_rows: tuple[DeviceRows | None, ...] = ()
    table: Array | None = None
    page: int = 1
    storage: HostStorage | None = None
    shards: Shards | None = None

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpec],
        layouts: Sequence[Layout],
        batch: int,
        dtype: Any,
        extra: Callable[[int, LayerSpec], Shapes] = no_shapes,
        sharding: Placing = None,
        pages: Callable[[int, LayerSpec], Shapes] = no_shapes,
        page: int = 1,
        storage: HostStorage | None = None,
    ) -> Cache:
        """An empty cache.

        Args:
            specs: The `LayerSpec` of each layer.
            layouts: The layout of each layer.
            batch: Rows.
            dtype: Dtype of keys and values.
            extra: ``extra(layer, spec)`` returns shape and dtype, by name, of a layer's further
                columns.
            sharding: Where the arrays lie, as in `jspec.start_decoding`.
            pages: ``pages(layer, spec)`` returns shape and dtype, by name, of a layer's pages.
            page: Positions of a page.
            storage: Which layers have their keys and values in host memory; None for no layer.

        Raises:
            ValueError: For columns or pages of a policy in a layer with a `PagedLayout`.
        """

        host_layers = () if storage is None else storage.layers(specs)

        def zeros(kind: str, layer: int, shapes: Shapes, lead: tuple[int, int]) -> dict[str, Array]:
            arrays = {}
            for name, (token_shape, column_dtype) in shapes.items():
                shape = (*lead, *token_shape)
                where = placed(f"cache.{kind}.{layer}.{name}", shape, sharding)
                if layer in host_layers and name in TOKEN_COLUMNS:
                    arrays[name] = place_in_host(np.zeros(shape, column_dtype or dtype), where)
                else:
                    arrays[name] = jnp.zeros(shape, column_dtype or dtype, device=where)
            return arrays

        def columns_of(layer: int, spec: LayerSpec, layout: Layout) -> dict[str, Array]:
            shapes = {"keys": ((spec.kv_heads, spec.key_size), dtype)}
            if not spec.values_in_keys:
                shapes["values"] = ((spec.kv_heads, spec.value_size), dtype)
            more, lead = dict(extra(layer, spec)), (batch, layout.size)
            if isinstance(layout, PagedLayout):
                lead = layout.blocks, layout.block
                if names := sorted({*more, *pages(layer, spec)}):
                    raise ValueError(
                        f"layer {layer} keeps {', '.join(names)} for a policy, and a cache in "
                        "blocks has keys and values alone; leave out cache_blocks"
                    )
            return zeros("columns", layer, shapes | more, lead)

        def pages_of(layer: int, spec: LayerSpec, layout: Layout) -> dict[str, Array]:
            return zeros("pages", layer, pages(layer, spec), (batch, -(-layout.size // page)))

        layers = list(enumerate(zip(specs, layouts, strict=True)))
        widths = {x.width for x in layouts if isinstance(x, PagedLayout)}
        return cls(
            columns=tuple(columns_of(layer, *pair) for layer, pair in layers),
            lengths=jnp.zeros((batch,), jnp.int32),
            specs=tuple(specs),
            layouts=tuple(layouts),
            pages=tuple(pages_of(layer, *pair) for layer, pair in layers),
            table=jnp.full((batch, max(widths)), -1, jnp.int32) if widths else None,
            page=page,
            storage=storage,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and pages over all layers."""
        leaves = jax.tree.leaves((self.columns, self.pages))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    def append(self, layer: int, positions: Array, **columns: Array) -> Cache:
        """Write columns of new tokens in one layer.

        Lengths do not change until `with_lengths`: tokens past them can be committed, or are undone
        by leaving lengths as they are.

        Args:
            layer: The layer's index.
            positions: int32 ``[B, T]``, ascending in a row, -1 writes nothing. They must be below
                the capacity of the layout, as `jspec.start_decoding` checks before the first step.
            **columns: All columns of the layer by name, ``[B, T, ...]``.

        Raises:
            ValueError: For names other than those of the layer's columns.
        """
        layer_columns = self.columns[layer]
        if columns.keys() != layer_columns.keys():
            raise ValueError(
                f"layer {layer} keeps {sorted(layer_columns)}, but {sorted(columns)} were appended"
            )
        return self.written(layer, self.slots(layer, positions), **columns)

    def written(self, layer: int, slots: Array, **columns: Array) -> Cache:
        """Write some ``columns [B, T, ...]`` of a layer into ``slots [B, T]``.

        The slots are those that `slots` returns.
        """
        self.check_keeps(layer, columns)
        layer_columns, slots = self.in_memory(layer, slots)
        return self.replaced(
            layer,
            **{
                name: layer_columns[name]
                .at[jnp.arange(len(layer_columns[name]))[:, None], slots]
                .set(as_cached(x, layer_columns[name].dtype), mode="drop")
                for name, x in columns.items()
            },
        )

    def table_of(self, layer: int) -> Array | None:
        """The block table of a layer; None where each row has its slots in one piece."""
        return self.table if isinstance(self.layouts[layer], PagedLayout) else None

    def in_memory(self, layer: int, slots: Array) -> tuple[dict[str, Array], Array]:
        """A layer's columns ``[B or 1, n, ...]``, and where the ``slots [B, ...]`` of rows are.

        Those of a `PagedLayout` are one row, which all rows read and write.
        """
        layout, columns = self.layouts[layer], self.columns[layer]
        if not isinstance(layout, PagedLayout):
            return columns, slots
        assert self.table is not None
        flat = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in columns.items()}
        return flat, layout.pool_slots(self.table, slots)

    def check_keeps(self, layer: int, names: Iterable[str]) -> None:
        """Raise `ValueError` unless a layer has columns of these ``names``."""
        layer_columns = self.columns[layer]
        if missing := set(names) - layer_columns.keys():
            raise ValueError(
                f"layer {layer} keeps {sorted(layer_columns)} and no {sorted(missing)}; start "
                "decoding with the config of the steps, whose policy says what it keeps"
            )

    def slots(self, layer: int, positions: Array) -> Array:
        """The slots that a pass at ``positions [B, T]`` writes, int32 ``[B, T]``, each slot once.

        It is the number of slots, past the end, for -1 and for a position whose slot a later one
        takes.
        """
        layout = self.layouts[layer]
        return layout.slots(_without_overwritten(positions, layout.capacity))

    def replaced(self, layer: int, **columns: Array) -> Cache:
        """The cache with these columns of a layer replaced; the others stay.

        They may be in the shape that `in_memory` gives them.
        """
        before = self.columns[layer]
        if self.table_of(layer) is not None:
            columns = {name: x.reshape(before[name].shape) for name, x in columns.items()}
        layer_columns = before | columns
        after = (*self.columns[:layer], layer_columns, *self.columns[layer + 1 :])
        return dataclasses.replace(self, columns=after)

    def device_rows_of(self, layer: int) -> DeviceRows | None:
        """The `device_rows` of a layer."""
        return self.device_rows[layer] if self.device_rows else None

    def with_device_rows(self, layer: int, device_rows: DeviceRows) -> Cache:
        """The cache with the `device_rows` of a layer replaced."""
        after = (*self.device_rows[:layer], device_rows, *self.device_rows[layer + 1 :])
        return dataclasses.replace(self, device_rows=after)

    def with_lengths(self, lengths: Array | np.ndarray) -> Cache:
        """The same slots with other ``lengths [B]``: shorter ones roll back, longer ones commit."""
        return dataclasses.replace(self, lengths=lengths)

    def grown(self, capacity: int) -> Cache:
        """The same positions with room for ``capacity`` of them; the old arrays are freed.

        Raises `ValueError` for pages of a layout with several ranks.
        """
        for layer_pages, layout in zip(self.pages, self.layouts, strict=True):
            if layer_pages and layout.ranks > 1:
                raise ValueError(
                    f"pages of {self.page} slots cannot grow with {layout}, whose slots move to "
                    "other pages; start with the capacity that is needed"
                )
        layouts = tuple(layout.grown(capacity) for layout in self.layouts)
        columns = tuple(
            {name: longer(x, layout.size, parts=layout.ranks) for name, x in layer_columns.items()}
            for layer_columns, layout in zip(self.columns, layouts, strict=True)
        )
        pages = tuple(
            {name: longer(x, -(-layout.size // self.page)) for name, x in layer_pages.items()}
            for layer_pages, layout in zip(self.pages, layouts, strict=True)
        )
        return dataclasses.replace(self, columns=columns, layouts=layouts, pages=pages)

    def moved(self, sources: Array, targets: Array, counts: Array) -> Cache:
        """The same with the first ``counts [B]`` of ``sources`` at the positions ``targets``.

        Both int32 ``[B, n]``, ascending in a row, and no target is after its source: as
        `jspec.ops.pack_path` takes their slots. Devices that share the rows exchange the entries.
        """
        columns = list(self.columns)
        for layout in dict.fromkeys(self.layouts):
            layers = [i for i, other in enumerate(self.layouts) if other == layout]
            names = [(i, name) for i in layers for name in columns[i]]
            arrays = [columns[i][name] for i, name in names]
            arguments = arrays, layout.slots(sources), layout.slots(targets), counts
            self._check_in_one_piece(layers[0])
            if isinstance(layout, Stripe):
                moved = _moved_among_ranks(*arguments, layout.axis)
            else:
                moved = pack_path(*arguments)
            for (i, name), x in zip(names, moved, strict=True):
                columns[i] = columns[i] | {name: x}
        return dataclasses.replace(self, columns=tuple(columns))

    def keys(self, layer: int) -> Array:
        """Keys of a layer, ``[B, S, K, key size]``; not of a `PagedLayout`."""
        self._check_in_one_piece(layer)
        return self.columns[layer]["keys"]

    def values(self, layer: int) -> Array:
        """Values of a layer, ``[B, S, K, value size]``; not of a `PagedLayout`."""
        self._check_in_one_piece(layer)
        return values_of(self.specs[layer], self.columns[layer])

    def _check_in_one_piece(self, layer: int) -> None:
        """Raise `ValueError` where rows do not have the slots of a layer in one piece."""
        if isinstance(self.layouts[layer], PagedLayout):
            raise ValueError(
                f"layer {layer} is in blocks, and what reads it needs the keys of a row in one "
                "piece; leave out cache_blocks"
            )


def _moved_among_ranks(
    columns: Sequence[Array],
    source_slots: Array,
    target_slots: Array,
    counts: Array,
    axis: str | tuple[str, ...],
) -> list[Array]:
    """As `jspec.ops.pack_path`, where each rank of ``axis`` has some of the slots.

    Slots of other ranks are those from S on. An entry is on one rank: the sum over all is what it
    is, to the bit but for the sign of zero.
    """
    rows, index = jnp.arange(len(counts))[:, None], jnp.arange(source_slots.shape[1])[None]

    def moved(x: Array) -> Array:
        # NCCL sums no floats of 8 bits.
        bits = lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
        entries = bits.at[rows, source_slots].get(mode="fill", fill_value=0)
        entries = lax.bitcast_convert_type(lax.psum(entries, axis), x.dtype)
        target = jnp.where(index < counts[:, None], target_slots, x.shape[1])
        return x.at[rows, target].set(entries, mode="drop")

    return list(map(moved, columns))


def longer(x: Array, size: int, fill: int = 0, *, axis: int = 1, parts: int = 1) -> Array:
    """``x`` with its ``axis`` extended to ``size`` by ``fill``; the memory of ``x`` is freed.

    ``parts``: each of so many equal parts of the axis is extended at its end, by its own device.
    """
    if size == x.shape[axis]:
        return x
    settings = {"size": size, "fill": fill, "axis": axis, "parts": parts}
    if in_host(x):
        lengthened = jax.device_put(_lengthened(np.asarray(x), **settings), x.sharding)
    else:
        lengthened = _lengthening(x.sharding, **settings)(x)
    x.delete()
    return lengthened


@functools.lru_cache(maxsize=64)
def _lengthening(sharding: jax.sharding.Sharding, **settings: int) -> Any:
    return jax.jit(functools.partial(_lengthened, **settings), out_shardings=sharding)


def _lengthened(x: Any, *, size: int, fill: int, axis: int, parts: int) -> Any:
    part_size, new_part_size = x.shape[axis] // parts, size // parts
    leading, trailing = x.shape[:axis], x.shape[axis + 1 :]
    widths = [(0, 0)] * (x.ndim + 1)
    widths[axis + 1] = (0, new_part_size - part_size)
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    padded = pad(x.reshape(*leading, parts, part_size, *trailing), widths, constant_values=fill)
    return padded.reshape(*leading, size, *trailing)


def values_of(spec: LayerSpec, columns: Mapping[str, Array]) -> Array:
    """The values among a layer's columns; they may be the first channels of the keys."""
    if spec.values_in_keys:
        return columns["keys"][..., : spec.value_size]
    return columns["values"]


def _without_overwritten(positions: Array, size: int) -> Array:
    """``positions [B, T]`` with -1 for those whose slot a later one of the same row takes."""
    if positions.shape[1] <= size:
        return positions
    newest = positions.max(axis=1, keepdims=True)
    return jnp.where(positions > newest - size, positions, -1)
