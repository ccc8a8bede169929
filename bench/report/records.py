"""The timed rows of whole steps, as suite `decode` has them and as earlier suites had them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.cases import kilo
from bench.point import Row, spread
from bench.report.runs import Run, card_of

PLAIN, ALONE = "plain", "verification"
Place = tuple[str, str, int, int]  # card, model, rows and context


@dataclasses.dataclass(frozen=True)
class Step:
    """A pass, an iteration or a step that reads a selection.

    Attributes:
        kind: ``"pass"``, ``"draft"`` or ``"read"``.
        place: card, model, rows and context.
        name: of the drafter or policy.
        gamma: draft tokens; those of a pass less 1.
        us: microseconds, the median.
        floor_us: microseconds to read its bytes.
        row: of the result.
    """

    kind: str
    place: Place
    name: str
    gamma: int
    us: float
    floor_us: float
    row: Row

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us

    @property
    def tokens(self) -> float | None:
        """Tokens of an iteration by an imposed acceptance."""
        return self.row.get("tokens", self.row.get("tokens_per_iteration"))


def steps(results: Iterable[dict[str, Any]], *kinds: str) -> Iterator[Step]:
    """The steps of some kinds that have times and are right, in the order of the results."""
    for result in results:
        for row in result["rows"]:
            step = _step(result, row)
            if step is not None and step.kind in kinds:
                yield step


def _step(result: dict[str, Any], row: Row) -> Step | None:
    time, case = spread(row, "step"), row.get("case") or {}
    operation = row.get("operation")
    if time is None or not row["checked"] or "model" not in case:
        return None
    if operation == "decode_step":  # before suites of steps became one
        kind = "read" if result["suite"] == "hata-e2e" else "pass"
        name = case.get("policy", "dense" if kind == "read" else PLAIN)
        floor = row["floor_ns"]
    elif operation in ("iteration", "draft", "pass", "read") and "floors_ns" in row:
        kind = "draft" if operation == "iteration" else operation
        name, floor = row["name"], sum(row["floors_ns"].values())
    else:
        return None
    gamma = case["T"] - 1 if "T" in case else case.get("gamma", 0)
    gamma = 0 if name == PLAIN and kind == "draft" else gamma
    place = (card_of(result), case["model"], case["B"], case.get("S") or case["context"])
    return Step(kind, place, name, gamma, time.median, floor / 1e3, row)


def by_place(every: Iterable[Step]) -> dict[Place, dict[str, Step]]:
    """The first step of each place and name."""
    places: dict[Place, dict[str, Step]] = {}
    for step in every:
        places.setdefault(step.place, {}).setdefault(step.name, step)
    return places


def words(place: Place) -> tuple[str, str, str, str]:
    """A place as cells of a table."""
    card, model, batch, context = place
    return card, model, str(batch), kilo(context)


def parts_us(step: Step, of_place: dict[str, Step]) -> dict[str, float]:
    """Microseconds of each part of an iteration, empty where kernels were not recorded.

    What attention takes beyond that of the verification alone belongs to the collection of scores.
    """
    alone = of_place.get(ALONE)
    kinds, others = (None if x is None else x.row.get("parts_ns") for x in (step, alone))
    if not kinds or not others:
        return {}
    parts = {part: sum(kinds[part].values()) / 1e3 for part in kinds}
    if parts["collection"]:
        attention = (x["verification"]["attention"] / 1e3 for x in (kinds, others))
        more = next(attention) - next(attention)
        parts["collection"] += more
        parts["verification"] -= more
    return parts


def selecting(step: Step, parts: dict[str, float]) -> float:
    """The time of selecting over the rest of an iteration."""
    time = sum(parts[part] for part in ("collection", "selection", "compaction"))
    return time / (step.us - time)


def first(runs: Sequence[Run]) -> list[Run]:
    """The first run of each machine."""
    return list({run.machine: run for run in reversed(runs)}.values())[::-1]
