"""The tables of docs/exact.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.cases import kilo
from bench.drafters import DEFAULT_BACKENDS
from bench.drafters import PLAIN as NO_DRAFT
from bench.point import Row
from bench.report.markdown import Line, ms, table
from bench.report.runs import Run
from bench.report.steps import ALONE, PLAIN

WORDS = {
    "bits": "Positions whose logits have other bits than by passes of one token: by passes of so "
    "many tokens, and by verification that scores keys (*vegas*). *compared*: positions of each; "
    "their rows are shuffled, and batches differ.",
    "flips": "Requests whose greedy tokens are not those of plain decoding at the first batch of "
    "their run, by drafter; in brackets those whose draft could not be exact. A batch with more "
    "rows than prompts repeats some.",
    "price": 'Milliseconds of a greedy step without and with `exact="tokens"`, and in brackets how '
    "much longer the second is: of plain decoding, and of each drafter that was timed both ways.",
}
LABELS = {"bits": 4, "flips": 4, "price": 5}
LEVELS = ("no", "tokens")
WEIGHTS = {"decode": "random weights", "real": "real texts"}  # by suite


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """Each table after its words, empty where nothing was measured on a GPU."""
    of_gpus = [run for run in runs if run.device != "cpu"]
    quality = [run for run in of_gpus if run.suite == "quality"]
    timed = [run for run in of_gpus if run.suite in WEIGHTS]
    lines = {"bits": bits(quality), "flips": flips(quality), "price": price(timed)}
    return {
        name: f"{WORDS[name]}\n\n{text}" if (text := table(lines[name], labels)) else ""
        for name, labels in LABELS.items()
    }


def bits(runs: Sequence[Run]) -> list[Line]:
    """A line for each model, with a column for each number of tokens of a pass."""
    lines = {}
    for run in runs:
        for row in run.rows:
            if row["operation"] == "passes" and "compared" in row:
                key = run.card, row["case"]["model"], row["case"]["exact"], f"{row['compared']:,}"
                labels = zip(("card", "model", "exact", "compared"), key, strict=True)
                lines.setdefault(key, dict(labels))[row["name"]] = f"{row['differing']:,}"
    return [Line(lines[key]) for key in sorted(lines)]


def flips(runs: Sequence[Run]) -> list[Line]:
    """A line for each model and batch, with a column for each drafter."""
    lines = {}
    for run in runs:
        for row in run.rows:
            if row["operation"] == "flips" and "flips" in row:
                case = row["case"]
                key = run.card, case["model"], case["B"], f"{case['prompts']} x {case['new']}"
                labels = zip(("card", "model", "batch", "prompts x tokens"), key, strict=True)
                fell_back = f" ({row['fell_back']})" if row["fell_back"] else ""
                cells = lines.setdefault(key, {name: str(x) for name, x in labels})
                cells[row["name"]] = f"{row['flips']}{fell_back}"
    return [Line(lines[key]) for key in sorted(lines)]


class StepTime(NamedTuple):
    """The time of a step at one of `LEVELS`.

    Attributes:
        settings: the rest of its case, and the versions of packages, in words.
        run: the process that measured it.
        level: of exactness.
        us: the median.
    """

    settings: str
    run: int | str
    level: str
    us: float


def price(runs: Sequence[Run]) -> list[Line]:
    """A line for each card, model, batch, context and gamma, with a column for plain decoding and
    each drafter that has times of both levels."""
    by_place: dict[tuple[Any, ...], dict[str, list[StepTime]]] = {}
    for run in sorted(runs, key=lambda run: run.result["machine"]["date"]):
        for row in run.rows:
            if not _is_usual(row):
                continue
            case, name = row["case"], PLAIN if row["name"] == NO_DRAFT else row["name"]
            model = f"{case['model']}, {WEIGHTS[run.suite]}"
            place = run.card, model, case["B"], case["S"], case["gamma"]
            rest = {k: v for k, v in case.items() if k not in ("exact", "drafts")}
            versions = row.get("versions") or run.result["machine"].get("versions")
            times = by_place.setdefault(place, {}).setdefault(name, [])
            time = statistics.median(row["step_ns"]) / 1e3
            process = row.get("run", run.name)
            times.append(StepTime(f"{rest} {versions}", process, case["exact"], time))
    lines = []
    for place, by_name in sorted(by_place.items()):
        pairs = {name: last_pair(times) for name, times in by_name.items()}
        cells = {name: _longer(*pair) for name, pair in pairs.items() if pair}
        if cells:
            card, model, batch, context, gamma = place
            labels = {"card": card, "model": model, "B": str(batch), "S": kilo(context)}
            lines.append(Line(labels | {"gamma": str(gamma), PLAIN: ""} | cells))
    return lines


def _is_usual(row: Row) -> bool:
    """Whether a row is of a right, timed greedy step at one of `LEVELS`, by the measured orders of
    backends, of plain decoding or of a drafter."""
    case = row.get("case") or {}
    usual = {"sampling": "greedy", "backends": DEFAULT_BACKENDS}
    return (
        row.get("operation") in ("draft", "real")
        and row["name"] != ALONE
        and bool(row["checked"] and row.get("step_ns"))
        and case.get("exact") in LEVELS
        and all(case.get(key, value) == value for key, value in usual.items())
    )


def last_pair(times: Sequence[StepTime]) -> tuple[float, float] | None:
    """Microseconds of both levels at equal settings: of the last run that has both, else of several
    runs; None without such."""
    for is_one_run in (True, False):
        by_level: dict[tuple[Any, ...], dict[str, float]] = {}
        for time in times:
            together = (time.settings, time.run) if is_one_run else (time.settings,)
            by_level.setdefault(together, {})[time.level] = time.us
        pairs = [x for x in by_level.values() if len(x) == len(LEVELS)]
        if pairs:
            usual, exact = (pairs[-1][level] for level in LEVELS)
            return usual, exact
    return None


def _longer(usual: float, exact: float) -> str:
    return f"{ms(usual)}, {ms(exact)} ({exact / usual - 1:+.1%})"
