"""How a command ends early: an error in one line, or Ctrl-C."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # the exit code after Ctrl-C


def one_line(text: str) -> str:
    """``text`` with line breaks, and what else does not print, as Python spells it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fail(message: str) -> int:
    """Print an error; returns the exit code of bad input."""
    print(f"jspec: error: {one_line(message)}", file=sys.stderr)
    return 2


def interrupted() -> int:
    """Say that Ctrl-C ended the command; returns the exit code."""
    print("jspec: interrupted", file=sys.stderr)
    return INTERRUPTED
