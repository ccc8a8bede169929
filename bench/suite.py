"""The interface of a suite: its name, how it runs, and how its result is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from bench import table
from bench.settings import Settings
from jspec.dispatch import Operation

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark of `python -m bench`.

    ``run(settings)`` returns its result: ``rows``, which may be an iterator, and what else the
    report needs. ``show(result)`` prints it. ``compare(result, earlier)`` writes into each row its
    speedup over an earlier result, and returns how many rows had one.
    ``operations`` and ``rivals``: what ``--backend`` chooses among. ``custom_clocks``: its rows are
    timed by other clocks than those of `bench.clocks`. ``case(text)``: a case that ``--case`` asks
    for, `ValueError` where it is none; None for a suite whose cases are fixed.
    """

    name: str
    title: str
    run: Callable[[Settings], Result]
    show: Callable[[Result], None]
    operations: tuple[Operation, ...] = ()
    rivals: tuple[str, ...] = ()
    compare: Callable[[Result, Result], int] = table.compare
    custom_clocks: bool = False
    case: Callable[[str], Any] | None = None

    @property
    def names(self) -> set[str]:
        """The names of all backends and rivals that it can run."""
        backends = {name for operation in self.operations for name in operation.backends}
        return backends | set(self.rivals)
