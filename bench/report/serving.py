"""The section on the engine under load."""

from __future__ import annotations

from typing import Any

from bench import profiles, serving
from bench.report.text import absent, header, paragraphs, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Tokens a second and the time of a token, by mix, load and drafter."""
    rows = serving.timed(result["rows"])
    lines = [(*serving.case_cells(row), *serving.cells(row, rows)) for row in rows]
    foot = f"{serving.FOOT[0].upper()}{serving.FOOT[1:]}."
    return paragraphs(
        header("Serving", result),
        "Continuous batching by `jspec.Engine`, greedy, with requests of ragged lengths, on "
        f"average *S* prompt and *new* tokens; {serving.CHECKED} of each case were compared with "
        "what they give alone. The bundled model answers real texts; **other models have random "
        f"weights and an acceptance that is imposed**, the paper's ({profiles.SOURCE}). {foot}",
        table((*serving.CASE, *serving.HEADINGS), lines, left=2),
        absent(result),
    )
