"""The results under bench/results, by suite, machine and run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from bench import show
from bench.earlier import as_today
from bench.report import real_cells
from jspec import tuned

# Suites whose results of one folder are one result.
JOINED = {"real": real_cells.joined}


@dataclasses.dataclass(frozen=True)
class Run:
    """A result: of ``SUITE.json``, or of ``SUITE.NAME.json``, a further run of other cases.

    ``machine``: the name of its folder. ``name``: of the further run, else empty.
    """

    machine: str
    suite: str
    name: str
    result: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.result["rows"]

    @property
    def device(self) -> str:
        return self.result["machine"]["device"]

    @property
    def card(self) -> str:
        """``H200`` for a result of an NVIDIA H200."""
        match = re.match(r"NVIDIA (\S+)", self.device)
        return match[1] if match else self.device

    @property
    def table(self) -> tuned.Table:
        """Today's orders of backends on its device."""
        tables = tuned.tables()
        if self.device == tuned.CPU:
            return tables[tuned.CPU]
        return tuned.nearest(self.device, (9, 0), list(tables.values()))


def read(results: Path) -> list[Run]:
    """Every result, the machines in the order of RESULTS.md, the first run of a suite first."""
    runs = []
    for folder in sorted((path for path in results.iterdir() if path.is_dir()), reverse=True):
        by_suite: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for path in sorted(folder.glob("*.json"), key=lambda path: ("." in path.stem, path)):
            suite, _, name = path.stem.partition(".")
            by_suite.setdefault(suite, []).append((name, as_today(show.read(path))))
        for suite, named in by_suite.items():
            if suite in JOINED:
                named = [("", JOINED[suite]([result for _, result in named]))]
            runs += [Run(folder.name, suite, name, result) for name, result in named]
    return runs
