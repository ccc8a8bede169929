"""The all-to-all, the merge and the all-reduce of `jspec.ops.all_to_all` by CUDA kernels that store
in the peers' memory."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cuda_ffi import library
from jspec.cuda_ffi.errors import BuildError
from jspec.dispatch import named_backend
from jspec.ops.all_to_all import OneSided
from jspec.ops.exact import NAME as EXACT_DECODE
from jspec.ops.vocabulary import Axes
from jspec.typing import Array

# As src/exchange/exchange.h has them.
LINE_BYTES = 8
MAX_BYTES = 2**20  # to one peer
MAX_DEVICES = 8
PATIENCE = 20.0  # seconds that a device waits for another, before its program fails


def all_to_all_cuda(pieces: Array, axes: Axes) -> Array:
    """Exchange ``pieces [ranks, ...]`` between the ranks: ``run`` of an `OneSided`."""
    # A group is as many devices as there are pieces, which follow each other.
    del axes
    shape = pieces.shape
    flat = pieces.reshape(shape[0], math.prod(shape[1:]))
    size = flat.shape[1]
    flat = _whole(flat, LINE_BYTES // flat.dtype.itemsize)
    (received,) = library.call(
        "exchange",
        [jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        flat,
        vmap_method="sequential",
        patience=np.int64(PATIENCE * 1e9),
    )
    return received[:, :size].reshape(shape)


def all_to_all_merge_cuda(out: Array, lse: Array, axes: Axes) -> tuple[Array, Array] | None:
    """Exchange and merge attention over parts of the keys: ``merge`` of an `OneSided`."""
    batch, tokens, heads, size = out.shape
    ranks, numbers = lax.axis_size(axes), LINE_BYTES // out.dtype.itemsize
    if out.dtype not in (jnp.bfloat16, jnp.float32) or size % numbers:
        return None
    # A head's log-sum-exp has a line of its own.
    row_bytes = heads // ranks * (size // numbers + 1) * LINE_BYTES

    def merge(out: Array, lse: Array) -> Sequence[Array]:
        rows = len(out)
        return library.call(
            "all_to_all_merge",
            [
                jax.ShapeDtypeStruct((rows, heads // ranks, size), out.dtype),
                jax.ShapeDtypeStruct((rows, heads // ranks), jnp.float32),
            ],
            *(out, lse),
            vmap_method="sequential",
            ranks=np.int64(ranks),
            patience=np.int64(PATIENCE * 1e9),
        )

    rows = [out.reshape(-1, heads, size), lse.reshape(-1, heads)]
    if (results := _in_messages(merge, rows, row_bytes)) is None:
        return None
    shape = batch, tokens, heads // ranks
    return results[0].reshape(*shape, size), results[1].reshape(shape)


def all_reduce_cuda(x: Array, axes: Axes, dtype: Any, add: Array | None) -> Array | None:
    """Sum ``x`` over the ranks, in their order: ``reduce`` of an `OneSided`."""
    if x.dtype != jnp.float32 or dtype not in (jnp.float32, jnp.bfloat16):
        return None
    if add is not None and add.dtype != dtype:
        return None

    def reduce(*values: Array) -> Sequence[Array]:
        return library.call(
            "all_reduce",
            [jax.ShapeDtypeStruct(values[0].shape, dtype)],
            *values,
            vmap_method="sequential",
            ranks=np.int64(lax.axis_size(axes)),
            patience=np.int64(PATIENCE * 1e9),
        )

    values = [_whole(y.reshape(-1), LINE_BYTES // 4) for y in (x, add) if y is not None]
    sums = _in_messages(reduce, values, x.dtype.itemsize)
    return None if sums is None else sums[0][: x.size].reshape(x.shape)


def _in_messages(
    send: Callable[..., Sequence[Array]], arrays: Sequence[Array], row_bytes: int
) -> list[Array] | None:
    """The results of ``send(*arrays)`` by messages that are not too large, or None.

    ``arrays [n, ...]`` are cut into the same rows, of which each sends ``row_bytes``. What is one
    message takes one call. Only exact passes take several: XLA would send them faster, and sum in
    an order of its own.
    """
    count, size = len(arrays[0]), max(MAX_BYTES // row_bytes, 1)
    if count <= size:
        return list(send(*arrays))
    if named_backend("linear") != EXACT_DECODE:
        return None
    messages = -(-count // size)

    def cut(x: Array) -> Array:
        rest = ((0, messages * size - count), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, rest).reshape(messages, size, *x.shape[1:])

    # A loop, as no device may run two calls at once, and none depends on the one before.
    results = lax.map(lambda piece: send(*piece), tuple(map(cut, arrays)))
    return [x.reshape(-1, *x.shape[2:])[:count] for x in results]


def _whole(x: Array, numbers: int) -> Array:
    """``x [..., n]`` with zeros after it up to a multiple of ``numbers``, those of a line."""
    missing = -x.shape[-1] % numbers
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


@functools.cache
def _refuses(devices: int) -> str | None:
    if devices > MAX_DEVICES:
        return f"{devices} devices are more than {MAX_DEVICES}"
    # Also for the sums in chains of matmuls, whose kernels are of another library.
    for subject, opens in (("exchange", "jspec_open_exchange"), ("linear", "jspec_open_sums")):
        try:
            opened = getattr(library.loaded(subject), opens)
        except BuildError as error:
            return str(error)
        opened.restype = ctypes.c_char_p
        if (wrong := opened(devices)) is not None:
            return wrong.decode()
    return None


ALL_TO_ALL = OneSided(all_to_all_cuda, _refuses, MAX_BYTES, all_reduce_cuda, all_to_all_merge_cuda)
