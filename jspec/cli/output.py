"""What commands write: results of requests as JSON, whole files and whole folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jspec.cli.requests import CliRequest, Refused


def result_of(
    request: CliRequest, text: str, tokens: Sequence[int], finished: str
) -> dict[str, Any]:
    """The result of a request, with ``line`` and ``id`` where it is from JSON lines."""
    result = {"text": text, "tokens": list(tokens), "finished": finished}
    result["seed"] = request.params.seed
    return result if request.line is None else _named(request) | result


def error_of(refused: Refused) -> dict[str, Any]:
    """The error of a line that was not served."""
    return _named(refused) | {"error": refused.error}


def _named(line: CliRequest | Refused) -> dict[str, Any]:
    return {"line": line.line} | ({} if line.id is None else {"id": line.id})


def write_lines(file: TextIO, results: Sequence[dict[str, Any]]) -> None:
    """Results and errors as JSON lines, in the order of the lines that asked for them."""
    for value in sorted(results, key=lambda value: value["line"]):
        file.write(json.dumps(value) + "\n")


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A text file that takes the place of ``path`` when the block ends, and is gone if it fails.

    Raises `ValueError` at once where ``path`` cannot be written or is no file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"{path}: cannot be written; name a file, not a folder or a device")
    try:
        handle, name = tempfile.mkstemp(prefix=".jspec-", dir=target.parent)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
        os.umask(mask := os.umask(0))
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def whole_folder(path: str) -> Iterator[Path]:
    """A folder that gets the name ``path`` when the block ends, and is gone if it fails.

    Raises `ValueError` at once where ``path`` exists or cannot be written.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} exists; choose another folder, none is overwritten")
    target = Path(os.path.realpath(path))
    try:
        folder = Path(tempfile.mkdtemp(prefix=".jspec-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        yield folder
        os.umask(mask := os.umask(0))
        folder.chmod(0o777 & ~mask)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder)
        raise
