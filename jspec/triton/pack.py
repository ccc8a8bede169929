"""Packing in Triton in one launch: every program computes its own offset."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.packing import kv_sizes, packed_like
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array

# Elements of these sizes in bytes are copied as integers, whatever their dtype.
_CARRIERS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes: ``span`` bytes per program, a power of 2, and ``warps`` of a program."""

    span: int
    warps: int


def carry(kv: Array) -> Array:
    """``kv`` as integers of as many bytes an element; nothing is copied."""
    if kv.dtype == jnp.bool_:
        return kv
    return lax.bitcast_convert_type(kv, _CARRIERS[kv.dtype.itemsize])


def uncarry(packed: Array, dtype: jnp.dtype) -> Array:
    """The inverse of `carry` for elements of ``dtype``."""
    return packed if packed.dtype == dtype else lax.bitcast_convert_type(packed, dtype)


def pack_triton(
    kv: Array, accepted: Array, *, blocks: Blocks | None = None
) -> tuple[Array, Array, Array]:
    """The Triton backend of `jspec.ops.packing.pack`: the fields of `Packed`."""
    from jspec.triton.pack_kernel import pack_kernel

    batch, gamma, width = kv.shape
    blocks = blocks or Blocks(**tuned.block("pack", "triton", kv_sizes(kv)))
    carried = carry(kv)
    span = min(blocks.span // kv.dtype.itemsize, next_power(gamma * width))
    chunks = -(-gamma * width // span)
    packed, offsets, total = triton_call(
        pack_kernel,
        *(carried, accepted),
        out=packed_like(carried),
        programs=batch * chunks,
        warps=blocks.warps,
        BATCH=batch,
        GAMMA=gamma,
        WIDTH=width,
        CHUNKS=chunks,
        SPAN=span,
        COUNTS=min(1024, next_power(batch)),
    )
    return uncarry(packed, kv.dtype), offsets, total


def refuses_elements(kv: Array, name: str = "kv") -> str | None:
    """Why elements of this type cannot be copied as integers, or None."""
    bits = jax.dtypes.itemsize_bits(kv.dtype)
    if bits not in (8, 16, 32, 64) or jnp.issubdtype(kv.dtype, jnp.complexfloating):
        return f"{name} of {kv.dtype} does not have elements of 1, 2, 4 or 8 bytes"
    return None


def refuses(kv: Array) -> str | None:
    """Why the kernel cannot take KV rows of this shape and type, or None."""
    _, gamma, width = kv.shape
    if 0 in kv.shape:
        return f"kv {kv.shape} leaves nothing to launch"
    if reason := refuses_elements(kv):
        return reason
    if gamma * width > 2**30:
        return f"gamma * D = {gamma * width} elements a batch row are over {2**30}"
    return None


def _supports(kv: Array, accepted: Array) -> str | None:
    return refuses(kv) or refuses_triton()


PACK = Backend("triton", pack_triton, _supports)
