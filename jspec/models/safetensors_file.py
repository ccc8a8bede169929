"""Tensors of safetensors files: headers checked by the library, values read block by block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.checks import shown
from jspec.models.errors import CheckpointError, on_one_line

_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        path: the file.
        name: its name in the file.
        dtype: its dtype.
        shape: its shape.
        start: byte offset of its values in the file.
    """

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {shown(self.name)} {message}")

    def blocks(
        self, nbytes: int = 1 << 20, row_mask: np.ndarray | None = None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Read a tensor of rank 1 or more in blocks of rows.

        The library would map the whole file into memory, and reads no FP8 into NumPy arrays.

        Args:
            nbytes: size of a block, which has at least one row.
            row_mask: bool ``[rows]``; blocks of which no row is True are not read.

        Yields:
            The rows of a block, and their values: a view of one buffer, valid until the next block
            is read.

        Raises:
            CheckpointError: the file has become shorter.
        """
        num_rows = self.shape[0]
        row = self.nbytes // max(1, num_rows)
        step = max(1, nbytes // max(1, row))
        buffer = np.empty((min(step, num_rows), *self.shape[1:]), self.dtype)
        with self.path.open("rb") as file:
            for first in range(0, num_rows, step):
                block = buffer[: num_rows - first]
                if row_mask is not None and not row_mask[first : first + len(block)].any():
                    continue
                file.seek(self.start + first * row)
                if file.readinto(block.reshape(-1).view(np.uint8).data) != block.nbytes:
                    raise self.error("became shorter while it was read")
                yield slice(first, first + len(block)), block

    def equals(self, other: StoredTensor) -> bool:
        """Whether two tensors agree in dtype, shape and every byte."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        pairs = zip(self.blocks(), other.blocks(), strict=True)
        return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in pairs)


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file.

    Raises `CheckpointError` where the library refuses the file, or a tensor has a dtype that jspec
    does not read.
    """
    tensors = []
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")  # the length of the header
        with safe_open(path, "numpy") as file:
            # The library has checked that the tensors follow the header without holes.
            for name in file.offset_keys():
                tensor = file.get_slice(name)
                if (dtype := _DTYPES.get(tensor.get_dtype())) is None:
                    raise CheckpointError(
                        f"{path}: tensor {shown(name)} has dtype {tensor.get_dtype()}, which "
                        "jspec does not read; convert it to F32, F16 or BF16"
                    )
                shape = tuple(tensor.get_shape())
                tensors.append(StoredTensor(path, name, dtype, shape, start))
                start += tensors[-1].nbytes
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged or no safetensors file: {on_one_line(error)}; copy or download it "
            "again"
        ) from None
    return tensors
