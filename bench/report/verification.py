"""The section on greedy verification: the paper's findings F1 to F3, and batches beyond it."""

from __future__ import annotations

from typing import Any

from bench.point import spread
from bench.report.text import (
    absent,
    choice,
    header,
    loops,
    median,
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

OPERATION = "verify_greedy"
BALLOT, NAIVE, EAGER = "cuda", "cuda_naive", "torch"


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    batch = paper["verify"]["B"]
    return paragraphs(
        header("Greedy verification", result),
        f"The workload is the verification paper's: lengths from Binomial(gamma, alpha), a "
        f"vocabulary of 4096, constructed targets. Paper: {paper['source']}; {paper['device']}, "
        f"{paper['clock']}. `{BALLOT}` is its ballot kernel, `{NAIVE}` its naive one, `{EAGER}` "
        "its eager baseline.",
        _first(result, paper, batch),
        picture(pictures, "verify-gamma", "latency against gamma"),
        _second(result, paper, batch),
        picture(pictures, "verify-alpha", "sensitivity to alpha"),
        _third(result, paper, batch),
        picture(pictures, "verify-ablation", "the point of largest divergence"),
        picture(pictures, "verify-speedup", "the ballot kernel over the naive one"),
        _beyond(result),
        loops(
            result,
            ("B", "gamma"),
            "At alpha 0.6. Each step is a verification whose draft lengths are the accepted counts "
            "of the one before; XLA moves out of the loop what of its own code does not depend on "
            "them.",
        ),
        choice(result, OPERATION),
        absent(result),
    )


def _paper(paper: dict[str, Any], gamma: int, alpha: float) -> dict[str, float]:
    columns = paper["verify"]["columns"]
    rows = (dict(zip(columns, row, strict=True)) for row in paper["verify"]["rows"])
    return next((r for r in rows if (r["gamma"], r["alpha"]) == (gamma, alpha)), {})


def _first(result: dict[str, Any], paper: dict[str, Any], batch: int) -> str:
    gamma, alpha = 8, 0.9
    own = pick(result, OPERATION, B=batch, gamma=gamma, alpha=alpha)
    if not own:
        return ""
    theirs = _paper(paper, gamma, alpha)
    eager = spread(own[EAGER], "wall") if EAGER in own else None
    rows = []
    for name, row in own.items():
        wall = spread(row, "wall")
        over = ratio(eager and eager.median, wall and wall.median)
        paper_time = number(theirs[name]) if name in theirs else ""
        paper_over = ratio(theirs[EAGER], theirs[name]) if name in theirs else ""
        device = time(spread(row, "device"), spread=True)
        kernels = str(row.get("kernels", ""))
        rows.append((name, device, kernels, time(wall), over, paper_time, paper_over))
    headings = (
        *("", "device", "kernels", "wall", "eager's wall over it"),
        *("paper", "paper's eager over it"),
    )
    return (
        f"### F1: at gamma {gamma}, what counts is the number of launches\n\n"
        f"B={batch}, alpha={alpha}.\n\n" + table(headings, rows)
    )


def _second(result: dict[str, Any], paper: dict[str, Any], batch: int) -> str:
    low, high = 0.3, 0.9
    everyone = names(result, OPERATION)
    rows = []
    for gamma in values(result, OPERATION, "gamma"):
        ends = [pick(result, OPERATION, B=batch, gamma=gamma, alpha=a) for a in (low, high)]
        cells = [_slope(*(median(end, name) for end in ends)) for name in everyone]
        theirs = [_paper(paper, gamma, a) for a in (low, high)]
        cells += [_slope(*(end.get(n) for end in theirs)) for n in (NAIVE, BALLOT)]
        if any(cells):
            rows.append((str(gamma), *cells))
    headings = ("gamma", *everyone, "paper, naive", "paper, ballot")
    return (
        "### F2: divergence shows in long drafts\n\n"
        f"Time at alpha={high} less that at alpha={low}, B={batch}, in microseconds and in percent "
        f"of the latter: what the length of the longest scan costs.\n\n"
        + table(headings, rows, left=0)
    )


def _slope(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{high - low:+.2f} ({high / low - 1:+.0%})"


def _third(result: dict[str, Any], paper: dict[str, Any], batch: int) -> str:
    everyone = names(result, OPERATION)
    rows = []
    for gamma in values(result, OPERATION, "gamma"):
        for alpha in values(result, OPERATION, "alpha"):
            own = pick(result, OPERATION, B=batch, gamma=gamma, alpha=alpha)
            theirs = _paper(paper, gamma, alpha)
            cells = [number(m) if (m := median(own, n)) is not None else "" for n in everyone]
            gain = ratio(median(own, NAIVE), median(own, BALLOT))
            paper_gain = ratio(theirs.get(NAIVE), theirs.get(BALLOT))
            if any(cells):
                rows.append((str(gamma), str(alpha), *cells, gain, paper_gain))
    device = paper["ballot_kernel"]
    at = {key: device[key] for key in ("B", "gamma", "alpha")}
    kernel = pick(result, OPERATION, **at)
    ours = median(kernel, BALLOT)
    compared = "" if ours is None else f"; here {number(ours)}"
    headings = ("gamma", "alpha", *everyone, "naive over ballot", "paper's, wall")
    return (
        "### F3: a ballot takes the divergence away\n\n"
        f"Device time at B={batch} (wall time where there is no device clock). The ballot kernel "
        f"alone took the paper {number(device['cuda'])} ({device['clock']}) at gamma="
        f"{at['gamma']}, alpha={at['alpha']}{compared}.\n\n" + table(headings, rows, left=0)
    )


def _beyond(result: dict[str, Any]) -> str:
    everyone = names(result, OPERATION)
    rows = []
    for batch in values(result, OPERATION, "B"):
        for gamma in (8, 128):
            own = pick(result, OPERATION, B=batch, gamma=gamma, alpha=0.9)
            cells = [number(m) if (m := median(own, n)) is not None else "" for n in everyone]
            if any(cells):
                rows.append((str(batch), str(gamma), *cells))
    return "### Other batches\n\nAt alpha=0.9.\n\n" + table(("B", "gamma", *everyone), rows, left=0)
