"""Where an iteration's time goes, drafter by drafter, against the least time of each part.

Figures 3 and 10b of Yue et al. 2026. True shapes of real models; weights, keys and values are
random. Clock: *iteration* is the marginal wall time of a jitted chunk of iterations in a sequence
of chunks, divided by its iterations; *parts* are times of kernels, by CUPTI.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from bench.decode import drafting, phases
from bench.decode.drafting import CASE, GUIDED, RATIO, before_cells, case, case_cells
from bench.decode.iterations import Drafting
from bench.decode.shapes import Ceilings
from bench.decode.tables import compare, ms
from bench.point import Row, spread
from bench.settings import Settings, console
from bench.suite import Suite
from jspec.cli.compile_cache import keep_programs

ALONE = "verification"
DRAFTS = {
    "vegas": GUIDED,
    "streaming": f"streaming:window={RATIO}",
    "quest": f"quest:budget={RATIO},dense_layers=0",
    "specextend": f"specextend:budget={RATIO}",
}
NAMES = ("plain", ALONE, *DRAFTS)
DEFAULT_CASES = (
    "B=4,S=120K",
    "model=gpt-oss-20b-attention,B=20,S=120K,gamma=7",
    "B=64,S=8K,gamma=6",
)
FOOT = (
    "iteration: a draft of gamma tokens and its verification, of all rows, the median; "
    "verification: the same pass alone, which collects nothing; plain: a step of one token. "
    "parts: time of kernels, and how many times the floor of the part that is. floor: bytes that "
    "the part must read, at the read ceiling of this run, {ceiling:,.0f} GB/s, or its products "
    "with the weights at the matrix ceiling where these take longer. collection: what attention "
    "takes beyond the pass alone, and what makes its queries. selecting: collection, selection "
    "and compaction over the rest of the iteration. idle: 1 - time of kernels over the iteration"
)


def draftings(gamma: int, settings: Settings) -> list[Drafting]:
    """The iterations of a case."""
    every = [Drafting("plain", "none", 0), Drafting(ALONE, "none", gamma)]
    every += [Drafting(name, text, gamma) for name, text in DRAFTS.items()]
    return [drafter for drafter in every if settings.wants(drafter.name)]


def run(settings: Settings) -> dict[str, Any]:
    """Every drafter of every case."""
    keep_programs()
    limits = drafting.ceilings()
    return {
        "read_ceiling_bytes_per_s": limits.read,
        "weights": "random",
        "rows": _rows(settings, limits),
    }


def _rows(settings: Settings, limits: Ceilings) -> Iterator[Row]:
    for chosen_case in drafting.grid(settings, DEFAULT_CASES):
        yield from drafting.rows(
            chosen_case, draftings(chosen_case["gamma"], settings), settings, limits
        )


def parts_of(row: Row, rows: list[Row]) -> dict[str, float]:
    """Nanoseconds of each part of an iteration, with collection inside attention as its own part.

    Empty if its kernels, or those of the verification alone, were not recorded.
    """
    pass_alone = row["case"] | {"draft": ALONE}
    alone = [x for x in rows if x["case"] == pass_alone and "parts_ns" in x]
    if "parts_ns" not in row or not (alone or row["name"] in ("plain", ALONE)):
        return {}
    kinds = row["parts_ns"]
    parts = {part: float(sum(kinds[part].values())) for part in phases.PARTS}
    if parts["collection"] and alone:
        inside = kinds["verification"]["attention"]
        more = inside - alone[0]["parts_ns"]["verification"]["attention"]
        parts["collection"] += more
        parts["verification"] -= more
    return parts


def overhead(row: Row, parts: dict[str, float]) -> float | None:
    """The time of selecting over the rest of the iteration, as in figure 10b of the paper."""
    time = spread(row, "step")
    if time is None or not parts or row["name"] in ("plain", ALONE):
        return None
    selecting = sum(parts[part] for part in ("collection", "selection", "compaction"))
    return selecting / (time.median * 1e3 - selecting)


HEADINGS = ("draft", "gamma", "iteration", "floor", "/floor", "idle", "selecting")


def cells(row: Row, rows: list[Row]) -> tuple[str, ...]:
    """A row with times under `HEADINGS`."""
    time, floor = spread(row, "step"), sum(row["floors_ns"].values()) / 1e3
    assert time is not None
    share = overhead(row, parts_of(row, rows))
    return (
        row["name"],
        str(row["case"]["gamma"]),
        ms(time.median),
        ms(floor),
        f"{time.median / floor:.2f}",
        f"{row['idle']:.1%}" if "idle" in row else "",
        "" if share is None else f"{share:.1%}",
    )


PART_HEADINGS = ("draft", *phases.PARTS)


def by_case(rows: list[Row]) -> dict[str, list[tuple[str, ...]]]:
    """The parts of the rows whose kernels are known, under `PART_HEADINGS`, case by case."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        parts = parts_of(row, rows)
        if parts:
            model, layers, batch, context = case_cells(row)
            where = f"{model}, {layers} layers, B={batch}, S={context}"
            tables.setdefault(where, []).append(
                (row["name"], *_part_cells(parts, row["floors_ns"]))
            )
    return tables


def _part_cells(parts: dict[str, float], floors: dict[str, float]) -> list[str]:
    """Each part's time, and its ratio to the floor."""
    cells = []
    for part, ns in parts.items():
        over = f" ({ns / floors[part]:.1f}x)" if part in floors and ns else ""
        cells.append(f"{ms(ns / 1e3)}{over}" if ns else "")
    return cells


def show(result: dict[str, Any]) -> None:
    """Print iterations and their parts; rows without times as their reason."""
    screen, rows = console(), result["rows"]
    title = f"{result['machine']['device']}; random weights; times in milliseconds"
    compared = ("vs before",) if any("ratio" in row for row in rows) else ()
    times = _table(title, (*CASE, *HEADINGS, *compared))
    for row in rows:
        if "step_ns" in row:
            times.add_row(*case_cells(row), *cells(row, rows), *before_cells(row, rows))
    if times.row_count:
        screen.print(times)
    for where, lines in by_case(rows).items():
        parts = _table(f"parts: {where} (x: times their floor)", PART_HEADINGS)
        for line in lines:
            parts.add_row(*line)
        screen.print(parts)
    screen.print(FOOT.format(ceiling=result["read_ceiling_bytes_per_s"] / 1e9), markup=False)
    for reason in dict.fromkeys(f"{x['name']}: {x['reason']}" for x in rows if x.get("reason")):
        screen.print(reason, markup=False)
    for clock, reason in result.get("clocks", {}).items():
        screen.print(f"no {clock} clock: {reason}", markup=False)


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None)
    for heading in headings:
        words = heading in ("model", "draft")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    return table


SUITE = Suite(
    "vegas-breakdown",
    "where the time of an iteration goes at real models' shapes, drafter by drafter",
    run,
    show,
    rivals=NAMES,
    compare=compare,
    case=case,
)
