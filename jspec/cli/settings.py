"""Files of settings: what `jspec tune` writes and `jspec generate --settings` takes."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.models.files import read_json

LIMIT = 2**16  # bytes of a file


def written(draft: str, gamma: int) -> str:
    """The text of a file with these settings."""
    return json.dumps({"draft": draft, "gamma": gamma}) + "\n"


def read_settings(path: str) -> tuple[str, int]:
    """The draft and gamma of a file. Raises `ValueError` for anything else."""
    settings = read_json(Path(path), LIMIT)
    draft, gamma = settings.get("draft"), settings.get("gamma")
    if set(settings) != {"draft", "gamma"} or type(draft) is not str or type(gamma) is not int:
        raise ValueError(
            f'{path} must be {{"draft": "NAME:...", "gamma": N}}, as jspec tune writes it'
        )
    return draft, gamma
