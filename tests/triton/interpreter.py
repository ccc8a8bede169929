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


def interpret(
    kernel: str, arrays: list[np.ndarray], out: list[np.ndarray], programs: int, constants: dict
) -> list[np.ndarray]:
    """The arrays ``out`` after ``programs`` programs of the kernel ``"module:name"``.

    Those of ``out`` that are among ``arrays`` are updated. The last program runs first, so that
    what one writes too much another has written before. Call it in a fresh process: Triton decides
    at import whether it interprets.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    set_grid_idx = type(builder).set_grid_idx
    builder.set_grid_idx = lambda x, y, z: set_grid_idx(builder, programs - 1 - x, y, z)
    builder.create_dot = functools.partial(dot, builder)
    module, name = kernel.split(":")
    body: Any = getattr(importlib.import_module(module), name)
    fresh = [x for x in out if not any(x is y for y in arrays)]
    body[(programs,)](*map(Tensor, [*arrays, *fresh]), **constants)
    return out
