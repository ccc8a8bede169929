"""A bar of what has been loaded, on a terminal alone."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jspec.models.errors import on_one_line

PATIENCE = 1.0  # seconds before a bar is shown


@contextlib.contextmanager
def loading(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes as loaded; a bar on stderr shows their share of ``total``.

    It is shown only where stderr is a terminal and loading takes longer than `PATIENCE`, and is
    gone when the block ends.
    """
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    bars, begin = _bars(), time.monotonic()
    task = bars.add_task(f"loading {on_one_line(name)}", total=total)
    with contextlib.ExitStack() as shown:

        def advance(nbytes: int) -> None:
            bars.advance(task, nbytes)
            if not bars.live.is_started and time.monotonic() - begin > PATIENCE:
                shown.enter_context(bars)

        yield advance


def _bars() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
