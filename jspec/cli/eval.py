"""`jspec eval`: how well the model answers with each policy and budget, as a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jspec.cli.compile_cache import keep_programs
from jspec.cli.show import PlainConsole, counted_bars, environment
from jspec.eval import heatmap, ruler, ruler_bytes
from jspec.eval.evaluate import Budget, Run, Score, budget_of, evaluate_all, with_budget
from jspec.eval.fitting import ruler_bytes_questions, ruler_questions
from jspec.eval.jsonl import read_questions
from jspec.eval.metrics import CHINESE, check_jieba
from jspec.eval.questions import Asked, Question, tokenized_questions
from jspec.eval.ruler_documents import Documents, read_documents
from jspec.extras import check_matplotlib
from jspec.models.bundled import bundled_path
from jspec.models.chat import ChatTemplate, load_chat_template
from jspec.models.checkpoint import load_model
from jspec.models.hashes import FOLDER
from jspec.models.tokenizer import Tokenizer, load_tokenizer
from jspec.policies import Policy, named_policy
from jspec.policies.hata import with_hashes

MAX_COLUMNS = 6  # tasks
Asking = tuple[str, Budget, Policy]  # a policy's name with its settings, and its budget
# Tasks that jspec generates, by the name of the collection; others are files.
TASKS = {"ruler": tuple(ruler.TASKS), "ruler-bytes": ruler_bytes.TASKS}
# The flags that each reads, and that a file reads.
FLAGS = {"ruler": ("only", "qa", "chat"), "ruler-bytes": ("only",)}
FILE_FLAGS = ("metric", "max_new_tokens", "chat")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    _check_flags(arguments)
    runs = _runs(arguments)
    user_questions = None if arguments.tasks in TASKS else _read(arguments)
    documents = dict(map(read_documents, arguments.qa))
    tasks = _tasks(arguments, documents)
    if arguments.heatmap:
        if len(runs) > 1:
            raise ValueError("--heatmap takes one --policy and at most one --budget")
        check_matplotlib()
        heatmap.check_picture(arguments.heatmap)
    if arguments.compile_cache:
        keep_programs()
    path = Path(arguments.model or bundled_path())
    tokenizer, model = load_tokenizer(path), load_model(path)
    if arguments.length > model.config.max_context:
        raise ValueError(
            f"--length {arguments.length} exceeds the model's context of {model.config.max_context}"
        )
    runs = [(name, budget, with_hashes(policy, path / FOLDER)) for name, budget, policy in runs]
    template = _template(path) if arguments.chat else None
    if user_questions is not None:
        sizes = (arguments.length, arguments.max_new_tokens)
        questions = tokenized_questions(tokenizer, user_questions, *sizes, template)
    else:
        questions = _generated(arguments, tokenizer, tasks, documents, template)
    needles = {"examples": arguments.examples, "seed": arguments.seed}
    lengths: list[int] = []
    if arguments.heatmap:  # what it cannot ask is refused before anything is answered
        lengths = heatmap.lengths_up_to(tokenizer, arguments.length, **needles)
    settings = {"length": arguments.length, "batch": arguments.batch}
    with counted_bars(transient=True) as bars:
        task = bars.add_task("answers", total=len(runs) * len(questions))
        scores = evaluate_all(
            *(model, tokenizer, [Run(policy, arguments.draft) for *_, policy in runs], questions),
            on_batch=lambda count: bars.advance(task, count),
            **settings,
        )
    results = [
        _result(name, budget, score, arguments, questions)
        for (name, budget, _), score in zip(runs, scores, strict=True)
    ]
    if arguments.json:
        output = results[0] if len(results) == 1 else {"results": results}
        print(json.dumps(output | {"environment": environment()}))
    else:
        shows = PlainConsole(highlight=False)
        shows.print(_title(arguments))
        shows.print(_table(results, arguments))
    if arguments.heatmap:  # after the answers are printed, which an error here must not lose
        name, budget, policy = runs[0]
        title = name if budget is None else f"{name}, budget {budget:g}"
        settings = needles | {"batch": arguments.batch}
        shares = heatmap.needles(model, tokenizer, policy, lengths, **settings)
        heatmap.draw(shares, lengths, title, arguments.heatmap)
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that the tasks do not read."""
    reads = FLAGS.get(arguments.tasks, FILE_FLAGS)
    for flag in ("only", "qa", *FILE_FLAGS):
        if flag not in reads and getattr(arguments, flag):
            raise ValueError(f"--{flag.replace('_', '-')} does not go with {arguments.tasks}")


def _runs(arguments: argparse.Namespace) -> list[Asking]:
    """Every policy with every budget, checked before a model is loaded."""
    names = arguments.policy or ["dense"]
    for flag in ("length", "batch", "examples", "max_new_tokens"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value} must be at least 1")
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


def _read(arguments: argparse.Namespace) -> list[Question]:
    """The questions of a file, scored by ``--metric`` where that is named."""
    try:
        questions = read_questions(arguments.tasks)
    except FileNotFoundError:
        raise ValueError(
            f"{arguments.tasks} does not exist; name {', '.join(TASKS)} or a file of questions"
        ) from None
    if arguments.metric is None:
        return questions
    if arguments.metric in CHINESE:
        check_jieba()
    return [dataclasses.replace(question, metric=arguments.metric) for question in questions]


def _tasks(arguments: argparse.Namespace, documents: dict[str, Documents]) -> Sequence[str]:
    """The tasks to generate: all whose questions there are, or those that ``--only`` names."""
    known = TASKS.get(arguments.tasks, ())
    if not arguments.only:
        return [task for task in known if task not in ruler.QA or task in documents]
    tasks = arguments.only.split(",")
    for task in tasks:
        if task not in known:
            raise ValueError(
                f"--only {task!r} is unknown; tasks of {arguments.tasks} are {', '.join(known)}"
            )
    return tasks


def _generated(
    arguments: argparse.Namespace,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    documents: dict[str, Documents],
    template: ChatTemplate | None,
) -> list[Asked]:
    settings = (arguments.length, arguments.examples, arguments.seed)
    if arguments.tasks == "ruler-bytes":
        return ruler_bytes_questions(tokenizer, tasks, *settings)
    sources = {"documents": documents, "template": template}
    return ruler_questions(tokenizer, tasks, *settings, **sources)


def _template(path: Path) -> ChatTemplate:
    template = load_chat_template(path)
    if template is None:
        raise ValueError(f"{path} has no chat template; leave out --chat")
    return template


def _result(
    name: str,
    budget: Budget,
    score: Score,
    arguments: argparse.Namespace,
    questions: Sequence[Asked],
) -> dict[str, Any]:
    result = {
        "score": score.score,
        "scores": score.scores,
        "policy": name,
        "budget": budget,
        "length": arguments.length,
        "metrics": {asked.question.task: asked.question.metric for asked in questions},
        "chat": arguments.chat,
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
    """A line a run with few tasks, else a line a task."""
    tasks = list(results[0]["scores"])
    headings = ["policy", "budget", "score", *tasks]
    rows = [headings + (["tokens per step"] if arguments.draft else [])]
    for result in results:
        budget = "all" if result["budget"] is None else f"{result['budget']:g}"
        row = [result["policy"], budget, f"{result['score']:.1f}"]
        row += [f"{result['scores'][task]:.1f}" for task in tasks]
        if arguments.draft:
            row.append(f"{result['stats']['mean_accepted_length']:.2f}")
        rows.append(row)
    if len(tasks) > MAX_COLUMNS:
        rows = list(zip(*rows, strict=True))
    else:
        # With a word a line and no frame, six tasks fit 80 columns; policies give way.
        rows[0] = [re.sub("[ _]", "\n", heading) for heading in rows[0]]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in rows[0]:
        first = heading == rows[0][0]
        table.add_column(
            heading,
            justify="left" if first else "right",
            overflow="fold",
            no_wrap=not first and len(tasks) <= MAX_COLUMNS,
        )
    for row in rows[1:]:
        table.add_row(*row)
    return table
