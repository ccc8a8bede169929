"""RULER with every policy and budget, as a reader of the cache and as a drafter.

The bundled model answers questions of 8K and 32K tokens. A score does not depend on the machine.
Policies are compared at their defaults and where each reads as many bytes of a key to score it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

import jspec
from bench import cases
from bench.policies import scored_bytes
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.eval.evaluate import GAMMA, Run, Score, evaluate_all, with_budget
from jspec.eval.questions import Asked, ruler_questions
from jspec.eval.ruler import TASKS
from jspec.models.bundled import bundled_path
from jspec.policies import Policy, named_policy
from jspec.policies.hata import with_hashes

DENSE = "dense"
# Policies by the names of rows: with their defaults, and with settings that read 16 bytes of a key
# and KV head to score it, in a cache of bfloat16 with 128 channels.
DEFAULTS = ("streaming", "exact_topk", "hata", "quest", "loki", "magicpig")
AT_16_BYTES = {
    "quest-16": "quest:page=32",
    "loki-16": "loki:channels=8",
    "magicpig-16": "magicpig:bits=4,tables=32",
}
EQUAL_BYTES = ("hata", *AT_16_BYTES)
NAMES = (*DEFAULTS, *AT_16_BYTES)
BUDGETS = (1 / 64, 1 / 32)  # 1.56 % and 3.1 %
MORE_BUDGETS = (
    1 / 256,
    1 / 128,
    1 / 16,
)  # of the paper's figure 7, only for readers at equal bytes
CASE = {"S": 8192, "questions": 3}  # tokens, and questions of each task
BATCH = 12  # questions at a time


def run(settings: Settings) -> dict[str, Any]:
    """The bundled model at each length; answers of drafts are checked against dense ones."""
    model, tokenizer = jspec.load_bundled()
    asked = [cases.parse(text, CASE) for text in settings.cases] or _cases(settings)
    rows = (row for case in asked for row in _rows(model, tokenizer, case, settings))
    header = {"dtype": str(model.dtype), "gamma": GAMMA, "tasks": list(TASKS)}
    return {**header, "at_16_bytes": AT_16_BYTES, "rows": rows}


def _cases(settings: Settings) -> list[cases.Case]:
    if settings.quick:
        return [{"S": 2048, "questions": 1}]
    lengths = (8192, 32768) if jax.default_backend() == "gpu" else (8192,)
    return [CASE | {"S": length} for length in lengths]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy by its name in tables, and its share of the context."""

    name: str
    budget: float | None = None
    drafts: bool = False

    def policy(self, length: int) -> Policy:
        policy = named_policy(AT_16_BYTES.get(self.name, self.name))
        policy = with_budget(policy, self.budget)
        return with_hashes(policy, bundled_path())


def settings_of(*, quick: bool) -> list[Setting]:
    """The settings at a length: readers and drafters of each policy, dense reading first."""
    settings = [Setting(DENSE)]
    for budget in BUDGETS[: 1 if quick else None]:
        settings += [Setting(name, budget, drafts) for drafts in (False, True) for name in NAMES]
    if not quick:
        ablated = ("exact_topk", *EQUAL_BYTES)
        settings += [Setting(name, budget) for budget in MORE_BUDGETS for name in ablated]
    return settings


def _rows(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, case: cases.Case, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield a row per setting; all share one prefill of a question."""
    length = case["S"]
    questions = ruler_questions(tokenizer, TASKS, length, case["questions"])
    asked = [
        setting
        for setting in settings_of(quick=settings.quick)
        if setting.name == DENSE or settings.wants(setting.name)
    ]
    runs = [Run(setting.policy(length), setting.drafts) for setting in asked]
    scores = scores_of(model, tokenizer, runs, questions, length)
    for setting, score in zip(asked, scores, strict=True):
        yield _row(setting, score, scores[0], case, model)


def scores_of(
    model: jspec.Decoder,
    tokenizer: jspec.Tokenizer,
    runs: Sequence[Run],
    questions: Sequence[Asked],
    length: int,
) -> list[Score]:
    """The score of each of ``runs`` on questions of ``length`` tokens; shows a progress bar."""
    with bar(f"ruler {cases.kilo(length)}", len(runs) * len(questions)) as advance:

        def on_batch(count: int) -> None:
            for _ in range(count):
                advance()

        settings = {"length": length, "batch": BATCH, "on_batch": on_batch}
        return evaluate_all(model, tokenizer, runs, questions, **settings)


def _row(
    setting: Setting, score: Score, dense: Score, case: cases.Case, model: jspec.Decoder
) -> dict[str, Any]:
    kind = "draft" if setting.drafts else "read"
    row = {
        "operation": "ruler",
        "case": case | {"budget": setting.budget, "kind": kind},
        "name": setting.name,
        "bytes": bytes_to_score(setting.policy(case["S"]), model),
        "score": score.score,
        "scores": score.scores,
        "checked": None,
    }
    if setting.drafts:
        same = sum(a == b for a, b in zip(score.answers, dense.answers, strict=True))
        # In bfloat16 a pass over several tokens rounds differently from a pass over one.
        exact = model.dtype == jax.numpy.float32
        row |= {
            "mean_accepted_length": score.stats.mean_accepted_length,
            "acceptance_rate": score.stats.acceptance_rate,
            "identical": same,
            "checked": same == len(score.answers) if exact else None,
        }
    return row


def bytes_to_score(policy: Policy, model: jspec.Decoder) -> float:
    """Bytes of a key and KV head that a policy reads to score it, in a cache of bfloat16."""
    spec = model.config.layers[0]
    return scored_bytes(policy, spec, jax.numpy.bfloat16) / spec.kv_heads


HEADINGS = ("S", "budget", "policy", "bytes", "score", "accepted length")


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells under `HEADINGS`: a line per policy and budget, as reader and as drafter."""
    by_setting: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        case = row["case"]
        by_kind = by_setting.setdefault((case["S"], case["budget"], row["name"]), {})
        by_kind[case["kind"]] = row
    cells = []
    for (length, budget, name), by_kind in by_setting.items():
        read, draft = by_kind["read"], by_kind.get("draft")
        shown = "" if draft is None else f"{draft['mean_accepted_length']:.2f}"
        share = "all" if budget is None else f"{budget:.2%}"
        bytes_read = f"{read['bytes']:g}" if read["bytes"] else ""
        cells.append((cases.kilo(length), share, name, bytes_read, f"{read['score']:.1f}", shown))
    return cells


def show(result: dict[str, Any]) -> None:
    """Print a line per policy and budget."""
    table = Table(title=f"ruler: {result['machine']['device']}, percent right", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for line in lines(result):
        table.add_row(*line)
    console().print(table)
    console().print(FOOT, markup=False)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its score in the earlier result; returns how many had one."""
    before = {(str(row["case"]), row["name"]): row["score"] for row in earlier["rows"]}
    met = [row for row in result["rows"] if (str(row["case"]), row["name"]) in before]
    for row in met:
        row["score_before"] = before[str(row["case"]), row["name"]]
    return len(met)


FOOT = (
    "budget: share of the context that is read; bytes: of a key and KV head, read to score it; "
    "accepted length: mean, as a drafter with gamma 4"
)

SUITE = Suite(
    "ruler",
    "answers and accepted drafts of every policy and budget on the bundled model",
    run,
    show,
    rivals=NAMES,
    compare=compare,
    custom_clocks=True,
    case=functools.partial(cases.parse, default=CASE),
)
