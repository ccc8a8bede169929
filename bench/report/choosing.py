"""The section on gamma="auto" against every fixed gamma."""

from __future__ import annotations

from typing import Any

from bench import auto
from bench.report.text import header, paragraphs, table


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    worst = auto.worst(result)
    return paragraphs(
        header('gamma="auto"', result),
        f"Bundled model, {result['dtype']}, {auto.NEW_TOKENS} new tokens on prompts of the "
        f"standard library's source, chunks of {auto.CHUNK} steps. gamma 0 is plain decoding "
        "beside the drafter.",
        "*tok/s*: by wall-clock over several batches of texts, compiling and prefill excluded; *vs "
        "best*: against the best fixed gamma of the case. Greedy tokens were checked against plain "
        "decoding, sampled ones were counted.",
        table(auto.HEADINGS, map(auto.cells, result["rows"])),
        worst and f"{worst}.",
    )
