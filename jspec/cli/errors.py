"""How a command ends early: an error in one line, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

REDELIVERY_SECONDS = 0.02
LINE_LIMIT = 1000  # characters of an error, which may quote what a file or an argument holds
INTERRUPTED = 130  # the exit code after Ctrl-C


def redeliver_interrupts() -> None:
    """Raise Ctrl-C again where Python drops the exception, as in callbacks of garbage collection.

    JAX has such a callback, and spends much of tracing and compiling in it.
    """
    report = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        # Later: raised in this hook, it would be dropped again.
        arguments = os.getpid(), signal.SIGINT
        timer = threading.Timer(REDELIVERY_SECONDS, os.kill, arguments)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def one_line(text: str) -> str:
    """``text`` with line breaks, and what else does not print, as Python spells it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fail(message: str) -> int:
    """Print an error, of at most `LINE_LIMIT` characters; returns the exit code of bad input."""
    print(f"jspec: error: {one_line(message):.{LINE_LIMIT}}", file=sys.stderr)
    return 2


def interrupted(result: str = "") -> int:
    """Say that Ctrl-C ended the command, and the ``result``; returns the exit code."""
    print(f"jspec: interrupted{result}", file=sys.stderr)
    return INTERRUPTED
