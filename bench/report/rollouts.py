"""The tables of docs/rollouts.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.point import Row
from bench.report import figures
from bench.report.markdown import Line, distinct, ratio, table
from bench.report.runs import Run
from bench.rollouts.differences import EDGES
from bench.serving import ROLLOUT

SUITES = ("rollouts", "serving")
ENGINES = {"tunix": "Tunix's sampler", "none": "jspec, no drafts"}
PICTURE = "rollouts-differences.png"
SHOWN = (1e-3, 1e-2, 3e-2, 0.1, 0.3)  # the edges between two columns of differences
WORDS = {
    "speed": "Tokens a second of a rollout through Tunix's interface. *difference*: the largest of "
    "the rollout's log-probabilities from those of `jspec.score_tokens`.",
    "differences": "Share of a rollout's tokens by how far the log-probability is from that of "
    "another forward: not at all, by less than 0.001, from there to 0.01, and so on; empty: no "
    "token. *trainer*: Tunix's model without a cache, by the dtype of its arithmetic.",
    "grpo": "GRPO until a step's mean reward is the target. *difference*: the largest of the "
    "trainer's log-probabilities from the rollout's; *compiled*: programs after the warm-up.",
    "weights": "Milliseconds of `Engine.update` with weights that it takes as they are, and with "
    "float32 ones that are cast; of a copy of all weights by one program.",
    "shared": "What requests that begin alike share, and the same where nothing can be. *cache*: "
    "GB that follow from shapes, and what the engine took.",
    "phases": "The third of three rollouts, one answer in eight long. *half free*: seconds until "
    "half of the slots are free; *then*: tokens a second after it.",
}


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """Each table after its words, empty where nothing was measured on a GPU."""
    shown = of_gpus(runs)
    lines = {
        "speed": (speeds(shown), 5),
        "differences": (differences(shown), 5),
        "grpo": (trained(shown), 4),
        "weights": (updates(shown), 2),
        "shared": (shared(shown), 4),
        "phases": (phases(shown), 4),
    }
    result = {}
    for name, (of_table, labels) in lines.items():
        text = table(distinct(of_table, labels), labels)
        result[name] = f"{WORDS[name]}\n\n{text}" if text else ""
    if result["differences"]:
        result["differences"] += (
            f"\n![Share of tokens by the difference of their log-probabilities]({PICTURE})\n"
        )
    return result


def of_gpus(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.suite in SUITES and run.device != "cpu"]


def measured(runs: Sequence[Run], operation: str) -> Iterator[tuple[Run, Row]]:
    """The rows of an operation that have figures, with their runs."""
    for run in runs:
        for row in run.rows:
            if row["operation"] == operation and "reason" not in row:
                yield run, row


def of_sampler(run: Run, row: Row) -> dict[str, str]:
    """What a row of the benchmark `sampler` is of, by heading."""
    case, name = row["case"], row["name"]
    is_exact = name != "tunix" and case["exact"] != "no"
    return {
        "card": run.card,
        "model": case["model"],
        "answers": f"{case['B']} of {case['new']} tokens at most",
        "sampling": case["sampling"],
        "rollout": ENGINES.get(name, f"jspec, {name}") + is_exact * f", exact={case['exact']}",
    }


def speeds(runs: Sequence[Run]) -> Iterator[Line]:
    for run, row in measured(runs, "sampler"):
        figures = {
            "tok/s": f"{row['tokens_per_s']:,.0f}",
            "vs Tunix": ratio(row["vs_tunix"]) if "vs_tunix" in row else "",
            "first call, s": f"{row['first_call_s']:.1f}",
            "difference": f"{row['differences']['max']:.1g}" if "differences" in row else "",
        }
        yield Line(of_sampler(run, row) | figures)


def forwards_of(row: Row) -> dict[str, Row]:
    """The histograms of a row of the benchmark `sampler` by forward, none in results without."""
    if "trainer_differences" not in row:
        return {}
    of_trainer = row["trainer_differences"].items()
    return {"score_tokens": row["differences"]} | {f"trainer, {k}": x for k, x in of_trainer}


def differences(runs: Sequence[Run]) -> Iterator[Line]:
    """A line for each forward that a rollout is compared with."""
    starts = [0, 1, *(2 + EDGES.index(edge) for edge in SHOWN)]
    headings = ["0", *(f"to {edge:g}" for edge in SHOWN), "above"]
    for run, row in measured(runs, "sampler"):
        for name, found in forwards_of(row).items():
            count = sum(found["counts"])
            parts = np.add.reduceat(found["counts"], starts)
            labels = {k: v for k, v in of_sampler(run, row).items() if k != "answers"}
            cells = {"against": name, "tokens": f"{count:,}"}
            cells |= {
                heading: f"{part / count:.1%}" if part else ""
                for heading, part in zip(headings, parts, strict=True)
            }
            yield Line(labels | cells | {"largest": f"{found['max']:.1g}"})


def draw(runs: Sequence[Run], path: Path) -> bool:
    """Write the histograms of sampled rollouts without drafts; whether there are any."""
    panels: dict[str, dict[str, Row]] = {}
    for run, row in measured(of_gpus(runs), "sampler"):
        if row["name"] in ENGINES and row["case"]["sampling"] != "greedy" and forwards_of(row):
            labels = of_sampler(run, row)
            title = f"{labels['model']}, {run.card}\n{labels['rollout']}"
            panels.setdefault(title, forwards_of(row))
    if not panels:
        return False
    with figures.new(path) as figure:
        figure.set_size_inches(2 + 3 * len(panels), 3)
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, forwards) in zip(every, panels.items(), strict=True):
            for name, found in forwards.items():
                shares = np.array(found["counts"]) / sum(found["counts"])
                axes.stairs(shares, np.arange(len(shares) + 1), label=name, linewidth=1.5)
            words = ["0", *(f"{edge:g}" for edge in EDGES[::2])]
            places = [0.5, *range(2, len(EDGES) + 2, 2)]
            axes.set_xticks(places, words, fontsize=7, rotation=45)
            axes.set(xlabel="difference")
            axes.set_title(title, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        every[0].set_ylabel("share of tokens")
        handles, names = every[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", fontsize=7, frameon=False)
    return True


def trained(runs: Sequence[Run]) -> Iterator[Line]:
    for run, row in measured(runs, "grpo"):
        case = row["case"]
        seconds = ("missed" if x is None else f"{x:.1f}" for x in row["seconds"])
        yield Line(
            {
                "card": run.card,
                "model": case["model"],
                "target": str(case["target"]),
                "rollout": ENGINES.get(row["name"], f"jspec, {row['name']}"),
                "seconds, by seed": ", ".join(seconds),
                "steps": ", ".join(map(str, row["steps"])),
                **{f"{x}, ms": f"{row[f'{x}_ms']:.1f}" for x in ("rollout", "train", "update")},
                "compiled": str(row["compilations"]),
                "difference": f"{row['difference']:.1g}",
            }
        )


def updates(runs: Sequence[Run]) -> Iterator[Line]:
    """A line for each model of a run, with a column for each way."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for run, row in measured(runs, "update"):
        if row["checked"]:
            model, rate = row["case"]["model"], row["GB_per_s"]
            at = cells.setdefault((run.card, model), {"card": run.card, "model": model})
            at[row["name"]] = f"{row['ms']:.2f}" + (f" ({rate:,.0f} GB/s)" if rate else "")
    yield from map(Line, cells.values())


def shared(runs: Sequence[Run]) -> Iterator[Line]:
    for operation in ("group", "conversations"):
        for run, row in measured(runs, operation):
            case = row["case"]
            what = (
                f"{case['B']} answers to a prompt of {case['S']}"
                if operation == "group"
                else f"{case['B']} users, {case['turns']} turns"
            )
            cells = {"card": run.card, "model": case["model"], "requests": what}
            cells |= {
                "prompts": row["name"],
                "prefilled": f"{row['prefilled']:,} ({row['prefilled_share']:.1%})",
                "first token, ms": f"{row['first_token_ms']:.1f}",
                "tok/s": f"{row['tokens_per_s']:,.0f}",
            }
            if "later_turns_ms" in row:
                cells["after the first turn, ms"] = f"{row['later_turns_ms']:.1f}"
            if "engine_bytes" in row:
                sizes = (row["cache_bytes"], row["engine_bytes"])
                cells["cache, GB"] = " / ".join(f"{x / 1e9:.2f}" for x in sizes)
            yield Line(cells)


def phases(runs: Sequence[Run]) -> Iterator[Line]:
    for run, row in measured(runs, "serving"):
        case = row["case"]
        if case.get("mix") == ROLLOUT and row["checked"]:
            yield Line(
                {
                    "card": run.card,
                    "slots": str(case["B"]),
                    "gamma": case["gamma"],
                    "drafts": row["name"],
                    "tok/s": f"{row['tokens_per_s']:,.0f}",
                    "half free": f"{row['half_free_s']:.2f}",
                    "then": f"{row.get('tail_tokens_per_s', 0):,.0f}",
                }
            )
