"""Recall of learned hashes by training loss, and of other methods that read as many bytes.

Hashes of the bundled model are learned three times from the same texts: by jspec's own loss, by the
paper's (HATA, arXiv 2506.02572, Eq. 9) and by the authors' (docs/hash_training.md). The texts are
synthetic documents of RULER's kinds; recall and mass are of documents of other seeds. Rows do
not depend on the machine.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

import jspec
from bench import cases
from bench.hash_bits import RECALL_TEXTS, documents
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.train.job import Job, Texts
from jspec.train.job import run as learn
from jspec.train.loss import VARIANTS, HashTraining

CASE = {"texts": 40}  # to learn from: a few more pairs than an epoch of the paper's draws
SMALL = {"texts": 8}
LEARNED = tuple(f"hata-{variant}" for variant in VARIANTS)


def run(settings: Settings) -> dict[str, Any]:
    """A row for each method."""
    model, tokenizer = jspec.load_bundled()
    default = SMALL if settings.quick or jax.default_backend() == "cpu" else CASE
    asked = [cases.parse(text, default) for text in settings.cases] or [default]
    rows = (row for case in asked for row in _rows(model, tokenizer, case))
    return {"dtype": str(model.dtype), "layers": model.config.num_layers, "rows": rows}


def _rows(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, case: cases.Case
) -> Iterator[dict[str, Any]]:
    texts = Texts(documents(case["texts"], 1, tokenizer), documents(RECALL_TEXTS, 2, tokenizer))
    with (
        tempfile.TemporaryDirectory() as folder,
        bar("learn hashes", model.config.num_layers) as advance,
    ):

        def on_progress(what: str, done: int, total: int) -> None:
            if done and what == "learn layers":
                advance()

        job = Job(model, texts, Path(folder, "hashes"), HashTraining(variant="paper"), True)
        report = learn(job, on_progress)
    by_method = {result["name"]: result for result in report["methods"]}
    case = case | {"R": report["bits"], "pairs": report["pairs"]}
    for name, result in by_method.items():
        row = {"operation": "hash-losses", "case": case} | result | {"budgets": report["budgets"]}
        yield row | _checked(name, result, by_method["random"])


def _checked(name: str, result: dict[str, Any], random: dict[str, Any]) -> dict[str, Any]:
    """Whether the exact method has recall 1, and a learned one more than random hashes."""
    if name == "exact":
        return {"checked": result["recall"] == [1.0] * len(result["recall"])}
    if name not in LEARNED:
        return {"checked": None}
    better = result["recall"][0] > random["recall"][0]
    reason = {} if better else {"reason": "learned hashes find no more than random ones"}
    return {"checked": better} | reason


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its recall in the earlier result; returns how many had one."""
    before = {(str(row["case"]), row["name"]): row["recall"] for row in earlier["rows"]}
    met = [row for row in result["rows"] if (str(row["case"]), row["name"]) in before]
    for row in met:
        row["recall_before"] = before[str(row["case"]), row["name"]]
    return len(met)


def headings(row: dict[str, Any]) -> list[str]:
    """Headings of a table of such rows."""
    at = [f"{what} at {budget:.1%}" for budget in row["budgets"] for what in ("recall", "mass")]
    return ["method", "texts", "pairs", "bytes", *at]


def cells(row: dict[str, Any]) -> list[str]:
    """A row's cells under `headings`."""
    case = row["case"]
    shares = zip(row["recall"], row["mass"], strict=True)
    shares_shown = [f"{share:.3f}" for pair in shares for share in pair]
    return [
        row["name"],
        str(case["texts"]),
        f"{case['pairs']:,}",
        f"{row['bytes']:g}",
        *shares_shown,
    ]


FOOT = (
    "bytes: read of a key and KV head to score it; recall: share of the best keys that are "
    "selected, mass: attention weight on what is selected, of so many percent of the keys"
)


def show(result: dict[str, Any]) -> None:
    """A line for each method."""
    rows = result["rows"]
    table = Table(title=f"hash-losses: {result['machine']['device']}", box=None)
    for heading in headings(rows[0]) if rows else ():
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(*cells(row))
    console().print(table)
    for row in rows:
        if "reason" in row:
            console().print(f"{row['name']}: {row['reason']}", markup=False)
        if "recall_before" in row:
            before = ", ".join(f"{share:.3f}" for share in row["recall_before"])
            console().print(f"{row['name']}: recall was {before}", markup=False)
    console().print(FOOT, markup=False)


SUITE = Suite(
    "hash-losses",
    "what hashes find by the loss they were learned by: jspec's, the paper's, the authors'",
    run,
    show,
    compare=compare,
    custom_clocks=True,
    case=functools.partial(cases.parse, default=CASE),
)
