"""The sections on drafts that verification guides: what is accepted, alike, and what it costs."""

from __future__ import annotations

from typing import Any

from bench import collect, overlap
from bench.acceptance import HEADINGS, by_plan
from bench.report.ceilings import rates
from bench.report.text import absent, header, paragraphs, table
from bench.table import cell


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Mean accepted lengths of drafters at an equal ratio."""
    words = (
        "Committed tokens a verification, the corrected or bonus token included; *over Vegas*: how "
        "much more than by Vegas as published, the mean over the same texts and its standard "
        "error; *by position*: how often a draft position is accepted of the times it was drafted. "
        "The bundled model, on source files of Python's standard library and documents "
        "that ask for facts they gave before, by turns. All drafters start from one prefill and "
        "read the same share of the context, and their greedy tokens are those of plain decoding. "
        "The figures are of the model and its texts: they do not depend on the machine."
    )
    parts = [f"### {title}\n\n{table(HEADINGS, lines)}" for title, lines in by_plan(result).items()]
    return paragraphs(header("Accepted draft tokens", result), words, *parts)


def alike(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What tokens of a pass have in common in what they pick, by their distance."""
    words = (
        "The share of picked positions that two tokens of a pass have in common where each picks "
        "by its own logits, in the mean over texts and layers of the bundled model, by how far the "
        "tokens are apart. Figure 7 of Yue et al. 2026: the tokens that differ most are the first "
        "and the last."
    )
    parts = []
    for row in result["rows"]:
        case = row["case"]
        parts.append(
            f"### {case['texts']} texts of {case['context']:,} tokens, {100 * case['ratio']:g} % "
            "of the context\n"
        )
        headings = [f"{d} apart" for d in range(1, len(row["overlap"]))]
        parts.append(table(headings, [overlap.by_distance(row)], left=0))
    return paragraphs(header("What draft tokens have in common", result), words, *parts)


def collected(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """How much longer verification takes where it says which keys matter."""
    words = (
        "Time beyond that of attention by itself, in percent, where the pass also scores every "
        "key: by logits of one pooled query a KV head, or by softmax weights, which read the keys "
        "once more. Yue et al. 2026 (figure 6, H100, 12 tokens): two tokens 5 % and 37 %, all "
        "53 % and 189 %, for Qwen3-8B and gpt-oss-20b."
    )
    found = collect.over_alone(result)
    names = list(found[0][1]) if found else []
    lines = [
        (
            *(cell(column, case[column]) for column in collect.COLUMNS),
            *(f"{100 * more[name]:+.1f}" if name in more else "" for name in names),
        )
        for case, more in found
    ]
    return paragraphs(
        header("Scores of keys beside verification", result),
        words,
        table((*collect.COLUMNS, *names), lines, left=0),
        rates(result["ceilings"]),
        absent(result),
    )
