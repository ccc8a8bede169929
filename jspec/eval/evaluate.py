"""How well a model answers when a policy says what it reads, and how well policies draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.programs import PROGRAMS
from jspec.decode.settings import PLAIN
from jspec.decode.state import DecodeState
from jspec.decode.stats import Stats
from jspec.eval.questions import Asked, score
from jspec.eval.sample import prepared
from jspec.models.text import RowText
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Dense, Policy, ScoredPolicy, Streaming
from jspec.typing import Model

GAMMA = 4
Budget = int | float | None


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of a policy.

    Attributes:
        score: mean over tasks, in percent.
        scores: mean of each task, in percent.
        each: score of each question, in [0, 1].
        answers: text of each answer.
        stats: statistics of decoding.
    """

    score: float
    scores: dict[str, float]
    each: tuple[float, ...]
    answers: tuple[str, ...]
    stats: Stats


def budget_of(policy: Policy) -> Budget:
    """The number of positions that a policy reads, or their share; None without a budget."""
    if isinstance(policy, Streaming):
        return policy.window + (0 if isinstance(policy.window, float) else policy.sinks)
    return getattr(policy, "budget", None)


def with_budget(policy: Policy, budget: Budget) -> Policy:
    """Replace the budget of a policy.

    Args:
        policy: the policy.
        budget: number of positions, or their share of the context; None changes nothing. For
            `Streaming`, a number counts sinks and window.

    Raises:
        ValueError: the policy has no budget, or sinks leave no window.
    """
    if budget is None or isinstance(policy, Dense):
        return policy
    if isinstance(policy, ScoredPolicy):
        return dataclasses.replace(policy, budget=budget)
    if isinstance(policy, Streaming):
        if isinstance(budget, float):
            return dataclasses.replace(policy, window=budget)
        if budget <= policy.sinks:
            raise ValueError(
                f"budget={budget} must be more than sinks={policy.sinks}, which it holds as well"
            )
        return dataclasses.replace(policy, window=budget - policy.sinks)
    raise ValueError(f"{type(policy).__name__} has no budget; name its settings instead")


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    policy: Policy,
    questions: Sequence[Asked],
    *,
    length: int,
    drafts: bool = False,
    batch: int = 8,
    on_batch: Callable[[int], None] | None = None,
) -> Score:
    """Answer questions greedily and score the answers.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        policy: selects the positions that the model reads.
        questions: the questions, each with its metric.
        length: the most tokens of a prompt with its answer.
        drafts: whether the policy only drafts, so that decoding is lossless.
        batch: questions decoded at a time.
        on_batch: called after each batch with its number of questions.

    Returns:
        The scores, answers and statistics.
    """
    runs = [Run(policy, drafts)]
    settings = {"length": length, "batch": batch, "on_batch": on_batch}
    return evaluate_all(model, tokenizer, runs, questions, **settings)[0]


@dataclasses.dataclass(frozen=True)
class Run:
    """A policy to evaluate; with ``drafts`` it only drafts, so that decoding is lossless."""

    policy: Policy
    drafts: bool = False

    def settings(self, model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
        """The keyword arguments of `generate` for this run."""
        settings = {"policy_params": prepared(self.policy, model, tokenizer)}
        if self.drafts:
            return settings | {"draft": SelfDraft(self.policy), "gamma": GAMMA}
        return settings | {"draft": NoDraft(), "target": self.policy}


def evaluate_all(
    model: Model,
    tokenizer: Tokenizer,
    runs: Sequence[Run],
    questions: Sequence[Asked],
    *,
    length: int,
    batch: int = 8,
    on_batch: Callable[[int], None] | None = None,
) -> list[Score]:
    """Evaluate several runs, which share one prefill of each question.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        runs: the policies.
        questions: the questions.
        length: as in `evaluate`.
        batch: as in `evaluate`.
        on_batch: called after each batch of each run with its number of questions.

    Returns:
        The score of each run.

    Raises:
        ValueError: there are no questions.
    """
    if not questions:
        raise ValueError("there are no questions; give at least one")
    settings = [run.settings(model, tokenizer) for run in runs]
    answers = [[""] * len(questions) for _ in runs]
    stats: list[list[Stats]] = [[] for _ in runs]
    # Answers of a length end together; all batches share their shapes, and so their programs.
    order = sorted(range(len(questions)), key=lambda at: questions[at].room)
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        rows = [questions[at] for at in part]
        rows += rows[-1:] * (min(batch, len(order)) - len(rows))
        prefilled = _prefilled(model, rows, length) if len(runs) > 1 else None
        for run_answers, run_stats, run_settings in zip(answers, stats, settings, strict=True):
            texts, batch_stats = _answer(model, tokenizer, rows, length, run_settings, prefilled)
            run_stats.append(batch_stats)
            for at, text in zip(part, texts, strict=False):
                run_answers[at] = text
            if on_batch is not None:
                on_batch(len(part))
    return [
        _score(questions, run_answers, run_stats)
        for run_answers, run_stats in zip(answers, stats, strict=True)
    ]


def _score(questions: Sequence[Asked], answers: Sequence[str], stats: Sequence[Stats]) -> Score:
    each = tuple(
        score(asked.question, text) for text, asked in zip(answers, questions, strict=True)
    )
    scores = _by_task(questions, each)
    return Score(
        float(np.mean(list(scores.values()))), scores, each, tuple(answers), Stats.merged(stats)
    )


def _params(asked: Sequence[Asked], length: int) -> list[SamplingParams]:
    """Parameters that let every row grow to ``length``, so that all batches share programs."""
    return [SamplingParams(max_new_tokens=length - len(one.prompt), seed=0) for one in asked]


def _prefilled(model: Model, asked: Sequence[Asked], length: int) -> DecodeState:
    config = dataclasses.replace(PLAIN, gamma=GAMMA)  # rings have room for a draft
    prompts = [one.prompt for one in asked]
    return start_decoding(model, prompts, _params(asked, length), config, run=PROGRAMS)


def _answer(
    model: Model,
    tokenizer: Tokenizer,
    asked: Sequence[Asked],
    length: int,
    settings: dict[str, Any],
    prefilled: DecodeState | None,
) -> tuple[list[str], Stats]:
    ends = model.config.stop_tokens
    rows = [RowText(tokenizer, (), ends, one.prompt) for one in asked]

    def on_tokens(row: int, tokens: tuple[int, ...]) -> int | None:
        text, room = rows[row], asked[row].room
        for count, token in enumerate(tokens, start=1):
            text.feed([token])
            if asked[row].question.complete(text.text) or len(text.tokens) >= room:
                return count
        return None

    prompts, params = [one.prompt for one in asked], _params(asked, length)
    settings = settings | {"on_tokens": on_tokens, "prefilled": prefilled}
    outputs = generate(model, prompts, params, **settings)
    for row in rows:
        row.close()
    return [row.text for row in rows], outputs.stats


def _by_task(questions: Sequence[Asked], each: Sequence[float]) -> dict[str, float]:
    """Mean scores in percent, tasks in the order of the questions."""
    tasks: dict[str, list[float]] = {}
    for asked, value in zip(questions, each, strict=True):
        tasks.setdefault(asked.question.task, []).append(value)
    return {task: 100 * float(np.mean(values)) for task, values in tasks.items()}
