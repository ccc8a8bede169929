"""Orbax without its log lines: what goes wrong is raised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep orbax's log lines from the user, and the root logger as it was.

    absl gives the root logger a handler with its first line, when orbax is imported or later. It
    would print other libraries' lines a second way.
    """

    def nothing(record: logging.LogRecord) -> bool:
        return False

    logger, handlers = logging.getLogger("absl"), logging.root.handlers[:]
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
        logging.root.handlers[:] = handlers


with quiet():
    import orbax.checkpoint as ocp

__all__ = ["ocp", "quiet"]
