"""The sections on several devices: their messages, and attention that they share."""

from __future__ import annotations

from typing import Any

from bench import helix_step, hopb
from bench.cases import kilo
from bench.point import spread
from bench.report.text import header, paragraphs, table
from bench.table import number

NOTE = "*step*: marginal time inside a jitted loop, microseconds, the median of samples."


def messages(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    headings = ("collective", "devices", "bytes of each", "step", "p10-p90")
    rows = [
        (own["operation"], str(own["case"]["P"]), kilo(own["case"]["bytes"]), *_times(own))
        for own in result["rows"]
    ]
    return paragraphs(header("Collectives", result), NOTE, table(headings, rows))


def attention(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    headings = ("B", "S", "heads", "latent", "T", "strategy", "KVP", "TPA")
    headings += ("step", "p10-p90", "GB/s", "of one")
    alone = {_shape(own): _median(own) for own in result["rows"] if _is_alone(own)}
    rows = []
    for own in result["rows"]:
        one, time = alone.get(_shape(own)), _median(own)
        share = f"{time / one:.2f}" if one and time and not _is_alone(own) else ""
        rows.append((*_case(own), *_times(own), _rate(own), share))
    return paragraphs(
        header("Attention of a layer by several devices", result),
        f"{NOTE} *GB/s*: keys and values that a device reads, over that time; the exchange is in "
        "it, but for what is *read alone*. *of one*: over the time of one device that has all of "
        "the cache, which two share at 0.5.",
        table(headings, rows),
    )


def overlap(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    rows = [(*hopb.place(own), *hopb.cells(own)) for own in result["rows"]]
    return paragraphs(
        header("The exchange of a layer in chunks", result),
        f"{NOTE} *exposed*: the step above that of the attention alone; *of message*: that over "
        "the time of the message alone.",
        table(hopb.HEADINGS, rows),
    )


def steps(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    return paragraphs(
        header("Whole steps by several devices", result),
        helix_step.FOOT,
        table(helix_step.HEADINGS, [helix_step.cells(own) for own in result["rows"]]),
    )


def _case(own: dict[str, Any]) -> tuple[str, ...]:
    case = own["case"]
    latent = str(case.get("latent") or "")
    shape = str(case["B"]), kilo(case["S"]), case["heads"], latent, str(case["T"])
    return (*shape, own["name"], str(case["kvp"]), str(case["tpa"]))


def _shape(own: dict[str, Any]) -> tuple[Any, ...]:
    """What of a case says nothing of the devices."""
    return tuple(own["case"].get(key) for key in ("B", "S", "heads", "H", "T", "latent"))


def _is_alone(own: dict[str, Any]) -> bool:
    return own["case"]["kvp"] == own["case"]["tpa"] == 1


def _median(own: dict[str, Any]) -> float | None:
    found = spread(own, "step")
    return None if found is None else found.median


def _times(own: dict[str, Any]) -> tuple[str, str]:
    """The median and its spread; why there is none where the row was not timed."""
    found = spread(own, "step")
    if found is None:
        return own.get("reason") or "not timed", ""
    return number(found.median), f"{number(found.low)}-{number(found.high)}"


def _rate(own: dict[str, Any]) -> str:
    found = spread(own, "step")
    return "" if found is None else number(own["bytes"] / found.median / 1e3)
