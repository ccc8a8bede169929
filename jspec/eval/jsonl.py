"""Questions from files of JSON lines: LongBench's, LongBench-v2's, RULER's and a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.checks import shown
from jspec.eval import longbench, ruler
from jspec.eval.longbench import is_texts
from jspec.eval.questions import Question
from jspec.models.files import open_regular, parse_json

LINE_LIMIT = 2**26  # bytes
# The fields of the answers in a file of the user's own, and how they are scored unless the caller
# says otherwise.
ANSWERS = {"outputs": "recall", "answers": "f1", "answer": "contains"}
FIELDS = {"task", "context", "input", "prompt", "answer_prefix", "id", "_id", "index", "length"}
FORMATS = "LongBench, LongBench-v2, RULER and jspec's own fields (docs/policies.md)"


def read_questions(path: str | Path) -> list[Question]:
    """Read the questions of a file; each line says by its fields which format it has.

    Args:
        path: a file with a JSON object in each line.

    Raises:
        ValueError: the file has no questions, a line is invalid or of an unknown format, or a task
            has lines with different metrics.
    """
    questions: list[Question] = []
    metrics: dict[str, str] = {}
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), start=1):
            if not line.strip():
                continue
            try:
                question = _question(line, Path(path).stem)
                first = metrics.setdefault(question.task, question.metric)
                if question.metric != first:
                    raise ValueError(f"is scored by {question.metric}, earlier lines by {first}")
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            questions.append(question)
    if not questions:
        raise ValueError(f"{path}: holds no tasks; write one JSON object a line")
    return questions


def _question(line: bytes, name: str) -> Question:
    if len(line) > LINE_LIMIT:
        raise ValueError(f"is longer than {LINE_LIMIT} bytes")
    values = parse_json(line)
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {type(values).__name__}")
    fields = set(values)
    if {"dataset", "answers"} <= fields <= longbench.FIELDS:
        return longbench.longbench_question(values)
    if {"choice_A", "question", "answer"} <= fields <= longbench.FIELDS_V2:
        return longbench.longbench_v2_question(values)
    unknown = fields - FIELDS - set(ANSWERS) - ruler.FIELDS
    if unknown:
        names = ", ".join(shown(x) for x in sorted(unknown)[:5])
        raise ValueError(f"is of an unknown format: {names}; known are {FORMATS}")
    return _own(values, name)


def _own(values: Mapping[str, Any], name: str) -> Question:
    """The question of a line of RULER, or of the user's own fields."""
    named = [field for field in ANSWERS if field in values]
    if len(named) != 1:
        raise ValueError(f"must have its answers in one of {', '.join(ANSWERS)}, got {named}")
    (field,) = named
    answers = [values[field]] if isinstance(values[field], str) else values[field]
    if not is_texts(answers):
        raise ValueError(f"{field!r} must be a text or a list of texts, none of them empty")
    if "input" in values and "prompt" in values:
        raise ValueError("has both 'input' and 'prompt'; write one")
    parts = [_text(values, "context"), _text(values, "input") or _text(values, "prompt")]
    prompt, prefix = "\n\n".join(part for part in parts if part), _text(values, "answer_prefix")
    if not prompt:
        raise ValueError("has no 'context', 'input' or 'prompt'")
    task = _text(values, "task") or name
    kind = ruler.kind_of(prompt, prefix) if field == "outputs" else None
    if kind is None:
        return Question(task, prompt, tuple(answers), ANSWERS[field], answer_prefix=prefix)
    return Question(
        *(task, prompt, tuple(answers), kind.metric),
        answer_prefix=prefix,
        max_new_tokens=kind.max_new_tokens,
    )


def _text(values: Mapping[str, Any], field: str) -> str:
    text = values.get(field, "")
    if not isinstance(text, str):
        raise ValueError(f"{field!r} must be a text")
    return text
