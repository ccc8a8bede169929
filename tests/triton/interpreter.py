"""Runs Triton bodies on a CPU: Triton's interpreter, in a process of its own, on numpy arrays."""

import functools
import importlib
import os
from typing import Any

import numpy as np


class Tensor:
    """What the interpreter asks of a torch tensor on the CPU, over a numpy array."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = "int1" if array.dtype == np.bool_ else str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return Tensor(self.array)

    def new_empty(self, size: int, device: str) -> "Tensor":
        return Tensor(np.empty(size, self.array.dtype))

    def set_(self, storage: "Tensor", offset: int, size: tuple, stride: tuple) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple:
        return self.array.shape

    def stride(self) -> tuple:
        return self.array.strides

    def copy_(self, other: "Tensor") -> None:
        """The interpreter worked on the array itself."""


def dot(builder: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
    """The interpreter's product, with rows that are computed alike, as matrix units compute them.

    In BLAS the rounding of a row follows from its place in the matrix.
    """
    if a.data.dtype.itemsize == 1 or b.data.dtype.itemsize == 1:
        return type(builder).create_dot(builder, a, b, d, *settings)
    dtype = d.data.dtype
    products = a.data.astype(dtype)[..., None] * b.data.astype(dtype)[..., None, :, :]
    return type(d)(products.sum(axis=-2) + d.data, d.dtype.scalar)


def rounded(a: np.ndarray, b: np.ndarray, c: np.ndarray, upwards: bool) -> np.ndarray:
    """``a * b + c`` of float32, rounded once: up, or towards zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        # The product is exact in float64, and so is the sum with what its rounding loses.
        product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + addend
        virtual = total - product
        lost = (product - (total - virtual)) + (addend - virtual)
        nearest = total.astype(np.float32)
        error = (nearest.astype(np.float64) - total) - lost  # its sign is exact
        if upwards:
            return np.where(error < 0, np.nextafter(nearest, np.float32(np.inf)), nearest)
        beyond = np.where(total > 0, error > 0, error < 0)
        return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def shifted(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``x >> count`` of uint32, 0 from 32 on."""
    return np.where(count < 32, x >> np.minimum(count, 31), 0).astype(np.uint32)


def leading_zeros(x: np.ndarray) -> np.ndarray:
    """Of uint64."""
    width = np.vectorize(lambda value: int(value).bit_length(), otypes=[np.uint32])(x)
    return (64 - width).astype(np.uint32)


# PTX instructions that kernels use, on numpy arrays.
INSTRUCTIONS = {
    "mul.rz.f32": lambda a, b: rounded(a, b, np.zeros_like(a), upwards=False),
    "fma.rz.f32": lambda a, b, c: rounded(a, b, c, upwards=False),
    "fma.rp.f32": lambda a, b, c: rounded(a, b, c, upwards=True),
    "shr.b32": shifted,
    "clz.b64": leading_zeros,
}


class Assembled:
    """The result of one PTX instruction, as the compiler returns it."""

    def __init__(self, result: Any):
        self.result = result

    def get_result(self, index: int) -> Any:
        return self.result


def run_assembly(
    builder: Any, assembly: str, constraints: str, values: list, types: list, *settings: Any
) -> Assembled:
    """One PTX instruction, elementwise."""
    operands = np.broadcast_arrays(*[x.data for x in values])
    result = INSTRUCTIONS[assembly.split()[0]](*operands)
    return Assembled(type(values[0])(result, types[0].scalar))


def interpret(
    kernel: str, arrays: list, out: list[np.ndarray], programs: int, constants: dict
) -> list[np.ndarray]:
    """The arrays ``out`` after ``programs`` programs of the kernel ``"module:name"``.

    Those of ``out`` that are among ``arrays``, or in a tuple of them, are updated. The last program
    runs first, so that what one writes too much another has written before. Call it in a fresh
    process: Triton decides at import whether it interprets.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    set_grid_idx = type(builder).set_grid_idx
    builder.set_grid_idx = lambda x, y, z: set_grid_idx(builder, programs - 1 - x, y, z)
    builder.create_dot = functools.partial(dot, builder)
    builder.create_inline_asm = functools.partial(run_assembly, builder)
    module, name = kernel.split(":")
    body: Any = getattr(importlib.import_module(module), name)
    every = [y for x in arrays for y in (x if isinstance(x, tuple) else (x,))]
    fresh = [x for x in out if not any(x is y for y in every)]
    tensors = [tuple(map(Tensor, x)) if isinstance(x, tuple) else Tensor(x) for x in arrays]
    body[(programs,)](*tensors, *map(Tensor, fresh), **constants)
    return out
