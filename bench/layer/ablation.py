"""What makes a layer of HATA fast: its kernels one by one, its budget, and the bits of its codes.

After figures 7 to 9 of HATA (arXiv 2506.02572), which show quality by budget and bits; here
it is time. Stage by stage, the operations of a layer use their best backends instead of XLA's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

from bench import ceilings, layer, point
from bench.cases import Case
from bench.layer import tables
from bench.layer.workload import policies
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import cell, times
from jspec.dispatch import Backends

DEFAULT: Case = {**layer.DEFAULT, "B": 1, "S": 131072}
SHARES = (256, 128, 64, 32)  # one slot in so many is selected
BITS = (32, 64, 128, 256)
COMPARED = ("hata", "quest_32", "loki")
SCORES = {"hamming_scores": "xla", "hash_select": "xla"}
SORT = {"select": "xla", "hash_select": "two_steps"}
ENCODE = {"hash_encode": "xla", "rotate_and_append": "xla", "rotate_append_encode": "xla"}
GATHER = {"gathered_attention": "xla"}
ONE_BY_ONE = {"hash_attention": "one_by_one"}
# Each stage uses the best backend for one more part than the stage before: scores, scores with
# selection, attention that reads the selection in place, and encoding with the cache update. The
# last stage runs all of them as one operation.
STAGES = {
    "plain": Backends(SORT | SCORES | GATHER | ENCODE),
    "score": Backends(SORT | GATHER | ENCODE),
    "select": Backends(GATHER | ENCODE),
    "fused_attention": Backends(ENCODE),
    "encode": Backends(ONE_BY_ONE),
    "one_operation": Backends(),
}
TITLES = {
    "hata_parts": "the parts of a layer, one by one",
    "hata_budget": "selected slots",
    "hata_bits": "bits of a code",
}
HEADINGS = ("B", "S", "heads", "n", "R", "name", "time", "p10-p90", "kernels", "MB", "of floor")


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    return layer.case(text, DEFAULT)


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or the suite's defaults."""
    default = "B=1" if jax.default_backend() == "gpu" else "S=8K,heads=8/8"
    return [case(text) for text in settings.cases or (default,)]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("hata-ablation", len(grid(settings))) as advance:
        for case in grid(settings):
            stages = dict.fromkeys(STAGES, policies(case)["hata"])
            yield from layer.measured("hata_parts", case, stages, settings, STAGES)
            for share in () if settings.quick else SHARES:
                yield from _some("hata_budget", {**case, "n": case["S"] // share}, settings)
            for bits in () if settings.quick else BITS:
                yield from _some("hata_bits", {**case, "R": bits}, settings, ("hata",))
            advance()


def _some(
    operation: str, case: Case, settings: Settings, names: tuple[str, ...] = COMPARED
) -> Iterator[point.Row]:
    """The rows of some policies; a reason if the budget is too small for what they always read."""
    try:
        by_name = policies(case)
    except ValueError as error:
        yield point.row(operation, case, names[0], checked=None, reason=str(error))
        return
    yield from layer.measured(operation, case, {name: by_name[name] for name in names}, settings)


def parts(result: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, headings and lines of each part that has times."""
    floor = tables.floor_of(result)
    for operation, title in TITLES.items():
        rows = [row for row in result["rows"] if row["operation"] == operation]
        rows = [row for row in rows if point.best_clock(row) is not None]
        cells = [[*_case(row), *tables.cells(row, floor)] for row in rows]
        if operation != "hata_parts":
            yield title, HEADINGS, cells
            continue
        plain = {_where(row): tables.time_of(row).median for row in rows if row["name"] == "plain"}
        for line, row in zip(cells, rows, strict=True):
            whole = plain.get(_where(row))
            line.append("" if whole is None else times(whole / tables.time_of(row).median))
        yield title, (*HEADINGS, "vs plain"), cells


def stages(rows: Sequence[point.Row]) -> dict[str, float]:
    """Microseconds of each stage of the first case that has them."""
    timed = [row for row in rows if row["operation"] == "hata_parts" and point.best_clock(row)]
    return {
        row["name"]: tables.time_of(row).median for row in timed if _where(row) == _where(timed[0])
    }


def series(
    rows: Sequence[point.Row], operation: str, key: str
) -> dict[str, list[tuple[int, float]]]:
    """Microseconds of each policy against a part of the case, where there are several."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["operation"] == operation and point.best_clock(row):
            at = row["case"][key], tables.time_of(row).median
            by_name.setdefault(row["name"], []).append(at)
    return {name: sorted(line) for name, line in by_name.items() if len(line) > 1}


def _case(row: point.Row) -> list[str]:
    return [*(cell(key, row["case"][key]) for key in HEADINGS[:5]), row["name"]]


def _where(row: point.Row) -> tuple[Any, ...]:
    return tuple(row["case"].items())


def show(result: dict[str, Any]) -> None:
    """A table of each part."""
    screen, floor = console(), tables.floor_of(result)
    for title, headings, lines in parts(result):
        table = Table(title=f"{title}; times in microseconds", title_justify="left")
        table.box, table.padding = None, (0, 1, 0, 0)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "name" else "right")
        for line in lines:
            table.add_row(*line)
        screen.print(table)
    screen.print(f"of floor: {floor}", markup=False)
    tables.show_reasons(screen, result)


SUITE = Suite(
    "hata-ablation",
    "a layer of HATA: its kernels one by one, its budget, the bits of its codes",
    run,
    show,
    rivals=tuple(dict.fromkeys((*STAGES, *COMPARED))),
    case=case,
)
