"""How well a model answers when a policy says what it reads, and how well policies draft."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft, SelfDraft
from jspec.decode.engine import generate
from jspec.decode.stats import Stats
from jspec.eval.metrics import METRICS
from jspec.eval.questions import Asked
from jspec.eval.sample import prepared
from jspec.models.text import RowText
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Dense, Policy, ScoredPolicy, Streaming
from jspec.typing import Model

GAMMA = 4
Budget = int | float | None


@dataclasses.dataclass(frozen=True)
class Score:
    """What came of a policy: means in percent, over all tasks and of each, and its statistics."""

    score: float
    scores: dict[str, float]
    each: tuple[float, ...]
    answers: tuple[str, ...]
    stats: Stats


def with_budget(policy: Policy, budget: Budget, length: int) -> Policy:
    """The policy with a budget of positions, or a ratio; None is its own.

    A window takes what sinks leave of the budget. Raises `ValueError` for a policy without one.
    """
    if budget is None or isinstance(policy, Dense):
        return policy
    if isinstance(policy, ScoredPolicy):
        return dataclasses.replace(policy, budget=budget)
    if isinstance(policy, Streaming):
        whole = math.ceil(budget * length) if isinstance(budget, float) else budget
        return dataclasses.replace(policy, window=whole - policy.sinks)
    raise ValueError(f"{type(policy).__name__} has no budget; name its settings instead")


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    policy: Policy,
    questions: Sequence[Asked],
    *,
    length: int,
    metric: str = "recall",
    drafts: bool = False,
    batch: int = 8,
    on_batch: Callable[[int], None] | None = None,
) -> Score:
    """Greedy answers to ``questions``, of at most ``length`` tokens with theirs, and their score.

    The model reads what ``policy`` selects or, with ``drafts``, drafts over it and stays lossless.
    An answer ends at its first line break behind text. ``on_batch(count)`` hears of questions that
    were answered, which go ``batch`` at a time.
    """
    if not questions:
        raise ValueError("there are no questions; give at least one")
    settings: dict[str, Any] = {"policy_arrays": prepared(policy, model, tokenizer)}
    if drafts:
        settings |= {"draft": SelfDraft(policy), "gamma": GAMMA}
    else:
        settings |= {"draft": NoDraft(), "target": policy}
    # Answers of a length end together; all batches share their shapes, and so their programs.
    order = sorted(range(len(questions)), key=lambda at: questions[at].room)
    answers, stats = [""] * len(questions), []
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        rows = [questions[at] for at in part]
        rows += rows[-1:] * (min(batch, len(order)) - len(rows))
        texts, found = _answer(model, tokenizer, rows, length, settings)
        stats.append(found)
        for at, text in zip(part, texts, strict=False):
            answers[at] = text
        if on_batch is not None:
            on_batch(len(part))
    each = tuple(
        METRICS[metric](text, asked.question.answers)
        for text, asked in zip(answers, questions, strict=True)
    )
    scores = _by_task(questions, each)
    score = float(np.mean(list(scores.values())))
    return Score(score, scores, each, tuple(answers), Stats.merged(stats))


def _answer(
    model: Model, tokenizer: Tokenizer, asked: Sequence[Asked], length: int, settings: Any
) -> tuple[list[str], Stats]:
    special = frozenset(model.config.stop_tokens)
    rows = [RowText(tokenizer, (), special) for _ in asked]

    def on_tokens(row: int, tokens: tuple[int, ...]) -> int | None:
        text, room = rows[row], asked[row].room
        for taken, token in enumerate(tokens, start=1):
            text.feed([token])
            if len(text.tokens) >= room or "\n" in text.text.lstrip():
                return taken
        return None

    # Every row could go on to the same length, which makes programs of one shape.
    params = [SamplingParams(max_new_tokens=length - len(one.prompt), seed=0) for one in asked]
    found = generate(model, [x.prompt for x in asked], params, on_tokens=on_tokens, **settings)
    for row in rows:
        row.close()
    return [row.text for row in rows], found.stats


def _by_task(questions: Sequence[Asked], each: Sequence[float]) -> dict[str, float]:
    """Mean scores in percent, tasks in the order of the questions."""
    tasks: dict[str, list[float]] = {}
    for asked, value in zip(questions, each, strict=True):
        tasks.setdefault(asked.question.task, []).append(value)
    return {task: 100 * float(np.mean(values)) for task, values in tasks.items()}
