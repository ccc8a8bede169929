"""Files of settings: what `jspec tune` writes and `jspec generate --settings` takes."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.models.files import read_file

LIMIT = 2**16  # bytes of a file


def written(draft: str, gamma: int) -> str:
    """The text of a file with these settings."""
    return json.dumps({"draft": draft, "gamma": gamma}) + "\n"


def read_settings(path: str) -> tuple[str, int]:
    """The draft and gamma of a file. Raises `ValueError` for anything else."""
    try:
        settings = json.loads(read_file(Path(path), LIMIT))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    right = isinstance(settings, dict) and set(settings) == {"draft", "gamma"}
    right = right and isinstance(settings["draft"], str) and type(settings["gamma"]) is int
    if not right:
        raise ValueError(
            f'{path} must be {{"draft": "NAME:...", "gamma": N}}, as jspec tune writes it'
        )
    return settings["draft"], settings["gamma"]
