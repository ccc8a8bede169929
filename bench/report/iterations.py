"""The sections on iterations at real models' shapes: where their time goes, and tokens a second."""

from __future__ import annotations

from typing import Any

from bench import breakdown, throughput
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


def speeds(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Tokens a second of each drafter: measured, and by the paper's acceptance."""
    found = {kind: throughput.lines(result["rows"], kind) for kind in ("measured", "imposed")}
    headings = (*CASE, *throughput.HEADINGS)
    parts = [
        f"### Acceptance {kind}\n\n{table(headings, lines)}"
        for kind, lines in found.items()
        if lines
    ]
    foot = throughput.foot(result)
    return paragraphs(
        header("Tokens a second by drafter", result),
        f"Drafters read 7 % of the context. {foot[0].upper()}{foot[1:]}. Yue et al. 2026 (figures "
        "9 and 11, H100, vLLM): with Vegas 1.25 to 2.81 times the tokens a second of plain "
        "decoding.",
        picture(pictures, "throughput", "tokens a second of each drafter over plain decoding"),
        *parts,
        absent(result),
    )
