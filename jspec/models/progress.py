"""A bar of what has been loaded, on a terminal alone."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

PATIENCE = 1.0  # seconds before a bar is shown


@contextlib.contextmanager
def loading(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes as loaded; a bar on stderr shows their share of ``total``.

    It is shown only where stderr is a terminal and loading takes longer than `PATIENCE`, and is
    gone when the block ends.
    """
    with contextlib.ExitStack() as shown:
        begin, loaded, task = time.monotonic(), 0, None

        def advance(nbytes: int) -> None:
            nonlocal loaded, task
            loaded += nbytes
            if task is not None:
                bars.update(task, completed=loaded)
            elif bars is not None and time.monotonic() - begin > PATIENCE:
                shown.enter_context(bars)
                task = bars.add_task(f"loading {name}", total=total, completed=loaded)

        bars = _bars() if sys.stderr.isatty() else None
        yield advance


def _bars():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
