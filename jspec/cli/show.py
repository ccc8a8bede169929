"""How the commands show things: progress on a terminal, tables, JSON, the environment."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from jspec import __version__
from jspec.decode.stats import Stats


def console() -> Console:
    """Tables and progress go to stderr, so that stdout carries nothing but text or JSON."""
    return Console(stderr=True, width=min(100, Console(stderr=True).width), highlight=False)


class Progress:
    """Bars for prefill and for batches, shown on a terminal only."""

    def __init__(self, *, enabled: bool):
        self._enabled = enabled and sys.stderr.isatty()
        self._bars: Bars | None = None
        self._decode: Any = None

    @contextlib.contextmanager
    def batch(self, tokens: int) -> Iterator[Callable[[int, int], None] | None]:
        """A batch that will decode up to ``tokens`` tokens, 0 to show its prefill alone.

        Yields the ``on_prefill`` callback.
        """
        if not self._enabled:
            yield None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Bars(*columns, TimeElapsedColumn(), console=console(), transient=True) as bars:
            self._bars = bars
            prefill = bars.add_task("prefill", total=None)
            self._decode = bars.add_task("decode", total=tokens, visible=False)

            def on_prefill(done: int, total: int) -> None:
                ended = done >= total
                bars.update(prefill, completed=done, total=total, visible=not ended)
                bars.update(self._decode, visible=ended and tokens > 0)
                if ended and not tokens:
                    bars.stop()  # the text itself takes the screen from here on

            yield on_prefill
        self._bars = None

    def decoded(self, tokens: int) -> None:
        """Note newly decoded tokens."""
        if self._bars is not None:
            self._bars.advance(self._decode, tokens)


def print_table(stats: Stats, seeds: Sequence[str], compare: dict[str, Any] | None) -> None:
    """The statistics and the ``seeds`` of sampled requests, in at most 100 columns."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("tokens", f"{stats.committed} in {stats.steps} steps")
    if stats.drafted:
        table.add_row(
            "mean accepted length",
            f"{stats.mean_accepted_length:.2f}  ({stats.acceptance_rate:.0%} of {stats.drafted} "
            "drafted tokens accepted)",
        )
        rates = " ".join(f"{p.rate:.2f}" for p in stats.acceptance_by_position[:16])
        table.add_row("acceptance by position", rates)
    if seeds:
        table.add_row("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds))
    table.add_row("prefill", f"{stats.prefill_tokens_per_s:,.0f} tokens/s, {stats.prefill_s:.1f} s")
    table.add_row("decode", f"{stats.decode_tokens_per_s:,.1f} tokens/s, {stats.decode_s:.1f} s")
    table.add_row("compile", f"{stats.compile_s:.1f} s, in neither of these")
    if compare is not None:
        differ = "other tokens of the same law" if compare["sampled"] else "tokens differ"
        same = "identical tokens" if compare["identical"] else differ
        table.add_row(
            "against plain decoding",
            f"{same}, {compare['speedup']:.2f}x of its {compare['decode_tokens_per_s']:,.1f} "
            "tokens/s",
        )
    console().print(table)


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
