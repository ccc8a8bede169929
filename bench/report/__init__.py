"""docs/RESULTS.md and its pictures, from the JSON under bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import (
    acceptance,
    attention,
    ceilings,
    choosing,
    decode,
    decoding,
    families,
    figures,
    glance,
    hata,
    host_cache,
    iterations,
    learning,
    meshes,
    packing,
    parity,
    quality,
    sampling,
    selection,
    serving,
    verification,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT.parent / "docs"
PAPER = ROOT / "paper_l40s.json"

# Suites in the order of their sections; each writes its section from a result, the names of its
# pictures and the paper's figures.
SECTIONS: dict[str, Callable[[dict[str, Any], dict[str, str], dict[str, Any]], str]] = {
    "ceilings": ceilings.section,
    "verify": verification.section,
    "pack": packing.alone,
    "fused": packing.fused,
    "sampling": sampling.section,
    "attention": attention.dense,
    "gather": attention.gathered,
    "hash": selection.codes,
    "select": selection.scores,
    "hata-layer": hata.layer,
    "hata-ablation": hata.parts,
    "hash-training": learning.section,
    "hash-losses": learning.losses,
    "hash-bits": learning.bits,
    "hata-off": host_cache.section,
    "ruler": quality.section,
    "step": decoding.section,
    "auto": choosing.section,
    "parity": parity.section,
    "decode": decode.section,
    "hata-e2e": hata.steps,
    "collect": acceptance.collected,
    "vegas-accept": acceptance.section,
    "vegas-overlap": acceptance.alike,
    "vegas-breakdown": iterations.parts,
    "throughput": iterations.speeds,
    "families": families.section,
    "serving": serving.section,
    "collectives": meshes.messages,
    "helix-attention": meshes.attention,
    "hopb": meshes.overlap,
    "helix-step": meshes.steps,
}


def write(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """Write RESULTS.md and its pictures into ``docs``, a chapter a folder of ``results``.

    A suite's result is in ``SUITE.json``; those of further runs, of other cases, are in
    ``SUITE.NAME.json`` and follow as sections of their own, with the name in their headings.
    """
    paper = json.loads(PAPER.read_text())
    parts: list[str] = []
    lines: list[tuple[str, glance.Line]] = []
    for folder in sorted((path for path in results.iterdir() if path.is_dir()), reverse=True):
        for suite, section in SECTIONS.items():
            further = sorted(folder.glob(f"{suite}.*.json"))
            for path in [*folder.glob(f"{suite}.json"), *further]:
                result = json.loads(path.read_text())
                names = path.stem.split(".")[1:]
                prefix = "-".join([folder.name, *names])
                pictures = {
                    picture.stem.removeprefix(f"{prefix}-"): picture.name
                    for picture in figures.write(result, docs, prefix=f"{prefix}-")
                }
                heading, _, rest = section(result, pictures, paper).partition("\n")
                heading = ", ".join([heading, *names])
                parts.append(f"{heading}\n{rest}")
                if suite in glance.LINES:
                    title = heading.removeprefix("## ")
                    lines += [(title, line) for line in glance.LINES[suite](result)]
    head = (
        "# Results\n\nWritten by `python -m bench report` from `bench/results/`; edit neither by "
        "hand.\n"
    )
    (docs / "RESULTS.md").write_text("\n".join([head, *glance.tables_of(lines), *parts]))
