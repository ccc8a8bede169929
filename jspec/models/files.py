"""Files from outside, checked before use: JSON objects, their fields, and safetensors."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.models.errors import CheckpointError, on_one_line, quoted

# Far beyond any real file: they bound the time and memory that a damaged one can cost.
SETTINGS_LIMIT = 8 << 20  # bytes of config.json; a list of unquantised modules can be long
HEADER_LIMIT = 16 << 20  # bytes of a safetensors header, and of an index of shards
TENSOR_LIMIT = 1 << 17  # tensors of a model
RANK_LIMIT = 8  # sizes in a shape
STOP_LIMIT = 1024  # stop tokens
DIGIT_LIMIT = 1000  # of an integer; the largest float has 309
INTEGER_LIMIT = 2**31 - 1
GGUF_SUFFIX = ".gguf"

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


def directory_of(path: str | os.PathLike) -> Path:
    """The folder with the files of the model at ``path``; that of a GGUF file itself."""
    path = Path(path)
    return path.parent if path.suffix == GGUF_SUFFIX and path.is_file() else path


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes; raises `CheckpointError` for others."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no regular file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than the {limit} that it may have")
    return content


def read_json(path: Path, limit: int = SETTINGS_LIMIT) -> dict[str, Any]:
    """The JSON object in ``path``; `CheckpointError` where it is missing, huge or malformed."""
    values = parse_json(read_file(path, limit), str(path))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def parse_json(content: bytes, source: str) -> Any:
    """The JSON value in ``content``, in which no object has a key twice.

    Raises `CheckpointError`, which names ``source``.
    """
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {on_one_line(error)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names: set[str] = set()
        for key, _ in pairs:
            if key in names:
                raise ValueError(f"{quoted(key)} appears twice in an object")
            names.add(key)
    return values


def _integer(digits: str) -> int:
    # Python's own limit of 4300 digits can be switched off.
    if len(digits) > DIGIT_LIMIT:
        raise ValueError(f"an integer has {len(digits)} digits; {DIGIT_LIMIT} are read")
    return int(digits)


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are read by type.

    The methods return ``default`` for a field that is absent or null; without a default they raise
    `CheckpointError`.

    Attributes:
        values: the object.
        source: origin of the object, for error messages.
        read: names of the fields that were read.
    """

    values: Mapping[str, Any]
    source: str
    read: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {message}")

    def get(self, key: str) -> Any:
        """A field of any type; None where it is absent."""
        self.read.add(key)
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def _read(self, key: str, kind: str, valid, default):
        value = self.get(key)
        if value is None:
            if default is ...:
                state = "null" if key in self.values else "missing"
                raise self.error(f"{_key(key)} is {state}; it must be {kind}")
            return default
        if not valid(value):
            raise self.error(f"{_key(key)}={quoted(value)} must be {kind}")
        return value

    def integer(self, key: str, default: Any = ...) -> int:
        """A positive int32."""
        return self._read(key, "a positive integer", _is_size, default)

    def count(self, key: str, default: Any = ...) -> int:
        """An int32, at least 0."""
        kind = "a whole number, at least 0"
        return self._read(key, kind, lambda value: _is_size(value) or value == 0, default)

    def number(self, key: str, default: Any = ...) -> float:
        """A positive, finite number."""
        return self._read(key, "a positive number", _is_positive, default)

    def boolean(self, key: str, default: Any = ...) -> bool:
        return self._read(key, "true or false", lambda value: isinstance(value, bool), default)

    def text(self, key: str, default: Any = ...) -> str:
        return self._read(key, "a string", lambda value: isinstance(value, str), default)

    def object(self, key: str) -> Fields:
        """A nested object; empty where the field is absent or null."""
        value = self._read(key, "an object", lambda value: isinstance(value, dict), {})
        return Fields(value, f"{self.source}: {_key(key)}")

    def numbers(self, key: str, limit: int) -> tuple[int, ...]:
        """A list of whole numbers below ``limit``; none where the field is absent or null."""

        def valid(value) -> bool:
            return isinstance(value, list) and all(
                type(item) is int and 0 <= item < limit for item in value
            )

        kind = f"a list of whole numbers below {limit}"
        return tuple(dict.fromkeys(self._read(key, kind, valid, [])))

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; none where the field is absent or null."""

        def valid(value) -> bool:
            items = value if isinstance(value, list) else [value]
            return len(items) <= STOP_LIMIT and all(
                type(item) is int and 0 <= item < vocab_size for item in items
            )

        kind = f"a token id below {vocab_size} or a list of at most {STOP_LIMIT}"
        value = self._read(key, kind, valid, [])
        return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)


def _key(key: str) -> str:
    return key if len(key) <= 40 and key.isidentifier() else quoted(key)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= INTEGER_LIMIT


def _is_positive(value: Any) -> bool:
    # The bound comes first: an int may be too large to become a float.
    return type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file: ``start`` is a byte offset from the file's beginning."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file: its header checked against its size, its tensors read in blocks of rows.

    The format is a little-endian uint64 header length, a JSON header, and the tensors' bytes
    without holes. Raises `CheckpointError` naming the file for anything else, and for headers,
    numbers of tensors and shapes beyond the limits above.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = self._header_length(file.read(8), size)
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self.entries = self._entries(header, 8 + length)
        self._check_layout(8 + length, size)

    def _header_length(self, prefix: bytes, size: int) -> int:
        if len(prefix) < 8:
            raise CheckpointError(
                f"{self.path} has {size} bytes, fewer than the 8 that a safetensors file starts "
                "with; copy or download it again"
            )
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(
                f"{self.path}: its header claims {length} bytes, but the file has {size} and a "
                f"header may have {HEADER_LIMIT}; it is truncated or no safetensors file"
            )
        return length

    def _entries(self, header: bytes, base: int) -> dict[str, Entry]:
        items = parse_json(header, f"{self.path}: its header")
        if not isinstance(items, dict):
            raise CheckpointError(f"{self.path}: its header must be a JSON object")
        items.pop("__metadata__", None)
        if len(items) > TENSOR_LIMIT:
            raise CheckpointError(
                f"{self.path} has {len(items)} tensors, more than {TENSOR_LIMIT} for a model"
            )
        return {name: self._entry(name, item, base) for name, item in items.items()}

    def _entry(self, name: str, item: Any, base: int) -> Entry:
        item = item if isinstance(item, dict) else {}
        dtype, shape, offsets = (item.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (_are_counts(shape, RANK_LIMIT) and _are_counts(offsets, 2) and len(offsets) == 2):
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} needs a dtype, a shape of at most "
                f"{RANK_LIMIT} sizes and two data_offsets, got {quoted(item)}"
            )
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} has dtype {quoted(dtype)}, which jspec does "
                "not read; convert it to F32, F16 or BF16"
            )
        entry = Entry(_DTYPES[dtype], tuple(shape), base + offsets[0])
        if offsets[1] - offsets[0] != entry.nbytes:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} of dtype {dtype} and shape {entry.shape} "
                f"needs {entry.nbytes} bytes, but its data_offsets {offsets} span "
                f"{offsets[1] - offsets[0]}"
            )
        return entry

    def _check_layout(self, base: int, size: int) -> None:
        end = base
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].start):
            if entry.start != end and entry.nbytes:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} starts at byte {entry.start}, but the "
                    f"tensor before it ends at {end}; the file has a hole or an overlap"
                )
            end += entry.nbytes
            if end > size:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} ends at byte {end}, but the file has "
                    f"{size}: it is truncated; copy or download it again"
                )
        if end != size:
            raise CheckpointError(
                f"{self.path} has {size} bytes, but its tensors end at byte {end}; copy or "
                "download it again"
            )

    def rename(self, tensor_name: Callable[[str], str | None]) -> None:
        """Rename each tensor to ``tensor_name(name)``, and leave out those for which that is None.

        Raises `CheckpointError` where two tensors get one name.
        """
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            if (called := tensor_name(name)) in entries:
                raise CheckpointError(
                    f"{self.path} has {quoted(called)} under two names, one of them {quoted(name)}"
                )
            if called is not None:
                entries[called] = entry
        self.entries = entries

    def blocks(
        self, name: str, nbytes: int = 1 << 20, row_mask: np.ndarray | None = None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of rows of a tensor of rank 1 or more, about ``nbytes`` each, with their place.

        A block is a view of one buffer, valid until the next one is read. ``row_mask``, bool
        ``[rows]``: blocks of which no row is True are not read.
        """
        entry = self.entries[name]
        row = entry.nbytes // entry.shape[0] if entry.shape[0] else 0
        step = max(1, nbytes // row) if row else 1
        buffer = np.empty((min(step, entry.shape[0]), *entry.shape[1:]), entry.dtype)
        with self.path.open("rb") as file:
            for first in range(0, entry.shape[0], step):
                block = buffer[: entry.shape[0] - first]
                if row_mask is not None and not row_mask[first : first + len(block)].any():
                    continue
                file.seek(entry.start + first * row)
                if file.readinto(block.reshape(-1).view(np.uint8).data) != block.nbytes:
                    raise CheckpointError(
                        f"{self.path} shrank while tensor {quoted(name)} was read"
                    )
                yield slice(first, first + len(block)), block

    def same(self, name: str, file: TensorFile, other: str) -> bool:
        """Whether two tensors agree in dtype, shape and every byte."""
        a, b = self.entries[name], file.entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        pairs = zip(self.blocks(name), file.blocks(other), strict=True)
        return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in pairs)


def _are_counts(values: Any, limit: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= limit
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )
