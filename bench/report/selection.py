"""The sections on hash codes and on selection."""

from __future__ import annotations

from typing import Any

from bench import hash as hashing
from bench import select
from bench.report.attention import shares
from bench.report.ceilings import rates
from bench.report.text import absent, choice, header, paragraphs

COLD = (
    "Device time, each call behind 128 MiB of other data (wall time where there is no device "
    "clock); in brackets the share of the read ceiling of this run. *MB* counts "
)


def codes(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    floor, columns = hashing.floor(result), hashing.COLUMNS[:-1]
    parts = []
    titles = ("Encoding", "Codes of new keys", "Scores", "Scores and their selection", "Collisions")
    measured = {row["operation"] for row in result["rows"]}
    for operation, title in zip(hashing.SUITE.operations, titles, strict=True):
        if operation.name not in measured:  # before the suite had it
            continue
        found = shares(result, operation.name, columns, floor)
        parts += [f"### {title}\n", found, choice(result, operation.name)]
    return paragraphs(
        header("Hash codes", result),
        f"{COLD}the bytes {floor.bytes}.",
        *parts,
        rates(result["ceilings"]),
        absent(result),
    )


def scores(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    floor = select.floor(result)
    return paragraphs(
        header("Selection", result),
        f"{COLD}{floor.bytes}. PyTorch, FlashInfer and CUB do not sort what they select; `torch`, "
        "`cub` and `cub_rows` may take any of equal scores.",
        shares(result, "select", select.COLUMNS, floor),
        choice(result, "select"),
        rates(result["ceilings"]),
        absent(result),
    )
