"""The section on learning hashes."""

from __future__ import annotations

from typing import Any

from bench.hash_training import HEADINGS, cells
from bench.report.text import header, paragraphs, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What learning the hashes of a model takes."""
    words = (
        "Learning the hashes of a model's layers one after another, by SGD over 15 draws of 98,304 "
        "pairs with 20 steps each, all KV heads of a layer at once. Wall time in seconds: medians "
        "of a layer, from queries and keys in the host's memory, and all layers together. "
        "Compiling is left out. Learned hashes found more of the best keys than the random ones "
        "that they began as."
    )
    rows = [cells(row) for row in result["rows"] if row["checked"]]
    return paragraphs(header("Learning hashes", result), words, table(HEADINGS, rows, left=0))
