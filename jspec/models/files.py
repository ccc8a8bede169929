"""Files from outside, checked before use: JSON objects and their fields."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jspec.checks import shown
from jspec.models.errors import CheckpointError, on_one_line

# Far beyond any real file: they bound the time and memory that a damaged one can cost.
SETTINGS_LIMIT = 8 << 20  # bytes of config.json; a list of unquantised modules can be long
STOP_LIMIT = 1024  # stop tokens
DIGIT_LIMIT = 1000  # of an integer; the largest float has 309
INTEGER_LIMIT = 2**31 - 1
GGUF_SUFFIX = ".gguf"
_RENEW = "correct it, or copy or download it again"


def directory_of(path: str | os.PathLike) -> Path:
    """The folder with the files of the model at ``path``; that of a GGUF file itself."""
    path = Path(path)
    return path.parent if path.suffix == GGUF_SUFFIX and path.is_file() else path


def check_directory(path: Path) -> None:
    """Raise `CheckpointError` where a model directory or a GGUF file should be, and neither is."""
    if not path.is_dir():
        state = "is neither a directory nor named *.gguf" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {state}; pass a local model directory or GGUF file, jspec downloads none"
        )


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes; raises `CheckpointError` for others."""
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than the {limit} that it may have")
    return content


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file to read bytes.

    Raises:
        CheckpointError: It is a folder, a FIFO or a device, which may never end.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is no regular file")
    return open(path, "rb")


def read_json(path: Path, limit: int = SETTINGS_LIMIT) -> dict[str, Any]:
    """The JSON object in ``path``; `CheckpointError` where it is missing, huge or malformed."""
    content = read_file(path, limit)
    if not content.strip():
        raise CheckpointError(f"{path} is empty; {_RENEW}")
    try:
        values = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; {_RENEW}") from None
    if not isinstance(values, dict):
        found = type(values).__name__
        raise CheckpointError(f"{path} must hold a JSON object, got {found}; {_RENEW}")
    return values


def parse_json(content: bytes) -> Any:
    """The JSON value in ``content``; `ValueError` where it is none or an object has a key twice."""
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {on_one_line(error)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names: set[str] = set()
        for key, _ in pairs:
            if key in names:
                raise ValueError(f"{shown(key)} appears twice in an object")
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

    def ignore(self, *keys: str) -> None:
        """Count fields as read that change nothing in the model at hand."""
        self.read.update(keys)

    def _read(self, key: str, kind: str, valid, default):
        value = self.get(key)
        if value is None:
            if default is ...:
                state = "null" if key in self.values else "missing"
                raise self.error(f"{_key(key)} is {state}; it must be {kind}")
            return default
        if not valid(value):
            raise self.error(f"{_key(key)}={shown(value)} must be {kind}")
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

    def positive_numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive, finite numbers, which must be there."""

        def valid(value) -> bool:
            return isinstance(value, list) and len(value) > 0 and all(map(_is_positive, value))

        return tuple(map(float, self._read(key, "a list of positive numbers", valid, ...)))

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; none where the field is absent or null.

        An id outside the vocabulary is skipped with a warning.
        """

        def valid(value) -> bool:
            items = value if isinstance(value, list) else [value]
            return len(items) <= STOP_LIMIT and all(type(item) is int for item in items)

        value = self._read(key, f"a token id or a list of at most {STOP_LIMIT}", valid, [])
        ids = dict.fromkeys(value if isinstance(value, list) else [value])
        inside = tuple(token for token in ids if 0 <= token < vocab_size)
        if len(inside) < len(ids):
            outside = [token for token in ids if token not in inside]
            warnings.warn(
                f"{self.source}: {_key(key)}={shown(outside)} is outside the vocabulary of "
                f"{vocab_size} and is skipped",
                stacklevel=2,
            )
        return inside


def _key(key: str) -> str:
    return key if len(key) <= 40 and key.isidentifier() else shown(key)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= INTEGER_LIMIT


def _is_positive(value: Any) -> bool:
    # The bound comes first: an int may be too large to become a float.
    return type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value)
