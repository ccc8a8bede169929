"""The tables on layers and steps at real models' shapes, from suites `hata` and `decode`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.cases import kilo
from bench.point import Row, best_clock
from bench.policies import NAMES
from bench.report.markdown import Line, case_words, microseconds, ms, ratio, us
from bench.report.runs import Run

LAYER_CASE = ("B", "S", "n", "heads")
POLICIES = ("hata", "quest_32", "loki", "magicpig", "exact_topk", "streaming")
PASSES = (1, 10)  # tokens
PLAIN, VEGAS, ALONE = "plain", "vegas", "verification"
Place = tuple[str, str, int, int]  # card, model, rows and context


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one case of a layer that have times: ``dense`` attention's and ``policies``'."""

    case: dict[str, Any]
    dense: dict[str, Row] = dataclasses.field(default_factory=dict)
    policies: dict[str, Row] = dataclasses.field(default_factory=dict)

    @property
    def fastest(self) -> tuple[str, float] | None:
        """The fastest dense attention and its microseconds."""
        medians = {name: microseconds(row) for name, row in self.dense.items()}
        return min(medians.items(), key=lambda pair: pair[1], default=None)

    def speedup(self, name: str) -> float | None:
        """Speedup of a policy over the fastest dense attention."""
        row = self.policies.get(name)
        return self.fastest[1] / microseconds(row) if row and self.fastest else None


def groups(rows: Sequence[Row]) -> list[Group]:
    """The rows of layers that have times, by case."""
    by_case: dict[str, Group] = {}
    for row in rows:
        if row["operation"] == "hata_layer" and best_clock(row) is not None:
            group = by_case.setdefault(str(row["case"]), Group(row["case"]))
            (group.policies if row["name"] in NAMES else group.dense)[row["name"]] = row
    return list(by_case.values())


def policies(runs: Sequence[Run]) -> Iterator[Line]:
    """Layers and steps that read what a policy selects, over dense ones."""
    for run in runs:
        for index, group in enumerate(groups(run.rows)):
            if group.fastest is None or "hata" not in group.policies:
                continue
            name, time = group.fastest
            words = f"layer, {case_words({key: group.case[key] for key in LAYER_CASE})}"
            cells = {"card": run.card, "case": words, "dense": f"{us(time)} ({name})"}
            cells["hata"] = us(microseconds(group.policies["hata"]))
            speeds = {f"{x}, speed": ratio(group.speedup(x)) for x in POLICIES}
            yield Line(cells | speeds, headline=index == 0)
    for place, of_place in steps(runs, "read").items():
        card, model, batch, context = place
        words = f"step, {model}, B={batch}, S={kilo(context)}"
        times = {name: microseconds(row) for name, row in of_place.items()}
        dense = times.get("dense")
        cells = {"card": card, "case": words}
        cells |= {x: f"{ms(times[x])} ms" if x in times else "" for x in ("dense", "hata")}
        speeds = {x: dense / times[x] if dense and x in times else None for x in POLICIES}
        cells |= {f"{x}, speed": ratio(speed) for x, speed in speeds.items()}
        yield Line(cells, headline="hata" in times)


def steps(runs: Sequence[Run], kind: str) -> dict[Place, dict[Any, Row]]:
    """The steps of suite `decode` that have times and are right, without exact mode.

    Args:
        runs: of whose rows the first with the same case and name stands.
        kind: the operation, ``"pass"``, ``"draft"`` or ``"read"``.

    Returns:
        By card, model, rows and context, the rows by name; passes by their tokens.
    """
    places: dict[Place, dict[Any, Row]] = {}
    for run in runs:
        for row in run.rows:
            case = row["case"]
            is_timed = row["checked"] and row.get("step_ns") and "over_floor" in row
            if row["operation"] == kind and is_timed and case.get("exact", "no") == "no":
                of_place = places.setdefault((run.card, case["model"], case["B"], case["S"]), {})
                of_place.setdefault(case["T"] if kind == "pass" else row["name"], row)
    return places


def labels(place: Place) -> dict[str, str]:
    """A place as cells of a table."""
    card, model, batch, context = place
    return {"card": card, "model": model, "B": str(batch), "context": kilo(context)}


def passes(runs: Sequence[Run]) -> Iterator[Line]:
    """A pass of one token and one of ten, over the time to read their bytes: the largest case of
    each model, and the worst of all."""
    every = {
        place: {tokens: of_place[tokens] for tokens in PASSES if tokens in of_place}
        for place, of_place in steps(runs, "pass").items()
    }
    by_place = {place: of_place for place, of_place in every.items() if of_place}
    shown = {
        max((x for x in by_place if x[:2] == place[:2]), key=lambda x: x[2] * x[3])
        for place in by_place
    }
    if by_place:
        worst = {x: max(row["over_floor"] for row in by_place[x].values()) for x in by_place}
        shown.add(max(worst, key=worst.__getitem__))
    cards: set[str] = set()
    for place, of_place in by_place.items():
        if place in shown:
            cells = labels(place)
            for tokens, row in of_place.items():
                words = f"{ms(microseconds(row))} ms, {row['over_floor']:.2f}"
                cells[f"T={tokens}, over its floor"] = words
            yield Line(cells, headline=place[0] not in cards)
            cards.add(place[0])


def iterations(runs: Sequence[Run]) -> Iterator[Line]:
    """Iterations by vegas, and their parts."""
    for run in runs:
        for place, of_place in steps([run], "draft").items():
            row = of_place.get(VEGAS)
            parts = parts_us(row, of_place.get(ALONE))
            if row is None or not parts:
                continue
            time = microseconds(row)
            plain = of_place.get(PLAIN)
            selecting = sum(parts[x] for x in ("collection", "selection", "compaction"))
            cells = {
                "gamma": str(row["case"]["gamma"]),
                "plain step": "" if plain is None else ms(microseconds(plain)),
                "iteration": ms(time),
                "over floor": f"{row['over_floor']:.2f}",
                **{part: ms(parts[part]) for part in ("draft passes", "verification")},
                "selecting adds": f"{selecting / (time - selecting):.1%}",
            }
            yield Line(labels(place) | cells)


def parts_us(row: Row | None, alone: Row | None) -> dict[str, float]:
    """Microseconds of each part of an iteration, empty where kernels were not recorded.

    What attention takes beyond that of the verification ``alone`` belongs to the collection of
    scores.
    """
    kinds, others = (None if x is None else x.get("parts_ns") for x in (row, alone))
    if not kinds or not others:
        return {}
    parts = {part: sum(kinds[part].values()) / 1e3 for part in kinds}
    if parts["collection"]:
        attention, other = (x["verification"]["attention"] / 1e3 for x in (kinds, others))
        parts["collection"] += attention - other
        parts["verification"] -= attention - other
    return parts


def imposed(runs: Sequence[Run]) -> Iterator[Line]:
    """Tokens a second of vegas and the fastest drafter of each case, each at its fastest gamma."""
    cards: set[str] = set()
    for place, of_place in rated(runs).items():
        rates = {name: row["tokens_per_s"] for name, (row, _) in of_place.items()}
        fastest = max(rates, key=rates.__getitem__)
        for name, (row, plain) in of_place.items():
            if name in {VEGAS, fastest}:
                speed = None if plain is None else rates[name] / plain
                cells = {
                    "draft": name,
                    "gamma": str(row["case"]["gamma"]),
                    "tokens": f"{row['tokens']:.2f}",
                    "iteration": ms(microseconds(row)),
                    "tok/s": f"{rates[name]:,.0f}",
                    "vs plain": ratio(speed),
                }
                yield Line(labels(place) | cells, name == VEGAS and place[0] not in cards)
        cards.add(place[0])


def rated(runs: Sequence[Run]) -> dict[Place, dict[str, tuple[Row, float | None]]]:
    """By place and drafter the iteration with a rate at its fastest gamma, the first run of it, and
    the rate of plain decoding in the same run."""
    by_gamma: dict[Place, dict[str, dict[int, tuple[Row, float | None]]]] = {}
    for run in runs:
        for place, of_place in steps([run], "draft").items():
            plain = of_place.get(PLAIN, {}).get("tokens_per_s")
            for name, row in of_place.items():
                if name != PLAIN and "tokens_per_s" in row:
                    of_name = by_gamma.setdefault(place, {}).setdefault(name, {})
                    of_name.setdefault(row["case"]["gamma"], (row, plain))
    return {
        place: {
            name: max(of_name.values(), key=lambda pair: pair[0]["tokens_per_s"])
            for name, of_name in of_place.items()
        }
        for place, of_place in by_gamma.items()
    }


def in_host_memory(runs: Sequence[Run]) -> Iterator[Line]:
    """Steps of HATA with keys and values in host memory, over dense ones on the device."""
    for run in runs:
        timed = [row for row in run.rows if row["checked"] and row.get("step_ns")]
        for row in (row for row in timed if row["name"] == "hata_off"):
            dense = [x for x in timed if x["case"] == row["case"] and x["name"] == "dense"]
            step, memory = microseconds(row), row["memory"]
            bus = f"{statistics.median(row['bus_ns']) / 1e6:.2f}" if "bus_ns" in row else ""
            cells = {
                "card": run.card,
                "model": row["case"]["model"],
                "context": kilo(row["case"]["S"]),
                "step ms": ms(step),
                "speed over dense": ratio(microseconds(dense[0]) / step if dense else None),
                "moved": f"{row['moved']:.0%}" if "moved" in row else "",
                "bus ms": bus,
                "device GB": f"{memory['cache_bytes'] / 1e9:.2f}",
                "host GB": f"{memory['host_bytes'] / 1e9:.2f}",
            }
            yield Line(cells, headline=bool(dense))
