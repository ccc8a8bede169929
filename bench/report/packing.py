"""The sections on packing, alone (F4) and fused with verification (F5)."""

from __future__ import annotations

from typing import Any

from bench import regret
from bench.ceilings import bandwidth
from bench.point import Row, best_clock
from bench.report.ceilings import rates
from bench.report.text import (
    absent,
    choice,
    header,
    names,
    paragraphs,
    pick,
    picture,
    ratio,
    table,
    time,
    values,
)
from bench.table import number

PAPERS = "cuda_single"  # the paper's kernel: one block does everything


def alone(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    data = paper["pack"]
    at = {key: data[key] for key in ("B", "gamma", "alpha")}
    copy = bandwidth(result["ceilings"], "copy")
    everyone = names(result, "pack")
    rows = []
    for l2 in values(result, "pack", "l2"):
        for width, eager, theirs in data["rows"]:
            own = pick(result, "pack", **at, D=width, l2=l2)
            if own:
                cells = [_of_ceiling(own.get(name), copy) for name in everyone]
                paper_cells = (number(eager), number(theirs), ratio(theirs, eager))
                rows.append((l2, str(width), *cells, *paper_cells))
    headings = ("L2", "D", *everyone, "paper, torch", "paper, its kernel", "its loss")
    where = ", ".join(f"{key}={value}" for key, value in at.items())
    return paragraphs(
        header("Packing", result),
        "### F4: packing alone\n",
        f"{where}. Device time, and in brackets the share of the copy ceiling of this run "
        f"({_rate(copy)}; bytes read and written count; a warm L2 can exceed it). The paper's "
        "kernel had one block a sequence, and its wrapper asked the device for the total before "
        "the launch. PyTorch's `kv[mask]` asks for it too, since its result has that shape; "
        "`jspec.pack` leaves it on the device. The paper's figures include such waits, device "
        "time does not.",
        table(headings, rows),
        rates(result["ceilings"]),
        choice(result, "pack"),
        absent(result),
    )


def fused(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    return paragraphs(
        header("Verification fused with packing", result),
        "### F5: fusing the two steps\n",
        "*Best two-step* is the fastest pipeline of a backend of verification and one of packing "
        "in one jitted program, whichever they are, or of those that end in PyTorch's masked "
        f"gather. `{PAPERS}` is the paper's kernel of one block.",
        _paper_points(result, paper),
        picture(pictures, "fused-crossover", "fused and two-step time against the width of a row"),
        "### Over the whole grid\n",
        _grid(result),
        choice(result, "verify_and_pack"),
        _over_pipelines(result),
        rates(result["ceilings"]),
        absent(result),
    )


def _paper_points(result: dict[str, Any], paper: dict[str, Any]) -> str:
    data = paper["fused"]
    rows = []
    for line in data["rows"]:
        theirs = dict(zip(data["columns"], line, strict=True))
        at = {key: theirs[key] for key in ("B", "gamma", "D", "alpha")}
        own = pick(result, "verify_and_pack", **at, l2="warm")
        if own:
            chosen, two, papers = _chosen(own), _two_step(own), own.get(PAPERS)
            mixed = own.get("cuda+torch")
            rows.append(
                (
                    *(str(value) for value in at.values()),
                    *(_time(row) for row in (chosen, two, papers, mixed)),
                    _gain(two, chosen),
                    _gain(mixed, chosen),
                    number(theirs["cuda+torch"]),
                    number(theirs["cuda_single"]),
                    ratio(theirs["cuda+torch"], theirs["cuda_single"]),
                )
            )
    headings = (
        *("B", "gamma", "D", "alpha", "fused", "best two-step", PAPERS, "cuda+torch"),
        *("two-step over fused", "cuda+torch over fused"),
        *("paper, two-step", "paper, fused", "its gain"),
    )
    return "Device time, warm L2.\n\n" + table(headings, rows, left=0)


def _grid(result: dict[str, Any]) -> str:
    copy = bandwidth(result["ceilings"], "copy")
    rows = []
    for case, own_rows in regret.points(result["rows"], "verify_and_pack"):
        own = {row["name"]: row for row in own_rows}
        chosen, two = _chosen(own), _two_step(own)
        if case["alpha"] == 0.9 and case["l2"] == "cold" and chosen is not None:
            cells = [str(case[key]) for key in ("B", "gamma", "D")]
            two_name = "" if two is None else two["name"]
            rows.append(
                (
                    *cells,
                    chosen["name"],
                    _of_ceiling(chosen, copy),
                    two_name,
                    _of_ceiling(two, copy),
                    _gain(two, chosen),
                )
            )
    if not rows:
        return ""
    headings = ("B", "gamma", "D", "fused", "", "best two-step", "", "two-step over fused")
    words = (
        f"Alpha 0.9, cold L2; in brackets the share of this run's copy ceiling ({_rate(copy)}).\n\n"
    )
    return words + table(headings, rows, left=0)


def _over_pipelines(result: dict[str, Any]) -> str:
    found = regret.of_fusion(result["rows"])
    return "" if found is None else f"Fused against the best two-step pipeline: {found}."


def _chosen(rows: dict[str, Row]) -> Row | None:
    return next((row for row in rows.values() if row.get("chosen")), None)


def _two_step(rows: dict[str, Row]) -> Row | None:
    pipelines = [row for row in rows.values() if regret.is_pipeline(row)]
    return min(pipelines, key=_microseconds, default=None)


def _microseconds(row: Row) -> float:
    found = best_clock(row)
    return float("inf") if found is None else found.median


def _time(row: Row | None) -> str:
    return "" if row is None else time(best_clock(row))


def _gain(slow: Row | None, fast: Row | None) -> str:
    if slow is None or fast is None:
        return ""
    return ratio(_microseconds(slow), _microseconds(fast))


def _of_ceiling(row: Row | None, ceiling: float | None) -> str:
    if row is None:
        return ""
    share = row["bytes"] / _microseconds(row) * 1e6 / ceiling if ceiling else 0
    return _time(row) + (f" ({share:.0%})" if share >= 0.005 else "")


def _rate(ceiling: float | None) -> str:
    return "not measured" if ceiling is None else f"{ceiling / 1e9:,.0f} GB/s"
