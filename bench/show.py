"""`python -m bench show FILE...`: the tables of stored results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import table
from bench.earlier import as_today
from bench.suite import Suite

# Escapes of control characters that could move the cursor of a terminal or erase its lines.
CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\[bfr]", re.IGNORECASE)


class NoResult(ValueError):
    """A file that no suite can have written, and why."""


def show(path: Path, suites: Mapping[str, Suite]) -> None:
    """Print the tables of a result as its suite does, or by its fields where that suite is gone.

    Raises:
        NoResult: where the file is no result, after what could be printed of it.
    """
    result = read(path)
    name = result["suite"]
    try:
        result = as_today(result)
        suites[name].show(result) if name in suites else table.show(result)
    except Exception as error:  # whatever a file of another origin makes a table stumble over
        reason = f"{type(error).__name__}: {error}"
        raise NoResult(f"{path} is no result of {name}: {reason}") from error


def read(path: Path) -> dict[str, Any]:
    """The result in a file; its rows are not checked."""
    try:
        text = path.read_text(encoding="utf-8")
        result = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise NoResult(f"{path} cannot be read: {error}") from error
    if CONTROL.search(text):
        raise NoResult(f"{path} has control characters, which no suite writes")
    if not isinstance(result, dict) or not isinstance(result.get("suite"), str):
        raise NoResult(f"{path} is no result of a suite; write one with --json")
    if not isinstance(result.get("rows"), list):
        raise NoResult(f"{path} has no rows")
    return result
