"""The section on a cache in the host's memory."""

from __future__ import annotations

import statistics
from typing import Any

from bench.hata_off import HEADINGS, PAPER_TOKENS, beside, cells
from bench.report.text import absent, header, paragraphs, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What a step costs with keys and values in the host's memory."""
    right = [row for row in result["rows"] if row["checked"]]
    words = (
        "A step of one row at the shapes of the paper's table 9, which reads 1.56 % of the context "
        "in all layers but the first two. Weights, keys and values are random, and the hashes too; "
        "the bundled model has trained ones and reads a text. *step*: the median of the marginal "
        "time of a jitted chunk among chunks that follow each other, over its steps. *of dense*: "
        "how many times as fast as dense decoding with the cache on the device. *bus*: the median "
        "wall time of a call that fetches the rows that a step reads and does nothing else. "
        "*hidden*: 1 - (step - step of `hata`) / bus, the cost of predicting included. Shares of "
        "the rows that are read: *again*, left of the step before; *right*, else, and predicted; "
        "*late*, neither; *moved*, what goes over the bus. The tokens of `hata`, its "
        "parts one by one, and of `hata_off` are equal."
    )
    rows = [
        (
            row["name"],
            row["case"]["model"],
            f"{row['case']['context']:,}",
            *cells(row, beside(result, row)),
        )
        for row in right
    ]
    own = table(("", "model", "context", *HEADINGS), rows, left=2)
    return paragraphs(
        header("A cache in host memory", result), words, own, _paper(right), absent(result)
    )


def _paper(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"- {row['case']['model']}: {row['paper_s']:.2f} s in the paper (PCIe 4.0), "
        f"{statistics.median(row['step_ns']) * PAPER_TOKENS / 1e9:.2f} s here"
        for row in rows
        if row["name"] == "hata_off" and row.get("paper_s") and "step_ns" in row
    ]
    return f"{PAPER_TOKENS} tokens:\n\n" + "\n".join(lines) + "\n" if lines else ""
