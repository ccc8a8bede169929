"""The sections on a layer of each policy, and on what makes one of HATA fast."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from bench.decode import lossy
from bench.layer import ablation, tables
from bench.report.ceilings import rates
from bench.report.text import absent, header, paragraphs, picture, table
from bench.table import cell, number, times

PAPER = Path(__file__).parents[1] / "paper_hata.json"
OURS = {"dense": "the fastest dense attention", "loki": "Loki", "quest_32": "Quest, pages of 32"}


@cache
def paper() -> dict[str, Any]:
    """The figures of the paper on HATA, and where they stand in it."""
    return json.loads(PAPER.read_text())


def layer(result: dict[str, Any], pictures: dict[str, str], other: dict[str, Any]) -> str:
    floor = tables.floor_of(result)
    found = tables.groups(result["rows"])
    lines = [
        (*(cell(key, group.case[key]) for key in tables.CASE), *line)
        for group in found
        for line in tables.lines(group, floor)
    ]
    return paragraphs(
        header("A layer of each policy", result),
        "bfloat16, 1.56 % of the slots selected unless *n* says otherwise. A policy's row is all "
        "that a decoding layer does between its projections: the new token goes into the cache "
        "with what the policy keeps of it, the policy selects, attention reads the selection. The "
        "first row of a case is the fastest attention over the whole cache, which appends "
        "nothing. Device time in microseconds, each call behind 128 MiB of other data (wall time "
        f"where there is no device clock). {tables.foot(floor)}.",
        picture(pictures, "hata-layer", "speed of a layer over the fastest dense attention"),
        table((*tables.CASE, "", *tables.COLUMNS), lines, left=0),
        _beside(found),
        rates(result["ceilings"]),
        absent(result),
    )


def _beside(found: list[tables.Group]) -> str:
    """HATA's speed over others, beside the paper's."""
    groups = {tuple(group.case[key] for key in ("heads", "B", "S")): group for group in found}
    rows = []
    for heads, batch, slots, name, speedup in paper()["layer"]["rows"]:
        group = groups.get((heads, batch, slots))
        own = None
        if group is not None:
            own = group.speedup("hata") if name == "dense" else group.beside(name)
        shown = "" if own is None else times(own)
        rows.append((OURS[name], heads, str(batch), cell("S", slots), shown, times(speedup)))
    own = table(("HATA over", "heads", "B", "S", "here", "paper"), rows)
    source = f"{paper()['source']}, on {paper()['device']}; its dense attention is vLLM's."
    return f"### Beside the paper\n\n{source}\n\n{own}"


def parts(result: dict[str, Any], pictures: dict[str, str], other: dict[str, Any]) -> str:
    shown = []
    for title, headings, lines in ablation.parts(result):
        if lines:
            shown += [f"### {title.capitalize()}\n", table(headings, lines, left=0)]
            if "vs plain" in headings:
                shown.append(_reductions(result))
    return paragraphs(
        header("What makes a layer of HATA fast", result),
        "A layer as in the section before. *plain* is XLA's version of every operation, selection "
        "by a sort; each stage takes the best backend of one part more: scores, their selection "
        "with the scores, attention that reads the selection in place, and encoding with the "
        f"cache's update. Times in microseconds. of floor: {tables.floor_of(result)}.",
        picture(pictures, "hata-ablation", "time of a layer by its parts, its budget and its bits"),
        *shown,
        rates(result["ceilings"]),
        absent(result),
    )


def steps(result: dict[str, Any], pictures: dict[str, str], other: dict[str, Any]) -> str:
    rows = [
        (*lossy.case_cells(step), step.policy, *step.cells(), step.row["checked"])
        for step in lossy.steps(result["rows"])
    ]
    ceiling = result["read_ceiling_bytes_per_s"] / 1e9
    headings = ("model", "layers", "B", "S", "policy", *lossy.COLUMNS, "checked")
    return paragraphs(
        header("A step that reads what a policy selects", result),
        "True shapes, all layers unless *layers* says otherwise; random weights, keys and values "
        "in bfloat16. The first two layers are dense, the others select 1.56 % of the context: "
        "what comes out is not what the model alone would say. "
        f"{lossy.FOOT.format(ceiling=ceiling)}. *checked*: of how many layers, both with the "
        "policy, the logits were compared with XLA's version of every operation.",
        picture(pictures, "hata-e2e", "tokens a second of each policy over the dense step"),
        table(headings, rows),
        absent(result),
    )


def _reductions(result: dict[str, Any]) -> str:
    """By how much each stage shortens the plain version, beside the paper's."""
    times_of = ablation.stages(result["rows"])
    if "plain" not in times_of:
        return ""
    before, rows = times_of["plain"], []
    theirs = {stage: f"{share:.1%}" for stage, share in paper()["ablation"]["rows"]}
    for stage, own in times_of.items():
        if stage != "plain":
            cut = (before - own) / times_of["plain"]
            rows.append((stage, number(own), f"{cut:.1%}", theirs.get(stage, "")))
            before = own
    whole = times(times_of["plain"] / before)
    rows.append(("all of them", number(before), whole, times(paper()["ablation"]["speedup"])))
    headings = ("", "time", "less than plain", "paper")
    words = (
        f"By how much each stage shortens the plain version, and {paper()['source']}, where plain "
        "is PyTorch, and selection a part of neither stage:"
    )
    return f"{words}\n\n{table(headings, rows)}"
