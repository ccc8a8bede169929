"""A decoding step that reads what a policy selects, at the true shapes of real models.

The end-to-end measure of HATA (arXiv 2506.02572): all layers, random weights, keys and values; the
first two layers are dense, the others select 1.56 % of the context. Clock: as in `bench.decode`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from rich.table import Table

from bench import cases, decode, point
from bench.decode import CPU_STEPS
from bench.decode.catalogue import MODELS
from bench.decode.shapes import Ceilings
from bench.decode.steps import DENSE_LAYERS, Case
from bench.decode.tables import compare, ms
from bench.machine import read_ceiling
from bench.point import Row, spread
from bench.policies import NAMES
from bench.settings import Settings, console
from bench.suite import Suite
from bench.table import number, times
from jspec.cli.compile_cache import keep_programs

STEPS = 8  # of a chunk
# layers: number of first layers, 0 for all.
DEFAULT: cases.Case = {"model": "llama-3.1-8b", "B": 4, "S": 131072, "layers": 0}
# Policies for a run of two minutes; others by `--backend`.
POLICIES = ("dense", "hata", "quest_32", "loki", "streaming")
COLUMNS = (
    "step",
    "p10-p90",
    "tokens/s",
    "vs dense",
    "floor",
    "of floor",
    "kernels",
    "idle",
    "temp",
)
FOOT = (
    "step: ms of a step of all rows, the median; vs dense: tokens a second over those of our dense "
    "step; floor: ms to read, at the read ceiling of this run, {ceiling:,.0f} GB/s, the weights "
    "and of the cache what the policy scores and what attention reads; of floor: floor over step; "
    "idle: 1 - time of kernels over the step; temp: temporary memory of the program over the "
    "cache. S: tokens of context a row"
)


def case(text: str) -> cases.Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid or no layer selects."""
    case = cases.parse(text, DEFAULT)
    every = [layer.window is None for layer in MODELS[case["model"]].layers]
    least = every.index(True, DENSE_LAYERS) + 1
    if 0 < case["layers"] < least:
        raise ValueError(
            f"layers={case['layers']}: policies select in none of them; take {least} or more"
        )
    return case


def grid(settings: Settings) -> list[cases.Case]:
    """The requested cases, or the suite's defaults."""
    defaults = ("B=4",)
    if jax.default_backend() != "gpu":
        defaults = ("B=1,S=2K,layers=3",)
    elif settings.quick:
        defaults = ("B=1,S=32K",)
    return [case(text) for text in settings.cases or defaults]


def run(settings: Settings) -> dict[str, Any]:
    """Measure every case with every policy."""
    keep_programs()
    cpu = jax.default_backend() == "cpu"
    decode_settings = dataclasses.replace(settings.decode, steps=CPU_STEPS if cpu else STEPS)
    # `only` has names of policies here; attention takes its best backend.
    policies = [name for name in NAMES if name in (settings.only or POLICIES)]
    settings = dataclasses.replace(settings, decode=decode_settings, only=())
    ceilings = Ceilings(read_ceiling(), None)
    return {
        "read_ceiling_bytes_per_s": ceilings.read,
        "steps": decode_settings.steps,
        "rows": _rows(grid(settings), policies, settings, ceilings),
    }


def _rows(
    chosen: list[cases.Case], policies: list[str], settings: Settings, ceilings: Ceilings
) -> Iterator[Row]:
    for model, layers in dict.fromkeys((case["model"], case["layers"]) for case in chosen):
        cases_of_model = [
            Case(model, case["B"], case["S"], (1,), name)
            for case in chosen
            if (case["model"], case["layers"]) == (model, layers)
            for name in policies
        ]
        asked = dataclasses.replace(settings.decode, layers=layers or None)
        of_layers = dataclasses.replace(settings, decode=asked)
        drawn = decode.drawn(model, of_layers)
        yield from decode.steps_of(drawn, cases_of_model, of_layers, ceilings)


@dataclasses.dataclass(frozen=True)
class Step:
    """A row with times: policy, case, time, and the time of the dense step of the same case."""

    row: Row
    policy: str
    case: tuple[tuple[str, Any], ...]
    time: point.Spread
    dense: point.Spread | None

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of the dense step."""
        return None if self.dense is None else self.dense.median / self.time.median

    @property
    def tokens(self) -> float:
        """Tokens a second of all rows."""
        return self.row["case"]["B"] / self.time.median * 1e6

    @property
    def share(self) -> float:
        """The byte floor over the step."""
        return self.row["floor_ns"] / 1e3 / self.time.median

    def cells(self) -> tuple[str, ...]:
        """The cells under `COLUMNS`."""
        row, time = self.row, self.time
        return (
            ms(time.median),
            f"{ms(time.low)}-{ms(time.high)}",
            number(self.tokens),
            "" if self.speedup is None else times(self.speedup),
            ms(row["floor_ns"] / 1e3),
            f"{self.share:.0%}",
            number(row["kernels"]) if "kernels" in row else "",
            f"{row['idle']:.1%}" if "idle" in row else "",
            f"{row['temp_bytes'] / row['cache_bytes']:.1%}" if "temp_bytes" in row else "",
        )


def steps(rows: list[Row]) -> list[Step]:
    """The rows that have times, by case."""
    timed = []
    for row in rows:
        time = spread(row, "step")
        if time is not None:
            at = {k: v for k, v in row["case"].items() if k not in ("policy", "T")}
            timed.append((row, row["case"].get("policy", "dense"), tuple(at.items()), time))
    dense = {case: time for _, policy, case, time in timed if policy == "dense"}
    return [Step(row, name, at, time, dense.get(at)) for row, name, at, time in timed]


def case_cells(step: Step) -> tuple[str, ...]:
    """Cells of a step: model, layers, batch and context."""
    at = step.row["case"]
    return at["model"], str(at["layers"]), str(at["B"]), cases.kilo(at["context"])


def show(result: dict[str, Any]) -> None:
    """Print a line per policy; rows without times as their reason."""
    screen, title = console(), f"{result['machine']['device']}; times in milliseconds"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None)
    columns = [i for i, heading in enumerate(COLUMNS) if heading != "p10-p90"]
    for heading in ("model", "layers", "B", "S", "policy", *(COLUMNS[i] for i in columns)):
        words = heading in ("model", "policy")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for step in steps(result["rows"]):
        cells = step.cells()
        table.add_row(*case_cells(step), step.policy, *(cells[i] for i in columns))
    screen.print(table)
    ceiling = result["read_ceiling_bytes_per_s"] / 1e9
    screen.print(FOOT.format(ceiling=ceiling), markup=False)
    reasons = [
        f"{row['case'].get('policy', 'dense')}: {row['reason']}"
        for row in result["rows"]
        if row.get("reason")
    ]
    for reason in dict.fromkeys(reasons):
        screen.print(reason, markup=False)


SUITE = Suite(
    "hata-e2e",
    "a step of real models' shapes that reads what a policy selects, against our dense step",
    run,
    show,
    rivals=NAMES,
    compare=compare,
    case=case,
)
