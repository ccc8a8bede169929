"""Rows of columns in the host's memory: fetched for attention, stored after they are computed.

`fetch_rows`, `fetch_ahead` and `store_rows` are the public operations. ``xla``, the reference,
copies whole columns to the device. A CUDA kernel reads and writes only the rows, over the bus.
Columns in the device's memory are accepted too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.host import in_host, to_device, to_host
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Rows of columns that are already on the device.

    Attributes:
        rows: ``[B, m, K, H]`` of each column.
        slots: int32 ``[B, K, m]``, the slots of the rows, ascending, then -1.
    """

    rows: tuple[Array, ...]
    slots: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefetchedRows(DeviceRows):
    """Rows that are being fetched: only `fetch_rows` may read them.

    Attributes:
        backend: the name of the backend that fetches them.
    """

    backend: str = dataclasses.field(metadata={"static": True})


def fetch_rows(
    columns: Sequence[Array],
    slots: Array,
    *,
    device_rows: DeviceRows | None = None,
    prefetched: PrefetchedRows | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """The rows of columns that each KV head reads, on the device.

    ``device_rows`` and ``prefetched`` must be rows of the same columns that were not stored since.

    Args:
        columns: one or two ``[B, S, K, H]``, in the host's memory or the device's.
        slots: int32 ``[B, K, n]``; a slot outside of 0..S - 1 gives zeros.
        device_rows: rows that are copied from there.
        prefetched: the result of `fetch_ahead`, which is waited for; used for the other rows.
        implementation: the backend by name; None is the best one. With ``prefetched`` it is that of
            `fetch_ahead`.

    Returns:
        ``[B, n, K, H]`` of each column.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    columns = tuple(columns)
    _check(columns, slots)
    sources = (None, None) if device_rows is None else (device_rows.rows, device_rows.slots)
    if prefetched is None:
        return FETCH_ROWS(columns, slots, *sources, None, None, implementation=implementation)
    # The backend that began to fetch is the one that knows when they are there.
    sources = (*sources, prefetched.rows, prefetched.slots)
    return FETCH_ROWS(columns, slots, *sources, implementation=prefetched.backend)


def fetch_ahead(
    columns: Sequence[Array],
    slots: Array,
    through: Array,
    *,
    device_rows: DeviceRows | None = None,
    implementation: str | None = None,
) -> tuple[PrefetchedRows, Array]:
    """Start to fetch rows while the device computes (InfiniGen, Lee et al. 2024).

    Args:
        columns: one or two ``[B, S, K, H]``, in the host's memory or the device's.
        slots: int32 ``[B, K, m]``, ascending, then -1.
        through: any array; it is returned unchanged, and what is computed from the returned one
            runs while the rows are fetched.
        device_rows: rows that are not fetched, and 0 in the result; give the same ones to
            `fetch_rows`.
        implementation: the backend by name; None is the best one.

    Returns:
        The rows for `fetch_rows`, and ``through``.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    columns = tuple(columns)
    _check(columns, slots)
    arguments = columns, slots, through, None if device_rows is None else device_rows.slots
    backend = FETCH_AHEAD.choose(implementation, *arguments)
    *rows, through = FETCH_AHEAD(*arguments, implementation=backend.name)
    return PrefetchedRows(tuple(rows), slots, backend.name), through


def store_rows(
    columns: Sequence[Array],
    rows: Sequence[Array],
    slots: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Write rows into columns, which stay in the memory that they are in.

    Args:
        columns: one or two ``[B, S, K, H]``.
        rows: ``[B, T, K, H]`` for each column, of its dtype.
        slots: int32 ``[B, T]``, each at most once in a row; a row whose slot is outside of 0..S - 1
            is not written.
        implementation: the backend by name; None is the best one.

    Returns:
        The columns with the rows.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    columns, rows = tuple(columns), tuple(rows)
    for column, row in zip(columns, rows, strict=True):
        fits = row.shape[:2] == slots.shape and row.shape[2:] == column.shape[2:]
        if not fits or row.dtype != column.dtype or column.shape[0] != len(slots):
            raise ValueError(
                f"rows {row.dtype}{list(row.shape)} must be of the column "
                f"{column.dtype}{list(column.shape)} and have slots {slots.shape} of [B, T]"
            )
    return STORE_ROWS(columns, rows, slots, implementation=implementation)


def _check(columns: tuple[Array, ...], slots: Array) -> None:
    shapes = [column.shape for column in columns]
    if not 1 <= len(shapes) <= 2 or any(len(s) != 4 or s[:3] != shapes[0][:3] for s in shapes):
        raise ValueError(f"columns {shapes} must be one or two of [B, S, K, H]")
    leading_shape = (shapes[0][0], shapes[0][2])
    if slots.ndim != 3 or slots.shape[:2] != leading_shape or slots.dtype != jnp.int32:
        raise ValueError(
            f"slots {slots.dtype}{list(slots.shape)} must be int32 {[*leading_shape, 'n']}"
        )


def _on_device(column: Array) -> Array:
    return to_device(column) if in_host(column) else column


def _rows(column: Array, slots: Array) -> Array:
    """The rows of a column on the device at ``slots [B, K, n]``, zeros for slots outside of it."""
    index = jnp.swapaxes(slots, 1, 2)[..., None]
    rows = jnp.take_along_axis(column, index, axis=1, mode="clip")
    return jnp.where((index >= 0) & (index < column.shape[1]), rows, 0)


def _places(slots: Array, there: Array) -> Array:
    """The index of each of ``slots [B, K, n]`` in ``there [B, K, m]``, or -1."""
    if not there.shape[-1]:
        return jnp.full_like(slots, -1)
    same = (slots[..., None] == there[:, :, None]) & (slots >= 0)[..., None]
    return jnp.where(same.any(axis=-1), same.argmax(axis=-1), -1).astype(jnp.int32)


def fetch_rows_xla(
    columns: tuple[Array, ...],
    slots: Array,
    device_rows: tuple[Array, ...] | None,
    device_slots: Array | None,
    prefetched_rows: tuple[Array, ...] | None,
    prefetched_slots: Array | None,
) -> tuple[Array, ...]:
    """The reference of `fetch_rows`; rows and slots of the arguments that it leaves out are None.

    Rows on the device are copied although the columns have them too, so that a test can tell from
    the result whether they are right.
    """
    rows = tuple(_rows(_on_device(column), slots) for column in columns)
    for source_rows, source_slots in (
        (prefetched_rows, prefetched_slots),
        (device_rows, device_slots),
    ):
        if source_rows is not None and source_slots is not None:
            places = _places(slots, source_slots)
            is_present = jnp.swapaxes(places >= 0, 1, 2)[..., None]
            rows = tuple(
                jnp.where(is_present, _rows(x, places), fetched)
                for x, fetched in zip(source_rows, rows, strict=True)
            )
    return rows


def _fetch_ahead_xla(
    columns: tuple[Array, ...], slots: Array, through: Array, device_slots: Array | None
) -> tuple[Array, ...]:
    if device_slots is not None:
        slots = jnp.where(_places(slots, device_slots) < 0, slots, -1)
    return *fetch_rows_xla(columns, slots, None, None, None, None), through


def _store_rows_xla(
    columns: tuple[Array, ...], rows: tuple[Array, ...], slots: Array
) -> tuple[Array, ...]:
    batch = jnp.arange(len(slots))[:, None]
    stored = []
    for column, row in zip(columns, rows, strict=True):
        inside = jnp.where(
            slots >= 0, slots, column.shape[1]
        )  # negative ones would count from the end
        after = _on_device(column).at[batch, inside].set(row, mode="drop")
        stored.append(to_host(after) if in_host(column) else after)
    return tuple(stored)


def host_rows_sizes(
    columns: tuple[Array, ...], slots: Array, *args: Array | None
) -> dict[str, int]:
    """The sizes that backends of fetching are ordered by."""
    return {"batch": columns[0].shape[0], "rows": slots.shape[-1]}


def store_rows_sizes(
    columns: tuple[Array, ...], rows: tuple[Array, ...], slots: Array
) -> dict[str, int]:
    """The sizes that backends of storing are ordered by."""
    return {"batch": len(slots), "tokens": slots.shape[1]}


# ``(B, S, K, sizes, n, m, dtype)`` by name: slots to fetch, and slots on the device or prefetched.
_SHAPES = {
    "small": (2, 9, 2, (8, 4), 5, 4, "float32"),
    "half": (3, 70, 2, (128, 128), 40, 33, "bfloat16"),
    "one-column": (1, 300, 3, (20,), 200, 130, "float16"),
    "odd-bytes": (2, 40, 1, (3, 5), 7, 1, "int8"),
}


def _ascending(rng: np.random.Generator, batch: int, heads: int, slots: int, n: int) -> np.ndarray:
    """Distinct slots in ascending order, then -1; every second row has fewer."""
    selected = np.full((batch, heads, n), -1, np.int32)
    for at, row in enumerate(selected.reshape(-1, n)):
        count = min(n, slots) if at % 2 == 0 else int(rng.integers(0, min(n, slots) + 1))
        row[:count] = np.sort(rng.choice(slots, count, replace=False))
    return selected


def _columns(rng, batch, slots, heads, sizes, dtype) -> tuple[np.ndarray, ...]:
    shapes = [(batch, slots, heads, size) for size in sizes]
    return tuple((rng.standard_normal(shape) * 9).astype(dtype) for shape in shapes)


def _fetched(
    batch, slots, heads, sizes, n, m, dtype, *, on_device: bool, prefetched: bool
) -> tuple:
    rng = np.random.default_rng(n)
    columns = _columns(rng, batch, slots, heads, sizes, jnp.dtype(dtype))
    requested = _ascending(rng, batch, heads, slots, n)
    # The selection ends with slots in no order, some past both ends.
    requested[..., -2:] = rng.choice([-1, 0, slots - 1, slots], (batch, heads, 2))
    sources = []
    for is_used in (on_device, prefetched):
        source_slots = _ascending(rng, batch, heads, slots, m)
        index = np.maximum(np.swapaxes(source_slots, 1, 2), 0)[..., None]
        rows = tuple(np.take_along_axis(x, index, axis=1) for x in columns)
        sources += [rows, source_slots] if is_used else [None, None]
    return columns, requested, *sources


def _cases() -> list[Case]:
    kinds = {"": (False, False), "-ahead": (False, True), "-both": (True, True)}
    cases = []
    for name, shape in _SHAPES.items():
        for kind, (on_device, prefetched) in kinds.items():
            build = functools.partial(_fetched, *shape, on_device=on_device, prefetched=prefetched)
            cases.append(Case(name + kind, build, small=name == "small"))
    return cases


def _ahead_cases() -> list[Case]:
    def build() -> tuple:
        rng = np.random.default_rng(0)
        columns = _columns(rng, 2, 30, 2, (16, 16), np.dtype("float32"))
        slots, device_rows = (_ascending(rng, 2, 2, 30, n) for n in (12, 9))
        return columns, slots, np.arange(6, dtype=np.float32), device_rows

    return [Case("two-columns", build, small=True)]


def _store_cases() -> list[Case]:
    def build(batch, slots, heads, sizes, tokens, dtype):
        rng = np.random.default_rng(tokens)
        columns = _columns(rng, batch, slots, heads, sizes, jnp.dtype(dtype))
        rows = _columns(rng, batch, tokens, heads, sizes, jnp.dtype(dtype))
        where = np.stack([rng.choice(slots, tokens, replace=False) for _ in range(batch)])
        where[0, :2] = [-1, slots]
        return columns, rows, where.astype(np.int32)

    shapes = {
        "small": (2, 7, 2, (4, 8), 3, "float32"),
        "half": (3, 90, 4, (64, 64), 33, "bfloat16"),
        "odd-bytes": (2, 9, 1, (3,), 4, "int8"),
    }
    return [
        Case(name, lambda shape=shape: build(*shape), small=name == "small")
        for name, shape in shapes.items()
    ]


FETCH_ROWS = Operation(
    "fetch_rows",
    {
        "xla": Backend("xla", fetch_rows_xla, always),
        "cuda": "jspec.cuda_ffi.host_rows:FETCH_ROWS",
    },
    host_rows_sizes,
    _cases,
)
FETCH_AHEAD = Operation(
    "fetch_ahead",
    {
        "xla": Backend("xla", _fetch_ahead_xla, always),
        "cuda": "jspec.cuda_ffi.host_rows:FETCH_AHEAD",
    },
    host_rows_sizes,
    _ahead_cases,
)
STORE_ROWS = Operation(
    "store_rows",
    {
        "xla": Backend("xla", _store_rows_xla, always),
        "cuda": "jspec.cuda_ffi.host_rows:STORE_ROWS",
    },
    store_rows_sizes,
    _store_cases,
)
