"""The section and the picture of greedy tokens against exact plain decoding."""

from __future__ import annotations

from typing import Any

from bench import parity
from bench.report.text import header, paragraphs, picture, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Flips and their margins."""
    rows = parity.counted(result)
    title = header("Greedy tokens against exact plain decoding", result)
    reasons = dict.fromkeys(row["reason"] for row in result["rows"] if "reason" in row)
    missing = "\n".join(f"Not run: {reason}." for reason in reasons)
    if not rows:
        return paragraphs(title, missing)
    return paragraphs(
        title,
        f"Greedy, in {rows[0]['dtype']}, against exact plain decoding of each prompt by itself "
        "([what exact is](exact.md)). Models other than the bundled one have random weights. "
        f"{parity.FOOT[0].upper()}{parity.FOOT[1:]}.",
        picture(pictures, "parity-margins", "margins of flips"),
        table(parity.HEADINGS, [parity.cells(row) for row in rows]),
        missing,
    )


def margins(figure: Any, result: dict[str, Any]) -> bool:
    """How many flips had a margin of up to so much, a line a kind of ordinary row."""
    lines: dict[str, list[float]] = {}
    for row in parity.counted(result):
        kind = "forced" if row["kind"] == "forced" else "generated"
        if row["mode"] == "ordinary" and row["margins"]:
            lines.setdefault(f"{kind}, B={row['case']['B']}", []).extend(row["margins"])
    if not lines:
        return False
    axis = figure.subplots()
    for name, found in lines.items():
        found = sorted(found)
        shares = [(index + 1) / len(found) for index in range(len(found))]
        axis.step(found, shares, where="post", label=f"{name}: {len(found)} flips")
    axis.set_xlabel("what the two highest exact logits are apart")
    axis.set_ylabel("share of the flips up to it")
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return True
