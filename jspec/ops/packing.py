"""Packing: the accepted KV rows of a ragged batch as one dense buffer.

For a decode loop whose draft writes its keys and values outside of the cache: the buffer goes to a
paged cache or to another device. jspec's own loop needs no such step, since its verification writes
the cache in place.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.cases import counts, kv_rows
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """KV rows packed without gaps, in a buffer of static capacity.

    Attributes:
        kv: ``[B * gamma, D]``; rows from ``total`` on are not specified.
        offsets: int32 ``[B]``, where the rows of each batch row start.
        total: int32 ``[]``, the number of packed rows. It stays on the device: reading it would
            make the host wait.
    """

    kv: Array
    offsets: Array
    total: Array


def packed_like(kv: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the fields of `Packed` for ``kv [B, gamma, D]``."""
    batch, gamma, width = kv.shape
    return (
        jax.ShapeDtypeStruct((batch * gamma, width), kv.dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def pack(kv: Array, accepted: Array, *, implementation: str | None = None) -> Packed:
    """Pack the first ``accepted[b]`` rows of each ``kv[b]`` into one buffer.

    Args:
        kv: ``[B, gamma, D]`` of any dtype.
        accepted: int32 ``[B]`` in 0..gamma.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Packed`.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """
    check_pack(kv, accepted)
    return Packed(*PACK(kv, accepted, implementation=implementation))


def check_pack(kv: Array, accepted: Array) -> None:
    """Raise `ValueError` where shapes or dtypes are not those of `pack`."""
    if kv.ndim != 3 or accepted.shape != kv.shape[:1]:
        raise ValueError(f"kv {kv.shape} and accepted {accepted.shape} must be [B, gamma, D], [B]")
    if accepted.dtype != jnp.int32:
        raise ValueError(f"accepted {accepted.dtype} must be int32")


def pack_xla(kv: Array, accepted: Array) -> tuple[Array, Array, Array]:
    """The reference of `pack`: the fields of `Packed`, zeros after the last KV row."""
    batch, gamma, width = kv.shape
    accepted = jnp.clip(accepted, 0, gamma)
    ends = jnp.cumsum(accepted, dtype=jnp.int32)
    offsets = ends - accepted
    index = jnp.arange(gamma, dtype=jnp.int32)[None]
    # What was rejected is sent past the end, where "drop" leaves it out.
    target = jnp.where(index < accepted[:, None], offsets[:, None] + index, batch * gamma)
    packed = jnp.zeros((batch * gamma, width), kv.dtype)
    return packed.at[target].set(kv, mode="drop"), offsets, accepted.sum(dtype=jnp.int32)


def kv_sizes(kv: Array, *rest: Array) -> dict[str, int]:
    """The sizes that backends are ordered by: bytes of a batch row's KV rows, and of all."""
    batch, gamma, width = kv.shape
    run = gamma * width * kv.dtype.itemsize
    return {"batch": batch, "gamma": gamma, "run_bytes": run, "bytes": batch * run}


# ``(B, gamma, D, dtype)`` by name. Mosaic GPU takes those whose rows are whole words of 16 bytes.
_SHAPES = {
    "one-element-word": (3, 1, 8, "float16"),
    "one-row": (1, 5, 16, "float32"),
    "odd-words": (4, 5, 96, "bfloat16"),
    "bytes": (5, 9, 128, "int8"),
    "many-rows": (67, 3, 8, "uint16"),
    "wide": (2, 3, 1024, "float32"),
    "odd-width": (5, 7, 33, "float16"),
    "flags": (4, 4, 20, "bool"),
    "no-width": (4, 3, 0, "float32"),
}


def pack_cases() -> list[Case]:
    """A case in which every row is accepted, and ragged ones of every kind of width."""

    def whole() -> tuple[np.ndarray, np.ndarray]:
        return kv_rows(2, 14, 8, "float32"), np.full(2, 14, np.int32)

    def ragged(batch: int, gamma: int, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        return kv_rows(batch, gamma, width, dtype), counts(batch, gamma)

    every = [Case(name, functools.partial(ragged, *shape)) for name, shape in _SHAPES.items()]
    return [Case("all-accepted", whole, small=True), *every]


# Backends return the fields of `Packed` in order.
PACK = Operation(
    "pack",
    {
        "xla": Backend("xla", pack_xla, always),
        "triton": "jspec.triton.pack:PACK",
        "pallas": "jspec.pallas.pack:PACK",
        "cuda": "jspec.cuda_ffi.pack:PACK",
    },
    kv_sizes,
    pack_cases,
)
