"""The sections on learning hashes, and on what they find by their loss and by their bits."""

from __future__ import annotations

from typing import Any

from bench import hash_bits, hash_losses
from bench.hash_training import HEADINGS, cells
from bench.report.text import header, paragraphs, picture, table
from jspec.train.attention import KEYS, QUERIES
from jspec.train.loss import HashTraining


def section(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What learning the hashes of a model takes."""
    words = (
        "Learning the hashes of a model's layers one after another, by SGD over 15 draws of 98,304 "
        "pairs with 20 steps each, all KV heads of a layer at once. Wall time in seconds: medians "
        "of a layer, from queries and keys in the host's memory, and all layers together. "
        "Compiling is left out. Learned hashes found more of the best keys than the random ones "
        "that they began as."
    )
    rows = [cells(row) for row in result["rows"] if row["checked"]]
    return paragraphs(header("Learning hashes", result), words, table(HEADINGS, rows, left=0))


def losses(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What hashes find by the loss that they were learned by."""
    rows = result["rows"]
    words = (
        f"Hashes of {rows[0]['case']['R']} bits for all {result['layers']} layers of the bundled "
        f"model, {result['dtype']}, learned from the same synthetic documents by jspec's own loss "
        "(`hata-attention`), by the paper's and by the authors'; `random` are the hashes that the "
        "last two began with. *Pairs*: of a query and a key, that the paper's and the authors' "
        "losses learn from, one query a text; an epoch draws up to "
        f"{HashTraining().pairs:,} of them. jspec's own takes {QUERIES} queries of each text, with "
        f"up to {KEYS:,} keys each. *Recall*: share of the best keys that a "
        "selection of so many percent of them has, for queries of other documents. *Mass*: the "
        "attention weight on what is selected. All but `exact` read as many bytes of a key: Loki "
        "channels of bfloat16, Quest its part of the bounds of a page."
    )
    table_of = table(hash_losses.headings(rows[0]), map(hash_losses.cells, rows), left=1)
    return paragraphs(header("Losses of a hash", result), words, table_of)


def bits(result: dict[str, Any], pictures: dict[str, str], paper: dict[str, Any]) -> str:
    """What hashes of each number of bits find."""
    rows = result["rows"]
    questions = rows[0]["case"]["questions"] if rows else 0
    words = (
        f"Hashes of the bundled model, {result['dtype']}, learned anew for each number of bits "
        "from synthetic documents. *Recall*: share of the best keys that a selection of "
        f"{result['budget']:.2%} of them has, for queries of other documents; *of random*: by the "
        "hashes that learning began with. *Mass*: the attention weight on what is selected. "
        "*Score*: percent right where the model reads that selection; questions of each of "
        f"RULER's {len(result['tasks'])} kinds: {questions}."
    )
    return paragraphs(
        header("Bits of a hash", result),
        words,
        picture(pictures, "hash-bits", "recall, mass and score by bits"),
        table(hash_bits.HEADINGS, [hash_bits.cells(row) for row in rows], left=1),
    )
