"""docs/RESULTS.md and its pictures, from the JSON under bench/results."""

from __future__ import annotations

import dataclasses
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
    readme,
    real,
    real_cells,
    sampling,
    selection,
    serving,
    verification,
)
from bench.report.text import is_imposed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT.parent / "docs"
README = ROOT.parent / "README.md"
PAPER = ROOT / "paper_l40s.json"

# Suites in the order of their sections; each writes its section from a result, the names of its
# pictures and the paper's figures.
SECTIONS: dict[str, Callable[[dict[str, Any], dict[str, str], dict[str, Any]], str]] = {
    "real": real.section,
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


# Suites whose results of one folder make one section: as one result.
JOINED = {"real": real_cells.joined}


@dataclasses.dataclass(frozen=True)
class Section:
    """The text of a section, and its ``lines`` of the table at a glance. ``place``: real models
    come first, then what is measured, then imposed acceptance."""

    place: int
    text: str
    lines: list[tuple[str, glance.Line]]


def write(results: Path = RESULTS, docs: Path = DOCS, page: Path | None = None) -> None:
    """Write RESULTS.md and its pictures into ``docs``, a chapter a folder of ``results``.

    A suite's result is in ``SUITE.json``; those of further runs, of other cases, are in
    ``SUITE.NAME.json`` and follow as sections of their own, with the name in their headings; those
    of suite `real` are one section. ``page``: a README, whose part on real models is written too.
    """
    paper = json.loads(PAPER.read_text())
    folders = sorted((path for path in results.iterdir() if path.is_dir()), reverse=True)
    sections = [
        _section(suite, folder, names, result, docs, paper)
        for folder in folders
        for suite in SECTIONS
        for names, result in read(folder, suite)
    ]
    sections.sort(key=lambda section: section.place)
    lines = [line for section in sections for line in section.lines]
    head = (
        "# Results\n\nWritten by `python -m bench report` from `bench/results/`; edit neither by "
        "hand.\n"
    )
    text = [head, *glance.tables_of(lines), *(section.text for section in sections)]
    (docs / "RESULTS.md").write_text("\n".join(text))
    if page is not None:
        page.write_text(readme.refreshed(page.read_text(), real_results(results)))


def read(folder: Path, suite: str) -> list[tuple[list[str], dict[str, Any]]]:
    """The results of a suite in a folder, each with the names of its run."""
    paths = [*folder.glob(f"{suite}.json"), *sorted(folder.glob(f"{suite}.*.json"))]
    runs = [(path.stem.split(".")[1:], json.loads(path.read_text())) for path in paths]
    if suite in JOINED and runs:
        return [([], JOINED[suite]([result for _, result in runs]))]
    return runs


def real_results(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """What real models show, by the name of a machine's folder, in the order of RESULTS.md."""
    folders = sorted((path for path in results.iterdir() if path.is_dir()), reverse=True)
    return {folder.name: result for folder in folders for _, result in read(folder, "real")}


def _section(
    suite: str,
    folder: Path,
    names: list[str],
    result: dict[str, Any],
    docs: Path,
    paper: dict[str, Any],
) -> Section:
    prefix = "-".join([folder.name, *names])
    pictures = {
        picture.stem.removeprefix(f"{prefix}-"): picture.name
        for picture in figures.write(result, docs, prefix=f"{prefix}-")
    }
    heading, _, rest = SECTIONS[suite](result, pictures, paper).partition("\n")
    heading = ", ".join([heading, *names])
    title = heading.removeprefix("## ")
    lines = glance.LINES[suite](result) if suite in glance.LINES else ()
    place = 0 if suite == "real" else 2 if is_imposed(result) else 1
    return Section(place, f"{heading}\n{rest}", [(title, line) for line in lines])
