"""The record of a training run: training.json, the model card and the picture of the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.train_bundled.checkpoint import CURVE_FIELDS
from jspec.eval.ruler_bytes import TASKS

COLOURS = ("tab:blue", "tab:orange")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """``training.json``, ``MODEL_CARD.md`` and, where matplotlib is installed, ``loss.png``."""
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "MODEL_CARD.md").write_text(model_card(record))
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no loss.png", flush=True)
        return
    matplotlib.use("Agg")
    draw_curve(folder / "loss.png", record["curve"])


def draw_curve(path: Path, curve: dict[str, list[float]]) -> None:
    """Bits per byte of the training text and answer accuracy over steps, stages marked."""
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), dpi=110)
    right = left.twinx()
    left.plot(curve["step"], curve["text_bits"], color=COLOURS[0])
    right.plot(curve["step"], curve["answer_accuracy"], color=COLOURS[1])
    left.set(xlabel="step", ylabel="training text, bits per byte", ylim=(0, 4))
    right.set(ylabel="right bytes of answers", ylim=(0, 1.02))
    left.yaxis.label.set_color(COLOURS[0])
    right.yaxis.label.set_color(COLOURS[1])
    lengths = curve["length"]
    for at in range(1, len(lengths)):
        if lengths[at] != lengths[at - 1]:
            left.axvline(curve["step"][at], color="0.7", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def model_card(record: dict[str, Any]) -> str:
    sections = [_head(record), _accuracy(record), _training(record), _data(record)]
    return "\n".join(sections)


def _head(record: dict[str, Any]) -> str:
    shape = record["model"]
    spec = shape["layers"][0]
    return f"""# jspec bundled model

A byte-level decoder of {record["parameters"] / 1e6:.1f} M parameters for tests, demos and
benchmarks of long-context decoding. Written by `python -m examples.train_bundled`.

- Shape (Qwen3): {len(shape["layers"])} layers, width {shape["hidden_size"]}, {shape["num_heads"]} \
query and {spec["kv_heads"]} KV heads of size {spec["key_size"]}, SwiGLU \
{shape["intermediate_size"]}, tied embeddings, context {shape["max_context"]}.
- Tokens: byte b is token b; 256 starts a document, 257 ends it, 258 pads. Start prompts with 256.
- Weights: int8, symmetric, one float32 scale per output channel (compressed-tensors \
`int-quantized`); embedding and norms bfloat16.
- Not for production: it knows Python-like text and the synthetic tasks below, nothing else.
"""


def _accuracy(record: dict[str, Any]) -> str:
    report = record.get("evaluation")
    if not report:
        return "## Evaluation\n\nNot evaluated: the time ran out.\n"
    lines = ["## Evaluation", "", "Of the int8 weights in this folder, in bfloat16 arithmetic.", ""]
    titles = {
        "files": "every 50th file of the training packages",
        "packages": "whole packages, never trained on",
    }
    for name, figures in report["held_out"].items():
        lines.append(
            f"- Held-out {titles[name]}: {figures['bits_per_byte']:.3f} bits per byte "
            f"({figures['bytes'] / 1e6:.1f} MB, context {report['text_length']})"
        )
    lengths = sorted({int(length) for row in report["tasks"].values() for length in row})
    lines += ["", "| task | " + " | ".join(map(str, lengths)) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for task in TASKS:
        cells = [report["tasks"].get(task, {}).get(str(length)) for length in lengths]
        shown = [f"{c['accuracy']:.3f} (n={c['examples']})" if c else "-" for c in cells]
        lines.append(f"| {task} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "Tasks of RULER's kinds in jspec's wording (`jspec.eval.ruler_bytes`), contexts in bytes.",
        "An answer counts if the most likely byte is right at each of its bytes, given the text",
        "before it; several are expected in a canonical order, each given the right ones before.",
        "",
    ]
    return "\n".join(lines)


def _training(record: dict[str, Any]) -> str:
    lines = ["## Training", ""]
    lines.append(
        f"{record['steps']} steps, {record['bytes'] / 1e6:.0f} MB of bytes, "
        f"{record['seconds']:.0f} s, {record['share']:.0%} of the planned schedule. AdamW "
        f"(0.9, 0.95, decay 0.05), peak rate {record['peak_rate']}, cosine, clipping at 1."
    )
    lines += ["", "| context | rows | share of plan | retrieval rows | bytes/s |", "|---" * 5 + "|"]
    for stage in record["stages"]:
        speed = stage["bytes_per_s"]
        shown = f"{speed / 1e6:.2f} M" if speed else "-"
        lines.append(
            f"| {stage['length']} | {stage['rows']} | {stage['share']:.0%} | "
            f"{stage['retrieval']:.0%} | {shown} |"
        )
    for run in record["invocations"]:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines += ["", f"Ran on {run['device']}, {versions}; {run['note']}."]
    # An installed package has the card without them.
    where = "jspec's repository has the loss beside this card"
    lines += ["", f"{where}: `loss.png`, and its numbers in `training.json`.", ""]
    return "\n".join(lines)


def _data(record: dict[str, Any]) -> str:
    lines = ["## Data", ""]
    lines.append(
        "Source and documentation of these installed packages, chosen by an allow-list of licences "
        "(files that name another licence, generated and repeated ones left out), and synthetic "
        "retrieval documents."
    )
    lines += ["", "| package | version | licence | files | bytes | held out |", "|---" * 6 + "|"]
    lines += [
        f"| {p['name']} | {p['version']} | {p['licence']} | {p['files']} | {p['bytes']} | "
        f"{'yes' if p['held_out'] else ''} |"
        for p in record["packages"]
    ]
    return "\n".join(lines) + "\n"


def curve_columns(curve: list[list[float]], points: int = 400) -> dict[str, list[float]]:
    """The recorded curve by field, thinned to about ``points``."""
    step = max(1, len(curve) // points)
    rows = curve[::step]
    return {field: [row[i] for row in rows] for i, field in enumerate(CURVE_FIELDS)}


def stage_speed(curve: list[list[float]], length: int) -> float | None:
    """Median bytes per second of a stage, or None if it never ran."""
    at, speed = CURVE_FIELDS.index("length"), CURVE_FIELDS.index("bytes_per_s")
    speeds = sorted(row[speed] for row in curve if row[at] == length)
    return speeds[len(speeds) // 2] if speeds else None
