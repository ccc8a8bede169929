"""The section on decoding end to end."""

from __future__ import annotations

from typing import Any

from bench.report.text import header, paragraphs, picture, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    headings = (
        *("draft", "batch", "context", "tok/s", "vs plain", "mean accepted length", "ms/step"),
        *("read floor ms", "identical", "flip margin"),
    )
    new = " or ".join(sorted({str(row["committed"] // row["batch"]) for row in result["rows"]}))
    return paragraphs(
        header("Plain and speculative decoding", result),
        f"Bundled model, {result['dtype']}, greedy, {new} new tokens on prompts of "
        "the standard library's source. Read ceiling measured in the same run: "
        f"{result['read_ceiling_bytes_per_s'] / 1e9:,.0f} GB/s.",
        picture(pictures, "step", "tokens a second"),
        "*tok/s*: median wall-clock of three runs, compiling excluded. *ms/step*: marginal wall "
        "time of a step inside a jitted loop. *read floor*: time to read every weight and cached "
        "token of a plain step once at the measured ceiling. *identical*: rows whose tokens equal "
        "plain decoding's; the *flip margin* is the largest gap between the two logits where one "
        "differs.",
        table(headings, map(_cells, result["rows"])),
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['source']} {row['gamma']}" if row["gamma"] else row["source"],
        str(row["batch"]),
        str(row["context"]),
        f"{row['decode_tokens_per_s']:,.0f}" if row["checked"] else "not checked",
        f"{row['speedup']:.2f}x" if row["checked"] else "",
        f"{row['mean_accepted_length']:.2f}",
        f"{row['step_ms']:.2f}",
        f"{row['read_floor_ms']:.3f}",
        f"{row['identical_rows']}/{row['rows']}",
        f"{max(row['flip_margins']):.3f}" if row["flip_margins"] else "",
    )
