"""Errors of reading and writing models, and how messages show what a file says."""

import reprlib
from typing import Any

_SHOWN = 8  # items of a list or an object


class CheckpointError(ValueError):
    """A model directory or one of its files is missing, malformed or of another shape."""


class ChatTemplateError(ValueError):
    """A chat template is malformed, refuses the messages, or makes too much of them."""


def quoted(value: Any, limit: int = 80) -> str:
    """``value`` as Python writes it, on one line of at most ``limit`` characters.

    For names and values from files in messages: line breaks and escape sequences are spelled out.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = _SHOWN
    short.maxlevel = 4
    text = short.repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def on_one_line(error: object, limit: int = 200) -> str:
    """Another library's error on one line of at most ``limit`` characters, safe to print."""
    words = " ".join(str(error)[: 8 * limit].split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words[:limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
