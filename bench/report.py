"""docs/RESULTS.md and its pictures, from the JSON under bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"
DOCS = ROOT.parent / "docs"


def write() -> None:
    """Write docs/RESULTS.md and a picture beside it for each result."""
    parts = [
        "# Results\n\nWritten by `python -m bench report` from `bench/results/`; edit neither by "
        "hand.\n"
    ]
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        if result["suite"] == "step":
            parts.append(_step(path, result))
    (DOCS / "RESULTS.md").write_text("\n".join(parts))


def _step(path: Path, result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    driver = f"driver {machine['driver']}; " if machine["driver"] else ""
    picture = DOCS / f"{path.parent.name}-step.png"
    _plot(result, picture)
    lines = [
        f"## Plain and speculative decoding: {machine['device']}\n",
        f"Bundled model, {result['dtype']}, greedy, 256 new tokens on prompts of the standard "
        f"library's source. {versions}; {driver}{machine['cores']} cores; "
        f"{machine['date']}. Read ceiling measured in the same run: "
        f"{result['read_ceiling_bytes_per_s'] / 1e9:,.0f} GB/s.\n",
        f"![tokens a second]({picture.name})\n",
        "*tok/s*: median wall-clock of three runs, compiling excluded. *ms/step*: marginal wall "
        "time of a step inside a jitted loop. *read floor*: time to read every weight and cached "
        "token of a plain step once at the measured ceiling. *identical*: rows whose tokens equal "
        "plain decoding's; the *flip margin* is the largest gap between the two logits where one "
        "differs.\n",
        "| batch | context | draft | tok/s | vs plain | mean accepted length | ms/step | "
        "read floor ms | identical | flip margin |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        draft = f"{row['source']} {row['gamma']}" if row["gamma"] else row["source"]
        flip = f"{max(row['flip_margins']):.3f}" if row["flip_margins"] else ""
        cells = [
            str(row["batch"]),
            str(row["context"]),
            draft,
            f"{row['decode_tokens_per_s']:,.0f}" if row["checked"] else "not checked",
            f"{row['speedup']:.2f}x" if row["checked"] else "",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['read_floor_ms']:.3f}",
            f"{row['identical_rows']}/{row['rows']}",
            flip,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plot(result: dict[str, Any], path: Path) -> None:
    """Tokens a second of each case, a bar a draft source."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    cases = list(dict.fromkeys((r["batch"], r["context"]) for r in rows))
    sources = list(dict.fromkeys(r["source"] for r in rows))
    figure, axes = plt.subplots(1, len(cases), figsize=(2.6 * len(cases) + 1, 3), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        own = {r["source"]: r for r in rows if (r["batch"], r["context"]) == case}
        speeds = [own[s]["decode_tokens_per_s"] for s in sources]
        bars = axis.bar(sources, speeds, color=["#9aa5b1", "#2b6cb0", "#38a169"][: len(sources)])
        axis.bar_label(bars, [f"{own[s]['speedup']:.2f}x" for s in sources], fontsize=8)
        axis.set_title(f"batch {case[0]}, context {case[1]}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0][0].set_ylabel("tokens / s")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
