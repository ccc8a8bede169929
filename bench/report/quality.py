"""The section on how well each policy reads and drafts."""

from __future__ import annotations

from typing import Any

from bench.report.hata import paper as paper_of_hata
from bench.report.text import header, paragraphs, picture, table
from bench.ruler import AT_16_BYTES, HEADINGS, lines
from bench.table import kilo

# Of results that do not say so: a bucket was 2 bytes then, however many bits it had.
BEFORE = AT_16_BYTES | {"magicpig-16": "magicpig:tables=8"}


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """Scores and accepted lengths, a line a policy and budget."""
    questions = result["rows"][0]["case"]["questions"] if result["rows"] else 0
    named = result.get("at_16_bytes", BEFORE)
    words = (
        f"The bundled model, {result['dtype']}, greedy; questions of each of RULER's "
        f"{len(result['tasks'])} kinds: {questions}. *Score*: percent right, where the model reads "
        "what the policy selects. *Budget*: the share of the context that is read. *Bytes*: those "
        "of a key and KV head that are read to score it. *Accepted length*: tokens committed a "
        f"step, in the mean, where the policy drafts {result['gamma']} and the answer stays the "
        "dense one. "
        + ", ".join(f"`{name}` is `{policy}`" for name, policy in named.items())
        + ": they read as many bytes as `hata`."
    )
    return paragraphs(
        header("Quality of policies", result),
        words,
        picture(pictures, "ruler-budget", "score by budget"),
        table(HEADINGS, lines(result), left=3),
        _beside(result),
    )


def _beside(result: dict[str, Any]) -> str:
    """The paper's scores at the budgets that were run; nothing where none of them was."""
    rows = []
    for model, length, budget, policy, score in paper_of_hata()["quality"]["rows"]:
        own = {
            row["case"]["S"]: f"{row['score']:.1f}"
            for row in result["rows"]
            if row["name"] == policy
            and row["case"]["kind"] == "read"
            and row["case"]["budget"] in (None, budget)
        }
        if own:
            here = ", ".join(f"{score} ({kilo(size)})" for size, score in own.items())
            rows.append((f"{budget:.2%}", policy, here, f"{score:.2f}", f"{model}, {kilo(length)}"))
    words = (
        f"{paper_of_hata()['source']}: RULER's own questions to other models, MagicPIG with 2 to "
        "3 % of the context. What can be compared is the order."
    )
    own = table(("budget", "policy", "here (S)", "paper", "its model"), rows, left=2)
    return f"### Beside the paper\n\n{words}\n\n{own}" if rows else ""
