"""The section on a decoding step at real models' shapes."""

from __future__ import annotations

from typing import Any

from bench.decode.parts import PARTS
from bench.decode.tables import CASE, STEP, of_kind, part_cells, prefill_cells, step_cells
from bench.report.text import absent, header, paragraphs, picture, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    steps = [row for row in of_kind(result["rows"], "decode_step") if "step_ns" in row]
    prefills = [row for row in of_kind(result["rows"], "prefill") if "wall_ns" in row]
    ceiling, matrix = result["read_ceiling_bytes_per_s"] / 1e9, result["matrix_ceiling_flops_per_s"]
    products = ""
    if matrix is not None:
        products = (
            "; where the products of all rows take longer than reading their weights, at the "
            f"matrix ceiling, {matrix / 1e12:,.0f} TFLOP/s"
        )
    return paragraphs(
        header("A step at real models' shapes", result),
        f"Random weights, keys and values in bfloat16; a pass of T tokens is a step without a "
        f"draft, shaped like one that verifies. *step*: milliseconds of a step, the median of the "
        f"marginal time of a jitted chunk of {result['steps']} among chunks that follow each "
        "other, over its steps. *floor*: milliseconds to read the weights that a step needs (no "
        "embedding table that only looks tokens up), and the keys and values of the context in "
        f"each row and layer, at the read ceiling of the same run, {ceiling:,.0f} GB/s{products}. "
        "*/floor*: step over floor. *idle*: 1 - time of kernels, as CUPTI records them, over the "
        "step, below zero where kernels overlap. "
        "*peak*: memory over weights and cache, as the device measured it where the row set the "
        "process's peak, else (~) as the program's plan has it. *temp*: temporary memory of the "
        "program over the cache. *attention*: the backend. *checked*: of how many layers the "
        "logits were compared with passes of one token by `xla`. gpt-oss-20b is there for its "
        "attention: one dense SwiGLU stands for its four active experts.",
        picture(pictures, "decode-floor", "step over floor"),
        table((*CASE, "attention", *STEP, "checked"), map(step_line, steps)),
        parts_of(steps),
        _prefill(prefills, matrix),
        absent(result),
    )


def step_line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row with times: its case, the backend of attention, `STEP`, and how far it was checked."""
    return *_case(row), row["name"], *step_cells(row), row["checked"]


def parts_of(steps: list[dict[str, Any]]) -> str:
    """Where the time of steps goes; empty where no kernel is known."""
    rows = [(*_case(row), *part_cells(row)) for row in steps if "parts_ns" in row]
    words = "Milliseconds of a step and their share. *products*: with weights."
    own = f"### Where the time goes\n\n{words}\n\n" + table((*CASE, *PARTS, "idle"), rows)
    return own if rows else ""


def _prefill(prefills: list[dict[str, Any]], ceiling: float | None) -> str:
    if not prefills or ceiling is None:
        return ""
    words = (
        "One prompt, wall time of `start_decoding`. Matrix ceiling, bfloat16 products of 8192 x "
        f"8192 random numbers in the same run: {ceiling / 1e12:,.0f} TFLOP/s. FLOP: 2 x weights x "
        "tokens, without the tables of the vocabulary, and 4 x N x H x tokens² / 2 a layer (with "
        "a window: of the pairs that are seen)."
    )
    rows = [
        (row["case"]["model"], f"{row['case']['tokens']:,}", *prefill_cells(row))
        for row in prefills
    ]
    headings = ("model", "tokens", "tokens/s", "TFLOP/s", "share")
    return f"### Prefill\n\n{words}\n\n" + table(headings, rows)


def _case(row: dict[str, Any]) -> list[str]:
    return [str(row["case"][key]) for key in CASE]
