"""The metadata of a GGUF file, each size checked against the file before it is used."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checks import shown
from jspec.models.errors import CheckpointError
from jspec.models.files import GGUF_SUFFIX

# A directory that holds any of these is a model of another format.
_OTHER_SETTINGS = ("config.json", "jspec.json")
# Far beyond any real file: they bound the time and memory that a damaged one can cost.
HEADER_LIMIT = 256 << 20  # bytes of the metadata and of the table of tensors
FIELD_LIMIT = 1 << 16
TENSOR_LIMIT = 1 << 17
STRING_LIMIT = 1 << 20  # strings of a list; the largest have half a million
LIST_LIMIT = 1 << 16  # items of a list outside of the tokenizer, such as one number per layer
DIMENSION_LIMIT = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    kind: np.dtype(code)
    for kind, code in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_SIZE = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Strings:
    """A list of strings as a file has it: each a uint64 length and UTF-8; decoded when asked."""

    count: int
    content: bytes
    source: str

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        at = 0
        for index in range(self.count):
            (size,) = _SIZE.unpack_from(self.content, at)
            at += 8 + size
            try:
                yield self.content[at - size : at].decode()
            except UnicodeDecodeError:
                raise CheckpointError(f"{self.source}: string {index} is not UTF-8") from None


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor: its name, its shape as in a Hugging Face file, its type, a number of ggml's, and
    ``offset``, bytes from where the tensors begin."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """The metadata and the table of tensors of ``path``, and ``data_start``, where tensors begin.

    ``metadata`` holds numbers, booleans and strings as such, lists of numbers as arrays and lists
    of strings as `Strings`. Raises `CheckpointError` naming the file where it is malformed.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    raise self.damaged(f"{self.size} bytes are too few for its header of 24")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    self._read(content)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no sound GGUF file: {message}")

    def damaged(self, message: str) -> CheckpointError:
        return self.error(f"{message}; it is truncated or damaged, copy or download it again")

    def fields(self) -> dict[str, Any]:
        """The metadata with lists as lists, without the tokenizer's, which are long."""
        fields = {}
        for key, value in self.metadata.items():
            if isinstance(value, str | int | float):
                fields[key] = value
            elif not key.startswith("tokenizer."):
                if len(value) > LIST_LIMIT:
                    raise self.error(f"{shown(key)} has {len(value)} items, over {LIST_LIMIT}")
                fields[key] = _listed(value)
        return fields

    def _read(self, content: mmap.mmap) -> None:
        magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", content)
        if magic != _MAGIC:
            raise self.damaged(f"it starts with {magic!r}, not with {_MAGIC!r}")
        if version not in _VERSIONS:
            raise self.error(
                f"version {version} is unknown; jspec reads 2 and 3, little-endian: convert the "
                "model again"
            )
        if num_fields > FIELD_LIMIT or num_tensors > TENSOR_LIMIT:
            raise self.damaged(
                f"it claims {num_fields} fields and {num_tensors} tensors, of {FIELD_LIMIT} and "
                f"{TENSOR_LIMIT} that it may have"
            )
        reader = _Reader(self, content)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = reader.string("the name of a field")
            if key in self.metadata:
                raise self.damaged(f"field {shown(key)} appears twice")
            self.metadata[key] = reader.value(key)
        self.tensors: dict[str, TensorEntry] = {}
        for _ in range(num_tensors):
            entry = reader.tensor()
            if entry.name in self.tensors:
                raise self.damaged(f"tensor {shown(entry.name)} appears twice")
            self.tensors[entry.name] = entry
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise self.damaged(f"general.alignment={shown(alignment)} must be 1 to {1 << 20}")
        self.data_start = -(-reader.at // alignment) * alignment


class _Reader:
    """Reads values of ``content`` one after the other; ``at`` is the place of the next."""

    def __init__(self, file: GGUFFile, content: mmap.mmap):
        self.at = 24
        self._file = file
        self._content = content
        self._end = min(file.size, HEADER_LIMIT)

    def value(self, key: str) -> Any:
        kind = self.number(_NUMBERS[4], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self.number(self._number_type(kind, key), key)

    def number(self, dtype: np.dtype, what: str) -> Any:
        return np.frombuffer(self._bytes(dtype.itemsize, what), dtype)[0].item()

    def string(self, what: str) -> str:
        try:
            return self._bytes(self._size(what), what).decode()
        except UnicodeDecodeError:
            raise self._file.damaged(f"{shown(what)} is not UTF-8") from None

    def tensor(self) -> TensorEntry:
        name = self.string("the name of a tensor")
        rank = self.number(_NUMBERS[4], name)
        if rank > DIMENSION_LIMIT:
            raise self._file.damaged(f"tensor {shown(name)} has {rank} dimensions")
        shape = tuple(reversed([self._size(name) for _ in range(rank)]))
        if math.prod(shape) > 1 << 48:
            raise self._file.damaged(f"tensor {shown(name)} has the shape {shape}")
        return TensorEntry(name, shape, self.number(_NUMBERS[4], name), self._size(name))

    def _array(self, key: str) -> np.ndarray | Strings:
        kind, count = self.number(_NUMBERS[4], key), self._size(key)
        if kind != _STRING:
            dtype = self._number_type(kind, key)
            self._check(count * dtype.itemsize, key, f"{count} items")
            return np.frombuffer(self._bytes(count * dtype.itemsize, key), dtype)
        self._check(8 * count, key, f"{count} strings")
        if count > STRING_LIMIT:
            raise self._file.damaged(f"{shown(key)} claims {count} strings, over {STRING_LIMIT}")
        content, end, start = self._content, self._end, self.at
        at, size_at = start, _SIZE.unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + size_at(content, at)[0]
        self._check(at - start, key, f"{count} strings")
        self.at = at
        return Strings(count, content[start:at], f"{self._file.path}: {shown(key)}")

    def _number_type(self, kind: int, key: str) -> np.dtype:
        if kind not in _NUMBERS:
            raise self._file.damaged(f"{shown(key)} has the unknown type {kind}")
        return _NUMBERS[kind]

    def _size(self, what: str) -> int:
        return _SIZE.unpack(self._bytes(8, what))[0]

    def _bytes(self, size: int, what: str) -> bytes:
        self._check(size, what, f"{size} bytes")
        self.at += size
        return self._content[self.at - size : self.at]

    def _check(self, size: int, what: str, claim: str) -> None:
        if size > self._end - self.at:
            limit = f"a header may have {HEADER_LIMIT}"
            if self._end == self._file.size:
                limit = f"the file has {self._end}"
            raise self._file.damaged(f"{shown(what)} claims {claim} at byte {self.at}, but {limit}")


def _listed(value: np.ndarray | Strings) -> list[Any]:
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def gguf_path(path: str | os.PathLike) -> Path | None:
    """The GGUF file that ``path`` names: itself, or the only one in a directory.

    None where it names a model of another format, or none. Raises `CheckpointError` for a directory
    with several.
    """
    path = Path(path)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path
    if not path.is_dir() or any((path / name).is_file() for name in _OTHER_SETTINGS):
        return None
    files = sorted(file for file in path.glob(f"*{GGUF_SUFFIX}") if file.is_file())
    if len(files) > 1:
        names = shown([file.name for file in files])
        raise CheckpointError(f"{path} has several GGUF files, {names}; pass one of them")
    return files[0] if files else None
