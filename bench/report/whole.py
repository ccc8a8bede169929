"""The tables of docs/comparison.md on whole steps and on attention over several GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.cases import kilo
from bench.drafters import DEFAULT_BACKENDS, PLAIN, TREES
from bench.point import Row, best_clock
from bench.real.figures import limits, step_ms
from bench.report.markdown import (
    Line,
    case_words,
    common,
    microseconds,
    table,
    without_constants,
    wrapped,
)
from bench.report.runs import Run
from bench.table import number

# The backends of a column: names of rows.
COLUMNS = {
    "pallas": ("pallas",),
    "cuda": ("cuda",),
    "triton": ("triton",),
    "xla": ("xla", "xla_blocked"),
}
NOT_MEASURED = "not measured"
NO_TIME = "-"  # in a cell of a line that has other times
# The backends that ran, in their order, by operation and the reason against the preferred one.
Notes = dict[tuple[str, str], dict[str, None]]


class Place(NamedTuple):
    """A step on a card: its model, and the rest of its case in words."""

    card: str
    model: str
    words: str


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step by one choice of backends.

    Attributes:
        ms: milliseconds, None where it did not fit the card.
        share: what part of it reading its bytes at the ceiling takes, None if unknown.
        packing: the share of it that the kernels of packing take, 0 where it packs nothing.
        gigabytes: that it needs, where it did not fit.
        choices: the backends of its operations: rows of `jspec.dispatch`.
    """

    ms: float | None
    share: float | None = None
    packing: float = 0
    gigabytes: float = 0
    choices: Sequence[Row] = ()

    def __str__(self) -> str:
        if self.ms is None:
            return f"{self.gigabytes:.0f} GB"
        return number(self.ms) + (f" ({self.share:.0%})" if self.share else "")


def step_times(runs: Sequence[Run]) -> dict[Place, dict[str, StepTime]]:
    """Greedy steps that ran by more than the default: random weights at a model's shape, then real
    models; times by the name of the backend."""
    times: dict[Place, dict[str, StepTime]] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operation") == "backend" and (time := _random_step(row)):
                case = row["case"]
                words = f"B={case['B']}, S={kilo(case['S'])}, {case['draft']}"
                place = Place(run.card, f"{case['model']}, random weights", words)
                times.setdefault(place, {}).setdefault(row["name"], time)
    times |= _real_steps(runs, (PLAIN, "vegas", *TREES.values(), *TREES))
    return {
        place: by_name
        for place, by_name in times.items()
        if set(by_name) - {DEFAULT_BACKENDS} and any(x.ms is not None for x in by_name.values())
    }


def _random_step(row: Row) -> StepTime | None:
    """None for a step that was wrong, or could not run for another reason than memory."""
    choices = row.get("backends", ())
    if best_clock(row):
        return StepTime(microseconds(row) / 1e3, 1 / row["over_floor"], choices=choices)
    if row["checked"] is None and "memory" in row:
        return StepTime(None, gigabytes=row["memory"]["peak_bytes"] / 1e9)
    return None


def _real_steps(runs: Sequence[Run], names: Sequence[str]) -> dict[Place, dict[str, StepTime]]:
    """Greedy steps of real models with drafters of these ``names``.

    Of several results the last counts that has more than the default.
    """
    timed = [
        (run.card, row)
        for run in runs
        for row in run.rows
        if row.get("operation") == "real" and row["checked"] and "step_ns" in row
        if row["case"]["sampling"] == "greedy"
    ]
    by_date: dict[Place, dict[str, dict[str, StepTime]]] = {}
    for name in names:
        for card, row in ((card, row) for card, row in timed if row["name"] == name):
            case = row["case"]
            draft = "plain" if name == PLAIN else f"{name}({case['gamma']})"
            words = f"B={case['B']}, S={kilo(case['S'])}, {draft}"
            place = Place(card, f"{case['model']}, real texts", words)
            of_date = by_date.setdefault(place, {}).setdefault(row["date"], {})
            of_date[case["backends"]] = _real_step(row)
    return {
        place: times
        for place, dates in by_date.items()
        for _, times in sorted(dates.items())
        if set(times) - {DEFAULT_BACKENDS}
    }


def _real_step(row: Row) -> StepTime:
    time, shares = step_ms(row), limits(row)
    assert time is not None
    floor = sum(row["floors_ns"].values()) / 1e6 if "floors_ns" in row else None
    return StepTime(
        time,
        floor and floor / time,
        shares.packing if shares else 0,
        choices=row.get("backends", ()),
    )


def steps(runs: Sequence[Run]) -> str:
    """Whole steps by backend, a table for each model, what packing takes, and what ran in place of
    a preferred backend."""
    times = step_times(runs)
    parts = []
    for model in dict.fromkeys(place.model for place in times):
        lines = [
            Line(
                {"step": place.words, "card": place.card}
                | {x: str(by_name.get(x, NO_TIME)) for x in (DEFAULT_BACKENDS, *COLUMNS)}
            )
            for place, by_name in times.items()
            if place.model == model
        ]
        alike, lines = without_constants(lines, ["card"], {*(place.card for place in times)})
        card = "".join(f", {card}" for card in alike.values())
        parts.append(f"**{model}**, greedy{card}:\n\n{table(lines, 2 - len(alike))}")
    parts += [_packing(place.words, by_name) for place, by_name in times.items()]
    notes: dict[str, Notes] = {}
    for by_name in times.values():
        for preferred, time in by_name.items():
            if preferred != DEFAULT_BACKENDS:
                _note(preferred, time.choices, notes)
    if notes:
        items = (wrapped(f"- {x}: {_in_words(notes[x])}", "  ") for x in COLUMNS if x in notes)
        parts.append("What ran in place of the preferred backend:\n\n" + "".join(items))
    return "\n".join(filter(None, parts)) or f"Steps by backend: {NOT_MEASURED}.\n"


def _packing(words: str, by_name: Mapping[str, StepTime]) -> str:
    shares = [f"{x}: {time.packing:.2%}" for x, time in by_name.items() if time.packing]
    return wrapped(f"Share of packing in {words}: {', '.join(shares)}.") if shares else ""


def _note(preferred: str, choices: Sequence[Row], notes: dict[str, Notes]) -> None:
    """Add the backends that operations took in place of the preferred one, by reason."""
    for choice in choices:
        if choice["reason"] is not None:
            at = choice["operation"], choice["reason"]
            notes.setdefault(preferred, {}).setdefault(at, {})[choice["backend"]] = None


def _in_words(notes: Notes) -> str:
    """A reason is left out where it is that the operation has no such backend."""
    return ", ".join(
        f"`{operation}` by {' and '.join(backends)}"
        + ("" if reason.startswith("it has no backend") else f" ({reason})")
        for (operation, reason), backends in notes.items()
    )


def sharded(runs: Sequence[Run]) -> str:
    """A layer's attention on several GPUs: a table by kernel and one by exchange."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operation") != "attend" or best_clock(row) is None:
                continue
            case = row["case"]
            if case["strategy"] != "helix" or case["overlap"] > 1 or case["latent"]:
                continue
            if case["kvp"] * case["tpa"] == 1:
                continue
            shape = {"KVP": case["kvp"], "TPA": case["tpa"]}
            shape |= {key: case[key] for key in ("B", "S", "heads", "T")}
            kernel, exchange = case["kernel"], case["exchange"]
            column = f"exchange {exchange}" if kernel == DEFAULT_BACKENDS else f"kernel {kernel}"
            place = (run.card, *shape.values())
            cases[place] = shape
            cells.setdefault(place, {}).setdefault(column, number(microseconds(row)))
    places = [place for place in cases if len(cells[place]) > 1]
    if not places:
        return f"Sharded attention by kernel and exchange: {NOT_MEASURED}.\n"
    shared = common([cases[place] for place in places])
    parts = [f"{case_words(shared)}.\n"]
    exchanges = {"NCCL": "xla", "pallas": "pallas", "cuda": "cuda"}
    for kind, names in {"kernel": {x: x for x in COLUMNS}, "exchange": exchanges}.items():
        lines = []
        for place in places:
            words = case_words({k: v for k, v in cases[place].items() if k not in shared})
            times = {x: cells[place].get(f"{kind} {name}", NO_TIME) for x, name in names.items()}
            lines.append(Line({kind: words, "card": place[0]} | times))
        parts.append(table(lines, 2))
    return "\n".join(parts)
