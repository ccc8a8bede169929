"""The section on mixtures of experts and models with windows."""

from __future__ import annotations

from typing import Any

from bench import breakdown, families, throughput
from bench.decode import drafting
from bench.decode.tables import CASE, STEP
from bench.report.decode import parts_of, step_line
from bench.report.text import absent, header, paragraphs, picture, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Steps against the bytes that they need, and the iteration by Vegas."""
    step, whole, speeds = families.parts(result)
    steps = [row for row in step["rows"] if "step_ns" in row]
    rows = whole["rows"]
    timed = [row for row in rows if "step_ns" in row]
    iterated = [(*drafting.case_cells(row), *breakdown.cells(row, rows)) for row in timed]
    parts = [
        f"### {case}\n\n{table(breakdown.PART_HEADINGS, lines)}"
        for case, lines in breakdown.by_case(rows).items()
    ]
    imposed = throughput.lines(speeds["rows"], "imposed")
    ceiling = result["read_ceiling_bytes_per_s"] / 1e9
    return paragraphs(
        header("Mixtures of experts and models with windows", result),
        "True shapes; **random weights**, keys and values in bfloat16. Steps are measured and "
        "checked as those of *A step at real models' shapes*, iterations as those of *Where the "
        "time of an iteration goes*. *floor*: milliseconds to read the bytes in memory that a pass "
        f"needs, at the read ceiling of this run, {ceiling:,.0f} GB/s, or its products at the "
        f"matrix ceiling where these take longer. {families.FOOT}.",
        picture(pictures, "families-floor", "step over floor"),
        table((*CASE, "attention", *STEP, "checked"), map(step_line, steps)),
        parts_of(steps),
        picture(pictures, "families-parts", "parts of an iteration, and their floors"),
        table((*drafting.CASE, *breakdown.HEADINGS), iterated) if iterated else "",
        *parts,
        f"### Tokens a second, acceptance imposed\n\nBy {result['acceptance']['source']}. "
        f"Quantised drafts: {throughput.quantized_by(result['acceptance'])}.\n\n"
        + table((*drafting.CASE, *throughput.HEADINGS), imposed)
        if imposed
        else "",
        absent(result),
    )
