"""The sections on iterations at real models' shapes: where their time goes, and tokens a second."""

from __future__ import annotations

from typing import Any

from bench import breakdown
from bench.decode.drafting import CASE, case_cells
from bench.report.text import absent, header, paragraphs, picture, table


def parts(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Where the time of an iteration goes, against the floor of each part."""
    rows = result["rows"]
    timed = [row for row in rows if "step_ns" in row]
    lines = [(*case_cells(row), *breakdown.cells(row, rows)) for row in timed]
    ceiling = result["read_ceiling_bytes_per_s"] / 1e9
    own = [
        f"### {case}\n\n{table(breakdown.PART_HEADINGS, lines)}"
        for case, lines in breakdown.by_case(rows).items()
    ]
    return paragraphs(
        header("Where the time of an iteration goes", result),
        "True shapes; **random weights**, keys and values in bfloat16. In milliseconds. "
        f"{breakdown.FOOT.format(ceiling=ceiling)}. Before it was timed, each iteration was "
        "compared on two layers with XLA's version of every operation: the logits of draft and "
        "verification, and what was picked. Yue et al. 2026 (figure 10b, H100, AIME25): selecting "
        "takes 5.9 to 9.4 % with Vegas, 21.7 % with MagicDec-Quest and 11.2 to 29.1 % with "
        "SpecExtend.",
        picture(pictures, "vegas-breakdown", "parts of an iteration, and their floors"),
        table((*CASE, *breakdown.HEADINGS), lines),
        *own,
        absent(result),
    )
