"""`jspec eval`: how well the model answers with each policy and budget, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jspec.cli.compile_cache import keep_programs
from jspec.cli.show import counted_bars, environment
from jspec.eval import heatmap
from jspec.eval.evaluate import Budget, Run, Score, budget_of, evaluate_all, with_budget
from jspec.eval.jsonl import read_questions
from jspec.eval.questions import Asked, ruler_questions, tokenized_questions
from jspec.eval.ruler import TASKS
from jspec.extras import check_matplotlib
from jspec.models.bundled import bundled_path
from jspec.models.checkpoint import load_model
from jspec.models.tokenizer import Tokenizer, load_tokenizer
from jspec.policies import Policy, named_policy
from jspec.policies.hata import with_hashes

Asking = tuple[str, Budget, Policy]  # a policy's name with its settings, and its budget


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    runs = _runs(arguments)
    user_questions, metric = None, arguments.metric
    if arguments.tasks != "ruler":
        user_questions, usual = read_questions(arguments.tasks)
        metric = metric or usual
    if arguments.heatmap:
        if len(runs) > 1:
            raise ValueError("--heatmap takes one --policy and at most one --budget")
        check_matplotlib()
    if arguments.compile_cache:
        keep_programs()
    path = Path(arguments.model or bundled_path())
    tokenizer, model = load_tokenizer(path), load_model(path)
    if arguments.length > model.config.max_context:
        raise ValueError(
            f"--length {arguments.length} exceeds the model's context of {model.config.max_context}"
        )
    runs = [(name, budget, with_hashes(policy, path)) for name, budget, policy in runs]
    questions = _questions(arguments, tokenizer, user_questions)
    settings = {"length": arguments.length, "metric": metric or "recall", "batch": arguments.batch}
    with counted_bars(transient=True) as bars:
        task = bars.add_task("answers", total=len(runs) * len(questions))
        scores = evaluate_all(
            *(model, tokenizer, [Run(policy, arguments.draft) for *_, policy in runs], questions),
            on_batch=lambda count: bars.advance(task, count),
            **settings,
        )
    results = [
        _result(name, budget, score, arguments, settings)
        for (name, budget, _), score in zip(runs, scores, strict=True)
    ]
    if arguments.json:
        output = results[0] if len(results) == 1 else {"results": results}
        print(json.dumps(output | {"environment": environment()}))
    else:
        shows = Console(highlight=False)
        shows.print(_title(arguments))
        shows.print(_table(results, arguments))
    if arguments.heatmap:  # after the answers are printed, which an error here must not lose
        _heatmap(arguments, model, tokenizer, runs[0])
    return 0


def _runs(arguments: argparse.Namespace) -> list[Asking]:
    """Every policy with every budget, checked before a model is loaded."""
    for task in _tasks(arguments):
        if task not in TASKS:
            raise ValueError(f"--only {task!r} is unknown; RULER's tasks are {', '.join(TASKS)}")
    names = arguments.policy or ["dense"]
    if arguments.length < 1 or arguments.batch < 1 or arguments.examples < 1:
        raise ValueError("--length, --batch and --examples must be at least 1")
    budgets = [_budget(text) for text in arguments.budget] or [None]
    if arguments.budget and all(name == "dense" for name in names):
        raise ValueError("--budget goes with a --policy that has one; dense reads all there is")
    runs = []
    for name in names:
        policy = named_policy(name)
        for budget in budgets if name != "dense" else [None]:
            try:
                budgeted = with_budget(policy, budget)
            except ValueError as error:
                raise ValueError(f"policy {name}: {error}") from None
            runs.append((name, budget_of(budgeted), budgeted))
    return runs


def _budget(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ValueError(f"--budget {text!r} must be a whole number of positions, or a ratio")


def _questions(
    arguments: argparse.Namespace, tokenizer: Tokenizer, user_questions: Sequence[Any] | None
) -> list[Asked]:
    if user_questions is not None:
        return tokenized_questions(
            tokenizer, user_questions, arguments.length, arguments.max_new_tokens
        )
    settings = (arguments.length, arguments.examples, arguments.seed)
    return ruler_questions(tokenizer, _tasks(arguments), *settings)


def _tasks(arguments: argparse.Namespace) -> Sequence[str]:
    return arguments.only.split(",") if arguments.only else TASKS


def _result(
    name: str,
    budget: Budget,
    score: Score,
    arguments: argparse.Namespace,
    settings: dict[str, Any],
) -> dict[str, Any]:
    result = {
        "score": score.score,
        "scores": score.scores,
        "policy": name,
        "budget": budget,
        "length": arguments.length,
        "metric": settings["metric"],
        "drafts": arguments.draft,
        "questions": len(score.each),
        "seed": arguments.seed,
        "stats": score.stats.as_dict(),
    }
    return result | ({"answers": list(score.answers)} if arguments.answers else {})


def _title(arguments: argparse.Namespace) -> str:
    what = "drafts of each policy" if arguments.draft else "what each policy reads"
    return f"{Path(arguments.tasks).name}, {arguments.length:,} tokens, {what}: percent right"


def _table(results: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> Table:
    tasks = list(results[0]["scores"])
    headings = ["budget", "score", *(task.replace("_", " ") for task in tasks)]
    headings += ["mean accepted length"] if arguments.draft else []
    # With a word a line and no frame, RULER's six tasks fit 80 columns; policies give way.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", overflow="fold")
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for result in results:
        row = [result["policy"], "all" if result["budget"] is None else f"{result['budget']:g}"]
        row += [f"{result['score']:.1f}", *(f"{result['scores'][task]:.1f}" for task in tasks)]
        if arguments.draft:
            row.append(f"{result['stats']['mean_accepted_length']:.2f}")
        table.add_row(*row)
    return table


def _heatmap(arguments: argparse.Namespace, model: Any, tokenizer: Tokenizer, run: Asking) -> None:
    name, budget, policy = run
    lengths = [arguments.length * part // 4 for part in range(1, 5)]
    settings = {"examples": arguments.examples, "seed": arguments.seed, "batch": arguments.batch}
    shares = heatmap.needles(model, tokenizer, policy, lengths, **settings)
    title = name if budget is None else f"{name}, budget {budget:g}"
    heatmap.draw(shares, lengths, title, arguments.heatmap)
