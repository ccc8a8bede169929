"""The section on stochastic verification."""

from __future__ import annotations

from typing import Any

from bench import regret
from bench.ceilings import bandwidth
from bench.point import best_clock
from bench.report.ceilings import rates
from bench.report.text import absent, choice, header, loops, names, paragraphs, picture, table, time

OPERATION = "verify_stochastic"


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    read = bandwidth(result["ceilings"], "read")
    everyone = names(result, OPERATION)
    rows = []
    for case, own_rows in regret.points(result["rows"], OPERATION):
        own = {row["name"]: best_clock(row) for row in own_rows}
        floor = own_rows[0]["bytes"] / read * 1e6 if read else None
        cells = []
        for name in everyone:
            found = own.get(name)
            over = f" ({found.median / floor:.2f}x)" if found and floor else ""
            cells.append(time(found) + over)
        floor_cell = "" if floor is None else f"{floor:.1f}"
        head = (case["draft"], case["l2"], str(case["B"]), str(case["V"]), floor_cell)
        rows.append((*head, *cells))
    return paragraphs(
        header("Stochastic verification", result),
        "gamma 5, bfloat16 logits, temperature 1. *Floor*: the bytes of all logits over the read "
        "ceiling of this run; in brackets each time over that floor. In a warm L2 logits that fit "
        "in it can beat the floor. The rivals' times include the softmax that they need.",
        table(("draft", "L2", "B", "V", "floor", *everyone), rows, left=2),
        picture(pictures, "sampling-vocabulary", "time against vocabulary"),
        choice(result, OPERATION),
        loops(
            result,
            ("B", "V", "draft"),
            "Each step draws from the same logits with other random numbers: the next tokens are "
            "the positions of the step that follows. XLA is left out: what stays the same of its "
            "own code, the sums, it moves out of the loop.",
        ),
        rates(result["ceilings"]),
        absent(result),
    )
