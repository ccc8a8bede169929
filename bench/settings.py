"""The settings of a run, its console and progress bars."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run.

    ``quick``: fewer and smaller cases. ``only``: the names of the backends and rivals to run, empty
    for all. ``cases``: cases to run instead of the suite's defaults, as text. ``model``,
    ``draft_model``, ``hashes`` and ``resume``: the models, the folder of trained hashes and the
    earlier result of the suite `real`; some of `quality` takes a model and hashes too.
    """

    quick: bool = False
    only: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    model: Path | None = None
    resume: Path | None = None
    draft_model: Path | None = None
    hashes: Path | None = None

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only

    @property
    def repeats(self) -> int:
        return 10 if self.quick and jax.default_backend() == "cpu" else 50


WIDTH = 100  # columns of a table at most, and of one that goes to a file


def console(**kwargs: Any) -> Console:
    """A console of the terminal's width, up to `WIDTH` columns."""
    screen = Console(highlight=False, **kwargs)
    if screen.is_terminal or "COLUMNS" in os.environ:
        screen.width = min(WIDTH, screen.width)
    else:
        screen.width = WIDTH
    return screen


@contextlib.contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; the yielded function advances it.

    If stderr is no terminal, prints one line with the duration at the end instead.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = sys.stderr.isatty()
    begin = time.perf_counter()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not shown,
    ) as bars:
        task = bars.add_task(label, total=total)
        yield lambda: bars.advance(task)
    if not shown:
        print(
            f"{label}: {total} in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True
        )
