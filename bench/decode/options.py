"""Command-line options of the suite `decode`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from bench.decode.catalogue import MODELS
from bench.settings import DecodeSettings
from jspec.decode.settings import OPERATIONS
from jspec.dispatch import Backends


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``parser``."""
    group = parser.add_argument_group("decode", "options with several values may be repeated")
    for field, (option, words, settings) in OPTIONS.items():
        group.add_argument(option, dest=field, help=words, **settings)


def read(
    parser: argparse.ArgumentParser, asked: argparse.Namespace, suites: Sequence[str]
) -> DecodeSettings:
    """Read the options; exits with an error if they are invalid or for another suite."""
    named = [name for name in asked.backend if "=" in name]
    plain = [name for name in asked.backend if "=" not in name]
    values: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value
        for field in OPTIONS
        if (value := getattr(asked, field)) is not None
    }
    if "decode" not in suites:
        for option in [OPTIONS[field][0] for field in values] + [f"--backend {x}" for x in named]:
            parser.error(f"{option} does not apply to {suites[0]}, only to decode")
    for name in values.get("models", ()):
        if name not in MODELS:
            parser.error(f"--model: invalid choice: {name!r} (choose from {', '.join(MODELS)})")
    if plain and list(suites) == ["decode"]:
        parser.error(f"--backend {plain[0]} must be OPERATION=NAME, as in attention=xla")
    backends = Backends(dict(name.split("=", 1) for name in named))
    try:
        backends.check(OPERATIONS)
    except ValueError as error:
        parser.error(f"--backend: {error}")
    return DecodeSettings(backends=backends, **values)


def _count(text: str) -> int:
    """Parse a whole number of at least 1; K stands for 1024."""
    digits, unit = (text[:-1], 1024) if text[-1:] in ("K", "k") else (text, 1)
    if not re.fullmatch("[1-9][0-9]{0,8}", digits):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} must be a whole number of at least 1, such as 8192 or 8K"
        )
    return int(digits) * unit


_CROSSED = {"type": _count, "action": "append", "metavar": "N"}
OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "models": (
        "--model",
        f"a shape, one of {', '.join(MODELS)}; real: a GGUF file or a model directory",
        {"action": "append", "metavar": "NAME"},
    ),
    "batches": ("--batch", "rows", _CROSSED),
    "contexts": ("--context", "tokens in the cache of each row, as 8192 or 8K", _CROSSED),
    "tokens": ("--tokens", "of a pass, 1 for plain decoding", _CROSSED),
    "steps": ("--steps", "of a jitted chunk, 16 by default", {"type": _count, "metavar": "N"}),
    "layers": ("--layers", "only the first N layers", {"type": _count, "metavar": "N"}),
}
