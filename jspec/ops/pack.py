"""Packing: the accepted rows of a ragged batch, one behind the other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend, Operation, always
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows packed without gaps, in a buffer of static capacity.

    ``rows [B * gamma, D]``: those of batch row b begin at ``offsets[b]``; what lies at and past
    ``total`` is unspecified. ``offsets`` int32 ``[B]``; ``total`` int32 ``[]``, on the device like
    the rest: asking for it is what would make the host wait.
    """

    rows: Array
    offsets: Array
    total: Array


def packed_like(rows: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the fields of `Packed` for ``rows [B, gamma, D]``."""
    batch, gamma, width = rows.shape
    return (
        jax.ShapeDtypeStruct((batch * gamma, width), rows.dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def pack(rows: Array, accepted: Array, *, implementation: str | None = None) -> Packed:
    """Pack the first ``accepted[b]`` of each ``rows[b]`` into one buffer.

    ``rows [B, gamma, D]`` of any dtype; ``accepted`` int32 ``[B]`` in 0..gamma.
    """
    check_pack(rows, accepted)
    return Packed(*PACK(rows, accepted, implementation=implementation))


def check_pack(rows: Array, accepted: Array) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `pack`."""
    if rows.ndim != 3 or accepted.shape != rows.shape[:1]:
        raise ValueError(
            f"rows {rows.shape} and accepted {accepted.shape} must be [B, gamma, D], [B]"
        )
    if accepted.dtype != jnp.int32:
        raise ValueError(f"accepted {accepted.dtype} must be int32")


def pack_xla(rows: Array, accepted: Array) -> tuple[Array, Array, Array]:
    """The reference of `pack`: the fields of `Packed`, zeros behind the last row."""
    batch, gamma, width = rows.shape
    accepted = jnp.clip(accepted, 0, gamma)
    ends = jnp.cumsum(accepted, dtype=jnp.int32)
    offsets = ends - accepted
    index = jnp.arange(gamma, dtype=jnp.int32)[None]
    # What was rejected is sent past the end, where "drop" leaves it out.
    target = jnp.where(index < accepted[:, None], offsets[:, None] + index, batch * gamma)
    packed = jnp.zeros((batch * gamma, width), rows.dtype)
    return packed.at[target].set(rows, mode="drop"), offsets, ends[-1]


def _preference(platform: str, rows: Array, accepted: Array) -> tuple[str, ...]:
    """By device time on an H100: Pallas gains on long runs, and loses where there are many rows."""
    if platform != "gpu":
        return ("xla",)
    batch, gamma, width = rows.shape
    run = gamma * width * rows.dtype.itemsize
    if run >= (2**14 if batch <= 64 else 2**17):
        return ("pallas", "triton", "cuda", "xla")
    return ("triton", "pallas", "cuda", "xla")


# Backends return the fields of `Packed` in order.
PACK = Operation(
    "pack",
    {
        "xla": Backend("xla", pack_xla, always),
        "triton": "jspec.triton.pack:PACK",
        "pallas": "jspec.pallas.pack:PACK",
        "cuda": "jspec.cuda_ffi.pack:PACK",
    },
    _preference,
)
