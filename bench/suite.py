"""What every suite of the bench is: a name, what it runs, and how its result is shown."""

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

    ``run(settings)`` gives its result: ``rows``, which may come one by one, and what the report
    needs beside them. ``show(result)`` prints it. ``compare(result, earlier)`` writes into
    each row how many times as fast it is as in an earlier result, and returns how many had one.
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
        """Every backend and rival that it may run."""
        backends = {name for operation in self.operations for name in operation.backends}
        return backends | set(self.rivals)
