"""The tables of docs/papers.md: the papers' figures, measured again.

The prose of the page is written by hand. Of several results of a case the latest stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.attention import PAGES
from bench.cases import kilo
from bench.decode import PERCENT
from bench.hata.parts import STAGES, WHOLE
from bench.point import Row, best_clock, spread
from bench.quality import BUDGETS, REFERENCE
from bench.report import steps
from bench.report.markdown import Line, microseconds, ms, ratio, table, us
from bench.report.runs import Run
from bench.report.steps import PLAIN, POLICIES
from bench.report.whole import NOT_MEASURED
from bench.table import number

Rows = dict[str, Row]  # by name
Cell = tuple[tuple[str, ...], float, str]  # the words and the number that it is of, its text
DEVICE = {"cpu": "CPU"}
LAYER = ("hata", "quest_32", "loki")  # of figure 5 of HATA
SCANS = {"torch": "PyTorch", "cuda_naive": "naive", "cuda": "ballot"}


def by_date(runs: Sequence[Run]) -> list[Run]:
    """The runs, the earliest first."""
    return sorted(runs, key=lambda run: run.result["machine"]["date"])


def measured(runs: Sequence[Run], operation: str) -> Iterator[tuple[str, dict[str, Any], Rows]]:
    """Card, case and rows by name of each case; of several runs the last one.

    Rows that were wrong or have no figures are left out.
    """
    cases: dict[tuple[str, str], tuple[str, dict[str, Any], Rows]] = {}
    for run in by_date(runs):
        of_run: dict[tuple[str, str], tuple[str, dict[str, Any], Rows]] = {}
        for row in run.rows:
            is_right = row.get("checked") is not False and "reason" not in row
            if row.get("operation") == operation and is_right:
                case, card = row["case"], DEVICE.get(run.card, run.card)
                at = card, str(sorted(case.items()))
                of_run.setdefault(at, (card, case, {}))[2][row["name"]] = row
        cases |= of_run
    return iter(cases.values())


def grid(labels: Sequence[str], heading: str, cells: Iterable[Cell]) -> Iterator[Line]:
    """A line for each of the words of ``labels``, a column for each number, in their order."""
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for at, column, text in cells:
        lines.setdefault(at, {})[column] = text
    columns = sorted({column for line in lines.values() for column in line})
    for at, line in lines.items():
        numbers = {heading.format(column): line.get(column, "") for column in columns}
        yield Line(dict(zip(labels, at, strict=True)) | numbers)


def layer(runs: Sequence[Run]) -> Iterator[Line]:
    """HATA, figure 5: a layer of each policy over the fastest dense attention of its run."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for run in by_date(runs):
        for group in steps.groups([row for row in run.rows if "operation" in row]):
            case = group.case
            if group.fastest is None or "hata" not in group.policies:
                continue
            name, time = group.fastest
            cells = {"heads": case["heads"], "B": str(case["B"]), "S": kilo(case["S"])}
            cells |= {"dense": f"{us(time)} ({name})"}
            cells["hata, us"] = number(microseconds(group.policies["hata"]))
            cells |= {x: ratio(group.speedup(x)) for x in LAYER}
            at = run.card, case["heads"].split("/")[1] != "32", case["B"] > 1, case["B"], case["S"]
            lines[at] = {"card": run.card} | cells
    for at in sorted(lines, key=lambda at: (at[0], *at[1:])):
        yield Line(lines[at])


def score_and_speed(runs: Sequence[Run]) -> Iterator[Line]:
    """HATA, figure 1: percent right of each policy, and the speed of steps that read by it."""
    scores: dict[str, dict[str, str]] = {}
    for card, case, rows in measured(runs, "read"):
        is_bundled = case.get("model", "bundled") == "bundled"
        if is_bundled and case.get("budget") == BUDGETS[0] and case["S"] >= 32768:
            for name, row in rows.items():
                heading = f"right at {kilo(case['S'])}, {card}"
                scores.setdefault(name, {})[heading] = f"{row['score']:.1f} %"
    read = [run for run in by_date(runs)[::-1] if run.result["suite"] in ("decode", "hata-e2e")]
    for (card, model, batch, context), rows in steps.steps(read, "read").items():
        times = {name.removesuffix("_32"): microseconds(row) for name, row in rows.items()}
        for name in scores:
            if name in times and "dense" in times:
                heading = f"step of {model}, B={batch}, S={kilo(context)}, {card}"
                scores[name][heading] = ratio(times["dense"] / times[name])
    names = [name.removesuffix("_32") for name in POLICIES]
    return (Line({"policy": name} | scores[name]) for name in names if name in scores)


def needles(runs: Sequence[Run]) -> Iterator[Line]:
    """HATA, figure 6: percent of needles found by length and depth."""
    for card, case, rows in measured(runs, "needle"):
        for name, row in rows.items():
            label = {"machine": card, "length": kilo(case["S"]), "policy": name}
            yield Line(label | {depth: f"{share:.0f}" for depth, share in row["depths"].items()})


def parts(runs: Sequence[Run]) -> Iterator[Line]:
    """HATA, figure 9: what each kernel takes off, as a share of the layer's time without any."""
    today = [run for run in runs if run.result["suite"] == "hata"]  # before, plain sorted in XLA
    for card, case, rows in measured(today, "hata_parts"):
        words = f"B={case['B']}, S={kilo(case['S'])}, {case['heads']} heads"
        cells = {"card": card, "case": words}
        times = {name: microseconds(row) for name, row in rows.items() if best_clock(row)}
        if "plain" not in times:
            continue
        before = plain = times["plain"]
        for name in (*STAGES, WHOLE):
            if name in times:
                less = "" if name == "plain" else f" ({(times[name] - before) / plain:+.1%})"
                cells[name] = us(times[name]) + less
                before = times[name]
        yield Line(cells | {"in all": ratio(plain / before)})


def prefill(runs: Sequence[Run]) -> Iterator[Line]:
    """Prefill with hashing over prefill without."""
    for card, case, rows in measured(runs, "prefill"):
        if card != DEVICE["cpu"] and {"dense", "hata"} <= rows.keys():
            cells = {"card": card, "model": f"{case['model']}, {case['layers']} layers"}
            cells |= {"prompt": f"{case['B']} x {kilo(case['S'])}"}
            cells |= {f"{x}, ms": ms(microseconds(rows[x])) for x in ("dense", "hata")}
            yield Line(cells | {"hashing adds": f"{rows['hata']['over_dense'] - 1:+.2%}"})


def rejected(runs: Sequence[Run]) -> Iterator[Line]:
    """Vegas, figure 5: the acceptance probability of rejected tokens."""
    for card, case, rows in measured(runs, "rejected"):
        for name, row in rows.items():
            cells = {"machine": card, "context": kilo(case["S"]), "draft": name}
            cells |= {"rejected tokens": str(row["rejected"]), "mean": f"{row['mean']:.2f}"}
            shares = {f"< {edge}": f"{share:.0%}" for edge, share in row["below"].items()}
            yield Line(cells | shares)


def overlap(runs: Sequence[Run]) -> Iterator[Line]:
    """Vegas, figure 7: keys that two draft tokens both select, by the gap between them."""
    for card, case, rows in measured(runs, "overlap"):
        for row in rows.values():
            cells = {"machine": card, "context": kilo(case["S"]), "selected": str(row["selected"])}
            gaps = range(1, case["gamma"] + 1)
            yield Line(cells | {f"gap {i}": f"{row[f'gap {i}']:.2f}" for i in gaps})


def budgets(runs: Sequence[Run]) -> Iterator[Line]:
    """Vegas, figure 8: accepted draft tokens of a step by the share of the context they read."""

    def cells() -> Iterator[Cell]:
        for card, case, rows in measured(runs, "draft"):
            row = rows.get(REFERENCE)
            if row is not None and "accepted_at" in row and case["sampling"] == "paper":
                accepted = sum(row["accepted_at"]) / sum(row["steps"])
                at = card, kilo(case["S"]), str(case["gamma"])
                yield at, case["percent"], f"{accepted:.2f}"

    return grid(("machine", "context", "gamma"), "{:g} %", cells())


def iterations(runs: Sequence[Run]) -> Iterator[tuple[str, dict[str, Any], Rows]]:
    """The iterations of `REFERENCE` that have a rate."""
    for card, case, rows in measured(runs, "draft"):
        if "tokens_per_s" in rows.get(REFERENCE, {}) and case["exact"] == "no":
            yield card, case, rows


def gammas(runs: Sequence[Run]) -> Iterator[Line]:
    """Vegas, figure 13: tokens a second by gamma and by the share of the context."""
    places: dict[tuple[str, str], dict[tuple[float, int], str]] = {}
    for card, case, rows in iterations(runs):
        row, place = rows[REFERENCE], f"{case['model']}, B={case['B']}, S={kilo(case['S'])}"
        cell = f"{row['tokens_per_s']:,.0f} tok/s ({ms(microseconds(row))} ms)"
        places.setdefault((card, place), {})[case["percent"], case["gamma"]] = cell
    cells = (
        ((*place, f"{percent:g} %"), gamma, cell)
        for place, of_place in places.items()
        if len(of_place) > 1
        for (percent, gamma), cell in sorted(of_place.items())
    )
    return grid(("card", "case", "context read"), "gamma {}", cells)


def batches(runs: Sequence[Run]) -> Iterator[Line]:
    """The speed of Vegas over plain decoding by rows and context."""
    cells = (
        (
            (card, case["model"], kilo(case["S"]), str(case["gamma"])),
            case["B"],
            ratio(rows[REFERENCE]["vs_plain"]),
        )
        for card, case, rows in iterations(runs)
        if PLAIN in rows and case["percent"] == PERCENT
    )
    return grid(("card", "model", "context", "gamma"), "B={}", cells)


def pages(runs: Sequence[Run]) -> Iterator[Line]:
    """Vegas, table 2: attention over a selection by the slots that lie next to each other."""
    sizes = {"shared": 1} | PAGES
    cells = (
        ((card, f"{case['heads']}, H={case['H']}", name), sizes[case["indices"]], us(time.median))
        for card, case, rows in measured(runs, "gathered_attention")
        if case["B"] == 16 and case["S"] == 131072 and case["indices"] in sizes
        for name, row in rows.items()
        if (time := best_clock(row)) is not None
    )
    return grid(("card", "heads", "kernel"), "pages of {}", cells)


def scans(runs: Sequence[Run]) -> Iterator[Line]:
    """Verification, table 1: wall and device time of the scans, medians and 95th percentiles."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for card, case, rows in measured(runs, "acceptance_scan"):
        if card == DEVICE["cpu"] or case["B"] != 32 or not SCANS.keys() <= rows.keys():
            continue
        cells = {}
        for clock, words in (("wall", "call"), ("device", "kernels")):
            for name, heading in SCANS.items():
                if (time := spread(rows[name], clock)) is not None:
                    cells[f"{heading}, {words}"] = f"{number(time.median)} ({number(time.high)})"
        speed = microseconds(rows["cuda_naive"]) / microseconds(rows["cuda"])
        lines[card, case["gamma"], case["alpha"]] = cells | {"ballot over naive": ratio(speed)}
    for at in sorted(lines):
        label = dict(zip(("card", "gamma", "alpha"), map(str, at), strict=True))
        yield Line(label | lines[at])


LINES: Mapping[str, tuple[Callable[[Sequence[Run]], Iterable[Line]], int]] = {
    "score and speed": (score_and_speed, 1),
    "layer": (layer, 4),
    "needles": (needles, 3),
    "parts": (parts, 2),
    "prefill": (prefill, 3),
    "rejected": (rejected, 3),
    "overlap": (overlap, 3),
    "budgets": (budgets, 3),
    "gammas": (gammas, 3),
    "pages": (pages, 3),
    "batches": (batches, 4),
    "scans": (scans, 3),
}


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of the page by name, or that nothing was measured."""
    return {
        name: table(list(lines(runs)), labels) or f"{NOT_MEASURED.capitalize()}.\n"
        for name, (lines, labels) in LINES.items()
    }
