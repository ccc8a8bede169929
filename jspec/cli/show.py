"""How the commands show things: progress on a terminal, tables, JSON, the environment."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from jspec import __version__
from jspec.cli.errors import one_line
from jspec.decode.stats import Stats
from jspec.dispatch import Choice

_DESCRIPTION = TextColumn("{task.description}", markup=False)

POSITIONS = 10  # the most of a draft whose acceptance is shown


class PlainConsole(Console):
    """A console that shows text as it is: no markup, and control characters spelled out."""

    def render_str(self, text: str, **settings: Any) -> Text:  # of all that it prints
        lines = "\n".join(map(one_line, text.split("\n")))
        settings["markup"] = settings["emoji"] = False
        return super().render_str(lines, **settings)

    def on_broken_pipe(self) -> None:
        """Let `jspec.cli.main` leave as it does for every command; rich would exit with 1."""
        raise BrokenPipeError


def console(*, stderr: bool = True) -> Console:
    """Progress and tables beside a result go to stderr; a table that is the result, to stdout."""
    width = min(100, Console(stderr=stderr).width)
    return PlainConsole(stderr=stderr, width=width, highlight=False)


def counted(number: int, thing: str) -> str:
    """As in ``1 text`` and ``2 texts``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def counted_bars(*, transient: bool) -> Bars:
    """Bars of how many things are done, on stderr where that is a terminal."""
    shows = console()
    columns = (_DESCRIPTION, BarColumn(), MofNCompleteColumn())
    return Bars(
        *(*columns, TimeElapsedColumn()),
        console=shows,
        transient=transient,
        disable=not shows.is_terminal,
    )


class Progress:
    """Bars for compiling, prefill and decoding, on stderr where that is a terminal."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._streams = False

    @contextlib.contextmanager
    def batch(self, tokens: int, name: str, *, streams: bool) -> Iterator[None]:
        """While a batch decodes up to ``tokens`` tokens; ``name`` says how.

        With ``streams`` the bars leave the screen to the text when it begins.
        """
        if not self.shown:
            yield
            return
        columns = (_DESCRIPTION, BarColumn(), TextColumn("{task.fields[of]}"))
        with Bars(*columns, TimeElapsedColumn(), console=console(), transient=True) as bars:
            self._tasks = {
                "compile": bars.add_task("compiling...", total=None, visible=False, of=""),
                "prefill": bars.add_task("prefill", total=None, visible=False, of=""),
                "decode": bars.add_task(one_line(name), total=tokens, visible=False, of=""),
            }
            self._bars, self._streams = bars, streams
            try:
                yield
            finally:
                self._bars = None

    def compiling(self, begins: bool) -> None:
        """Note that a program begins, or ceases, to be compiled."""
        if self._bars is not None:
            self._bars.reset(self._tasks["compile"], visible=begins)

    def prefilled(self, done: int, total: int) -> None:
        """Note prompt tokens that are in the cache."""
        if self._bars is not None:
            of = f"{done}/{total}"
            self._bars.update(
                self._tasks["prefill"], completed=done, total=total, visible=done < total, of=of
            )

    def decoded(self, tokens: int) -> None:
        """Note newly decoded tokens."""
        if self._bars is None:
            return
        if self._streams:
            self._bars.stop()
            self._bars = None
            return
        task = self._tasks["decode"]
        self._bars.update(task, advance=tokens, visible=True)
        bar = next(x for x in self._bars.tasks if x.id == task)
        self._bars.update(task, of=f"{bar.completed:.0f}/{bar.total:.0f}")


def print_choices(choices: Sequence[Choice]) -> None:
    """Which backend each operation took where one is preferred, and why another one."""
    table = Table("operation", "backend", "why not the preferred one", box=None)
    for choice in sorted(choices, key=lambda choice: choice.operation):
        table.add_row(choice.operation, choice.backend, choice.reason or "")
    console().print(table)


def print_table(
    stats: Stats,
    seeds: Sequence[str],
    compare: dict[str, Any] | None,
    answer: str | None = None,
) -> None:
    """The statistics and the ``seeds`` of sampled requests, in at most 100 columns.

    ``answer`` says whether the text is right, where that is known.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if answer is not None:
        table.add_row("answer", answer)
    table.add_row("tokens", f"{stats.committed} in {stats.steps} steps")
    if stats.drafted:
        table.add_row(
            "tokens per step",
            f"{stats.mean_accepted_length:.2f}  ({stats.acceptance_rate:.0%} of {stats.drafted:,} "
            "drafted tokens accepted)",
        )
        rates = [f"{p.rate:.2f}" for p in stats.acceptance_by_position if p.attempts]
        more = f" ... ({len(rates)} positions)" if len(rates) > POSITIONS else ""
        table.add_row("acceptance by position", " ".join(rates[:POSITIONS]) + more)
    elif stats.acceptance_by_position:
        table.add_row("drafted tokens", "none")
    if len(stats.steps_at_gamma) > 1:
        steps = ", ".join(f"{gamma}: {steps}" for gamma, steps in stats.steps_at_gamma)
        table.add_row("steps by gamma", steps)
    if seeds:
        table.add_row("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds))
    prefill = f"{stats.prefill_tokens_per_s:,.0f} tokens/s, {stats.prefill_s:.1f} s"
    if not stats.prefill_s:  # prompts that an engine prefilled while it decoded
        prefill = f"{counted(stats.prompt_tokens, 'token')}, in the time of decode"
    table.add_row("prefill", prefill)
    table.add_row("decode", f"{stats.decode_tokens_per_s:,.1f} tokens/s, {stats.decode_s:.1f} s")
    programs = counted(stats.compilations, "program")
    table.add_row("compile", f"{stats.compile_s:.1f} s for {programs}, not counted above")
    if compare is not None:
        table.add_row(
            "against plain decoding",
            f"{_sameness(compare)}, at {compare['speedup']:.2f}x of its speed "
            f"({compare['decode_tokens_per_s']:,.1f} tokens/s)",
        )
    console().print(table)


def _sameness(compare: dict[str, Any]) -> str:
    if compare["identical"]:
        return "identical tokens"
    if not compare["lossless"]:
        return "tokens differ, as --policy is not lossless"
    if not compare["greedy_identical"]:
        return "tokens differ"
    return "other tokens of the same distribution"


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value))


def environment() -> dict[str, Any]:
    """The machine and the versions that a figure depends on."""
    import jax

    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {"jspec": __version__} | {name: version(name) for name in packages},
    }
