"""Experts that stay in MXFP4 from file to device, and their arrays in jspec's checkpoints.

A kernel ``[E, in, *out]`` is stored as two arrays, its codes and its scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jspec.models.errors import CheckpointError
from jspec.models.packed import check_scales, is_kernel
from jspec.ops.quantized import BLOCK, MXFP4, Quantized, dequantized
from jspec.sharding import put
from jspec.typing import Array

Shape = tuple[int, ...]
Placings = Mapping[str, Sharding | None]
_dequantized = jax.jit(dequantized, static_argnames="dtype")


def shapes_of(kernel: Shape) -> tuple[Shape, Shape]:
    """The shapes of the codes and the scales of a ``kernel [E, in, *out]``."""
    count, inputs, *outputs = kernel
    return (count, *outputs, inputs // 2), (count, *outputs, inputs // BLOCK)


def room_for(kernel: Shape) -> MXFP4:
    """Uninitialised host memory for a ``kernel [E, in, *out]``."""
    codes, scales = (np.empty(shape, np.uint8) for shape in shapes_of(kernel))
    return MXFP4(codes, scales, leading=1)  # pyright: ignore[reportArgumentType]


def chosen(
    shapes: Mapping[str, Shape], placings: Placings, keep_mxfp4: bool | None
) -> frozenset[str]:
    """The names of the parameters that stay in MXFP4 on the device.

    These are the ones that no sharding splits: the inputs of a split kernel need not be whole
    blocks of MXFP4.

    Args:
        shapes: shapes of the parameters that are stored in MXFP4, by name.
        placings: the sharding of each parameter, None for the default device.
        keep_mxfp4: False keeps none, None those that are not split, True requires all of them.

    Raises:
        ValueError: ``keep_mxfp4`` is True and a sharding splits one of them.
    """
    if keep_mxfp4 is False:
        return frozenset()
    split = [name for name in shapes if (to := placings[name]) and not to.is_fully_replicated]
    if keep_mxfp4 and split:
        raise ValueError(
            f"keep_mxfp4=True: {placings[split[0]]} splits {split[0]} {shapes[split[0]]}, which "
            "jspec has in MXFP4 on one device alone; leave keep_mxfp4 out, or the sharding"
        )
    return frozenset(shapes) - frozenset(split)


def arrays_of(name: str, value: Array | MXFP4 | Quantized) -> dict[str, Array]:
    """The arrays of a parameter by their names in a checkpoint.

    Raises `ValueError` for one of a quantised copy.
    """
    if isinstance(value, MXFP4) and is_kernel(name):
        codes, scales = names_of(name)
        return {codes: value.codes, scales: value.scales}
    if isinstance(value, (MXFP4, Quantized)):
        raise ValueError(
            f"{name} {value.shape} is quantised; save the model that it was quantised "
            "from; a drafter quantises that again"
        )
    return {name: value}


def names_of(parameter: str) -> tuple[str, str]:
    """The names of the codes and the scales of a kernel in a checkpoint."""
    return f"{parameter}.codes", f"{parameter}.scales"


def stored_in(names: Collection[str], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The parameters of ``shapes`` that a checkpoint with the arrays ``names`` stores in MXFP4."""
    return {
        name: shape
        for name, shape in shapes.items()
        if is_kernel(name) and shape[1] % BLOCK == 0 and not {*names}.isdisjoint(names_of(name))
    }


def templates_of(name: str, shape: Shape, to: Sharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of the two arrays of a kernel, by name, for orbax to restore."""
    pairs = zip(names_of(name), shapes_of(shape), strict=True)
    return {
        array_name: jax.ShapeDtypeStruct(size, jnp.uint8, sharding=to) for array_name, size in pairs
    }


def read_kernel(path: Path, name: str, arrays: Mapping[str, Array]) -> MXFP4:
    """A kernel of two arrays read from ``path``; `CheckpointError` for a scale that is none."""
    codes, scales = (arrays[array_name] for array_name in names_of(name))
    try:
        check_scales(scales)
    except ValueError as error:
        raise CheckpointError(f"{path}: array {name}: {error}") from None
    return MXFP4(codes, scales, leading=1)


def widened(kernel: MXFP4, dtype: np.dtype, to: Sharding | None) -> Array:
    """``kernel`` dequantised to ``dtype`` and placed on ``to``."""
    weights = _dequantized(kernel, dtype)
    return weights if to is None else put(weights, to)
