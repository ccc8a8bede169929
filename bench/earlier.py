"""Results of earlier versions, with the names that today's suites give to the same fields.

Stored results stay as the bench wrote them; their rows are renamed where they are read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.drafters import DEFAULT_BACKENDS

Row = dict[str, Any]
MEMORY = ("weight_bytes", "cache_bytes", "temp_bytes", "peak_bytes")
FIRST_AND_BONUS = "Vegas (first + bonus token, logits)"
SERVED = (
    *("seconds", "tokens_per_s", "requests_per_s", "full_tokens_per_s", "token_s"),
    *("first_token_s", "mean_accepted_length", "prefill_s", "decode_s", "compilations"),
)
CHECK = ("rows", "identical_rows", "flip_margins")

# Options of cases that name backends, by operation: earlier rows are of the measured orders.
BY_BACKEND = {"real": "backends", "step": "backends", "attend": "kernel"}

# Operations over a cache that was always of bfloat16.
OVER_CACHE = ("attention", "gathered_attention", "scored_attention", "mean_weights")


def as_today(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result, whose rows have today's names; ratios of its figures are added.

    Args:
        result: of any version. Rows of today's suites stay as they are.
    """
    suite, rows = result["suite"], result["rows"]
    if suite in WHOLE and rows and WHOLE[suite][0](rows[0]):
        rows = WHOLE[suite][1](rows)
    return {**result, "rows": [_as_today(suite, row) for row in rows]}


def _as_today(suite: str, row: Row) -> Row:
    operation, case = row.get("operation"), row.get("case") or {}
    if case.get("exact") == "yes":
        return _as_today(suite, row | {"case": case | {"exact": "bits"}})
    if operation == "decode_step":
        return _decode_step(row, reads=suite == "hata-e2e")
    if operation == "iteration":
        return _iteration(row)
    if (option := BY_BACKEND.get(str(operation))) and option not in case:
        return row | {"case": case | {option: DEFAULT_BACKENDS}}
    if operation in OVER_CACHE and suite in ("attention", "gather") and "cache" not in case:
        sizes = {"sizes": row["sizes"] | {"bits": 16}} if row.get("sizes") else {}
        return row | {"case": case | {"cache": "bfloat16"}} | sizes
    if operation == "bundled":
        return _renamed(row, tokens_per_iteration="tokens")
    if suite == "hata-off" and "context" in case:
        return _offloaded(row)
    if suite == "parity" and "mode" in row:
        return _parity(row)
    if suite == "ruler" and "kind" in case:
        kind = {"operation": case["kind"], "case": _without(case, "kind")}
        return kind | _renamed(_without(row, *kind), mean_accepted_length="length")
    if suite == "step" and "source" in row:
        return _generated(row)
    if suite in ("gather", "hash", "helix-attention") and "part" in case:
        alone = {"operation": "read_alone"} if case["part"] == "read" else {}
        alone = alone if suite == "helix-attention" else {}
        return row | {"case": _without(case, "part")} | alone
    if suite == "collectives" and "P" in case:
        return row | {"operation": "message"}
    if suite == "hata-layer" and operation == "attention":
        return row | {"operation": "hata_layer"} | ({"chosen": False} if "chosen" in row else {})
    return row


def _decode_step(row: Row, *, reads: bool) -> Row:
    """``reads``: whether steps of a policy were compared, not backends of attention."""
    case = _renamed(row["case"], context="S")
    policy = case.pop("policy", "dense" if reads else "plain")
    if reads:
        case.pop("T", None)
    new = {"operation": "read" if reads else "pass", "case": case, "name": policy}
    rest = _without(row, *new, "floor_ns")
    new["checked"] = rest.pop("checked")
    new |= {"settings": {"attention": row["name"]}, "floors_ns": {"verification": row["floor_ns"]}}
    return _with_memory(_with_floor(new | rest))


def _iteration(row: Row) -> Row:
    is_exact = row["name"].endswith("-exact")
    case = _without(row["case"], "draft") | {"percent": 7, "exact": "bits" if is_exact else "no"}
    new = {"operation": "draft", "case": case, "name": row["name"].removesuffix("-exact")}
    rest = _renamed(_without(row, *new), tokens_per_iteration="tokens")
    if "setting" in rest:
        rest["settings"] = {"draft": rest.pop("setting")}
    return _with_memory(_with_floor(new | rest))


def _offloaded(row: Row) -> Row:
    row = row | {"case": _renamed(row["case"], context="S")}
    if row["operation"] != "decode":
        return row
    memory = {"cache_bytes": row.pop("device_bytes"), "host_bytes": row.pop("host_bytes")}
    return row | {"operation": "read", "memory": memory}


def _accepted(rows: Sequence[Row]) -> list[Row]:
    """Accepted lengths of variants of Vegas, and how far each is over the first one's."""
    base = {str(x["case"]): np.array(x["per_text"]) for x in rows if x["name"] == FIRST_AND_BONUS}
    return [_accepted_length(row, base.get(str(row["case"]))) for row in rows]


def _accepted_length(row: Row, base: np.ndarray | None) -> Row:
    case: Row = {}
    for key, value in row["case"].items():
        if key == "ratio":
            percent = round(100 * value, 6)
            case["percent"] = int(percent) if percent == int(percent) else percent
        elif key == "temperature":
            case["sampling"] = "greedy" if value == 0 else f"t{value:g}"
        else:
            case["S" if key == "context" else key] = value
    operation = "variant" if row["name"].startswith("Vegas,") else "draft"
    new = {"operation": operation, "case": case, "name": row["name"]}
    rest = _without(row, *new, "draft")
    new |= {"settings": {"draft": row["draft"]}, "length": row["committed"] / row["steps"]}
    if base is not None and row["name"] != FIRST_AND_BONUS:
        over = np.array(row["per_text"]) - base
        new["over vegas-first"] = float(over.mean())
        if len(over) > 1:
            new["standard error"] = float(over.std(ddof=1) / len(over) ** 0.5)
    return new | rest


def _parity(row: Row) -> Row:
    case = _without(row["case"], "draft") | {"exact": "bits" if row["mode"] == "exact" else "no"}
    operation = "draft" if row["kind"] == "decode" else "forced"
    new = {"operation": operation, "case": case, "name": row["case"]["draft"] or "none"}
    rest = _without(row, "case", "mode", "kind")
    return new | _renamed(rest, margins="flip_margins", mean_accepted_length="length")


def _served(rows: Sequence[Row]) -> list[Row]:
    """The engine's loads, and their speeds over plain decoding's."""
    plain = {str(row["case"]): row["tokens_per_s"] for row in rows if row["name"] == "none"}
    return [_served_load(row, plain.get(str(row["case"]))) for row in rows]


def _served_load(row: Row, plain: float | None) -> Row:
    case = _without(row["case"], "layers")
    new = {"operation": "serving", "case": case, "name": row["name"]}
    new["settings"] = {"draft": row["setting"], "dtype": row["dtype"]}
    new |= {"tokens_per_s": row["tokens_per_s"], "length": row["mean_accepted_length"]}
    for name in ("token", "first_token"):
        if row[f"{name}_s"]:
            new[f"{name}_ms"] = 1e3 * statistics.median(row[f"{name}_s"])
    new["served"] = {name: row[name] for name in SERVED}
    if "step_s" in row:
        if row["full_tokens_per_s"] is not None:
            alone = case["B"] * row["mean_accepted_length"] / row["step_s"]
            new["of_steps"] = row["full_tokens_per_s"] / alone
        new["step"] = {"seconds": row["step_s"]}
    new["checked"] = row["checked"]
    new["check"] = {name: row[name] for name in CHECK if name in row}
    return new if plain is None else new | {"vs_plain": row["tokens_per_s"] / plain}


def _generated(row: Row) -> Row:
    case = {"model": "bundled", "B": row["batch"], "S": row["context"], "gamma": row["gamma"]}
    rest = _renamed(
        _without(row, "source", "gamma", "batch", "context"),
        speedup="vs_plain",
        decode_tokens_per_s="tokens_per_s",
        mean_accepted_length="length",
    )
    return {"operation": "generate", "case": case, "name": row["source"]} | rest


def _with_floor(row: Row) -> Row:
    if "step_ns" not in row:
        return row
    over_floor = statistics.median(row["step_ns"]) / sum(row["floors_ns"].values())
    return row | {"over_floor": over_floor}


def _with_memory(row: Row) -> Row:
    memory = {name: row[name] for name in row if name in MEMORY}
    return _without(row, *MEMORY) | ({"memory": memory} if memory else {})


def _renamed(row: Row, **names: str) -> Row:
    return {names.get(name, name): value for name, value in row.items()}


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


# By suite: whether a row is of an earlier version, and what renames all rows together.
WHOLE: dict[str, tuple[Callable[[Row], bool], Callable[[Sequence[Row]], list[Row]]]] = {
    "vegas-accept": (lambda row: "per_text" in row and "settings" not in row, _accepted),
    "serving": (lambda row: "setting" in row, _served),
}
