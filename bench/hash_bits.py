"""Recall and scores by the number of hash bits; hashes are trained separately for each.

The ablation of figure 8 of HATA (arXiv 2506.02572). Hashes are learned from synthetic documents of
RULER's kinds, as the bundled ones are from those and source; recall and mass are of documents of
other seeds, the scores of RULER's own questions. Nothing of a row depends on the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

import jspec
from bench import cases, ruler
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.eval.evaluate import Run, Score
from jspec.eval.questions import ruler_questions
from jspec.eval.ruler import TASKS, training_document
from jspec.ops.hash import BITS
from jspec.policies import Dense, ExactTopK, Hata
from jspec.train.job import Job, Texts
from jspec.train.job import run as learn
from jspec.train.loss import HashTraining
from jspec.train.recall import BUDGETS

EXACT = "exact"
# S: tokens of a question; texts: to learn from, of TEXT tokens; questions: of each task.
CASE = {"S": 8192, "texts": 16, "questions": 3}
SMALL = {"S": 2048, "texts": 6, "questions": 1}
TEXT = 4096
RECALL_TEXTS = 4  # texts of the recall
BUDGET = 1 / BUDGETS[0]  # 1.56 %
LEARNING = HashTraining(variant="attention")  # as the bundled hashes were learned


def run(settings: Settings) -> dict[str, Any]:
    """A row for each number of bits, and rows of exact top-k and dense reading."""
    model, tokenizer = jspec.load_bundled()
    default = SMALL if settings.quick or jax.default_backend() == "cpu" else CASE
    asked = [cases.parse(text, default) for text in settings.cases] or [default]
    rows = (row for case in asked for row in _rows(model, tokenizer, case, settings))
    return {"dtype": str(model.dtype), "budget": BUDGET, "tasks": list(TASKS), "rows": rows}


def documents(count: int, seed: int, tokenizer: jspec.Tokenizer) -> list[list[int]]:
    """Token ids of synthetic documents, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    return [tokenizer.encode(training_document(TEXT - 2, rng)[0]) for _ in range(count)]


def _rows(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, case: cases.Case, settings: Settings
) -> Iterator[dict[str, Any]]:
    widths = BITS[:2] if settings.quick else BITS
    texts = Texts(documents(case["texts"], 1, tokenizer), documents(RECALL_TEXTS, 2, tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        reports = {}
        with bar("learn hashes", len(widths) * model.config.num_layers) as advance:

            def on_progress(what: str, done: int, total: int) -> None:
                if done and what == "learn layers":
                    advance()

            for bits in widths:
                asked = dataclasses.replace(LEARNING, bits=bits)
                reports[bits] = learn(
                    Job(model, texts, Path(folder, str(bits)), asked), on_progress
                )
        hashed = [
            Hata(budget=BUDGET, bits=bits, hashes=str(Path(folder, str(bits)))) for bits in widths
        ]
        questions = ruler_questions(tokenizer, TASKS, case["S"], case["questions"])
        runs = [Run(policy) for policy in (Dense(), ExactTopK(budget=BUDGET), *hashed)]
        dense, exact, *scores = ruler.scores_of(model, tokenizer, runs, questions, case["S"])
    yield _row("dense", None, dense, None, case)
    yield _row(EXACT, None, exact, recall_of(reports[widths[0]], EXACT), case)
    for bits, score in zip(widths, scores, strict=True):
        learned, random = (
            recall_of(reports[bits], name) for name in (f"hata-{LEARNING.variant}", "random")
        )
        row = _row("hata", bits, score, learned, case)
        better = learned["recall"] > random["recall"]
        reason = {} if better else {"reason": "learned hashes find no more than random ones"}
        yield row | {"checked": better, "random_recall": random["recall"]} | reason


def recall_of(report: dict[str, Any], method: str) -> dict[str, float]:
    """Recall and mass of a method at the first budget, by the report of hash training."""
    result = next(result for result in report["methods"] if result["name"] == method)
    return {"recall": result["recall"][0], "mass": result["mass"][0]}


def _row(
    name: str, bits: int | None, score: Score, recall: dict[str, float] | None, case: cases.Case
) -> dict[str, Any]:
    return {
        "operation": "hash-bits",
        "case": case | {"R": bits},
        "name": name,
        "score": score.score,
        "scores": score.scores,
        "checked": None,
        **(recall or {}),
    }


HEADINGS = ("policy", "R", "bytes", "recall", "of random", "mass", "score")
FOOT = (
    "R: bits of a hash; bytes: of a key and KV head; recall: share of the best keys that are "
    "selected, of random: by hashes that were not learned; mass: attention weight on what is "
    "selected; score: percent right on RULER's tasks"
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's cells under `HEADINGS`."""
    bits = row["case"]["R"]
    shares = (
        f"{row[key]:.3f}" if key in row else "" for key in ("recall", "random_recall", "mass")
    )
    width = ("", "") if bits is None else (str(bits), f"{bits // 8}")
    return (row["name"], *width, *shares, f"{row['score']:.1f}")


def show(result: dict[str, Any]) -> None:
    """A line for each number of bits."""
    title = f"hash-bits: {result['machine']['device']}, budget {result['budget']:.2%}"
    table = Table(title=title, box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console().print(table)
    for row in result["rows"]:
        if "reason" in row:
            console().print(f"R={row['case']['R']}: {row['reason']}", markup=False)
    console().print(FOOT, markup=False)


SUITE = Suite(
    "hash-bits",
    "recall of hashes of 32 to 256 bits, trained separately on the bundled model",
    run,
    show,
    compare=ruler.compare,
    custom_clocks=True,
    case=functools.partial(cases.parse, default=CASE),
)
