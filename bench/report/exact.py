"""The tables of docs/exact.md."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.markdown import Line, table
from bench.report.runs import Run

WORDS = {
    "bits": "Positions whose logits have other bits than by passes of one token: by passes of so "
    "many tokens, and by verification that scores keys (*vegas*). *compared*: positions of each; "
    "their rows are shuffled, and batches differ.",
    "flips": "Requests whose greedy tokens are not those of plain decoding at the first batch of "
    "their run, by drafter; in brackets those whose draft could not be exact. A batch with more "
    "rows than prompts repeats some.",
}
LABELS = 4


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """Each table after its words, empty where nothing was measured on a GPU."""
    of_gpus = [run for run in runs if run.suite == "quality" and run.device != "cpu"]
    return {
        name: f"{WORDS[name]}\n\n{text}" if (text := table(lines, LABELS)) else ""
        for name, lines in (("bits", bits(of_gpus)), ("flips", flips(of_gpus)))
    }


def bits(runs: Sequence[Run]) -> list[Line]:
    """A line for each model, with a column for each number of tokens of a pass."""
    lines = {}
    for run in runs:
        for row in run.rows:
            if row["operation"] == "passes" and "compared" in row:
                key = run.card, row["case"]["model"], row["case"]["exact"], f"{row['compared']:,}"
                labels = zip(("card", "model", "exact", "compared"), key, strict=True)
                lines.setdefault(key, dict(labels))[row["name"]] = f"{row['differing']:,}"
    return [Line(lines[key]) for key in sorted(lines)]


def flips(runs: Sequence[Run]) -> list[Line]:
    """A line for each model and batch, with a column for each drafter."""
    lines = {}
    for run in runs:
        for row in run.rows:
            if row["operation"] == "flips" and "flips" in row:
                case = row["case"]
                key = run.card, case["model"], case["B"], f"{case['prompts']} x {case['new']}"
                labels = zip(("card", "model", "batch", "prompts x tokens"), key, strict=True)
                fell_back = f" ({row['fell_back']})" if row["fell_back"] else ""
                cells = lines.setdefault(key, {name: str(x) for name, x in labels})
                cells[row["name"]] = f"{row['flips']}{fell_back}"
    return [Line(lines[key]) for key in sorted(lines)]
