"""Tasks of a user's own as JSON lines, in the fields of RULER, LongBench and InfiniteBench."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from jspec.eval.questions import Question
from jspec.models.files import parse_json

LINE_LIMIT = 2**26  # bytes
# The field of the answers, and how they are scored unless the caller says otherwise.
ANSWERS = {"outputs": "recall", "answers": "f1", "answer": "contains"}


def read_questions(path: str | Path) -> tuple[list[Question], str]:
    """The questions of a file, and the usual metric of its kind.

    The prompt of a line is ``context``, where there is one, an empty line, and ``input`` or
    ``prompt``; then ``options`` by letters (InfiniteBench), and ``answer_prefix`` (RULER), with
    which the answer begins. Its answers are ``outputs`` (RULER), ``answers`` (LongBench) or
    ``answer`` (InfiniteBench), a text or a list of texts; its task is ``task`` or ``dataset``, else
    the file's name. Other fields are ignored. Raises `ValueError` with the number of an
    invalid line.
    """
    questions: list[Question] = []
    metrics: set[str] = set()
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), start=1):
            if not line.strip():
                continue
            try:
                question, metric = _question(line, Path(path).stem)
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            questions.append(question)
            metrics.add(metric)
    if not questions:
        raise ValueError(f"{path}: holds no tasks; write one JSON object a line")
    if len(metrics) > 1:
        raise ValueError(f"{path}: mixes kinds of tasks, which need {sorted(metrics)}; split it")
    return questions, metrics.pop()


def _question(line: bytes, name: str) -> tuple[Question, str]:
    if len(line) > LINE_LIMIT:
        raise ValueError(f"is longer than {LINE_LIMIT} bytes")
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    field = next((field for field in ANSWERS if field in value), None)
    if field is None:
        raise ValueError(f"has no answers; name them by one of {', '.join(ANSWERS)}")
    answers = [value[field]] if isinstance(value[field], str) else value[field]
    if not isinstance(answers, list) or not answers or not all(_is_text(a) for a in answers):
        raise ValueError(f"{field!r} must be a text or a list of texts, none of them empty")
    parts = [_text(value, "context"), _text(value, "input") or _text(value, "prompt")]
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        raise ValueError("has no 'context', 'input' or 'prompt'")
    if options := value.get("options"):
        if not isinstance(options, list) or len(options) > 26 or not all(map(_is_text, options)):
            raise ValueError("'options' must be a list of up to 26 texts, none of them empty")
        prompt += "".join(
            f"\n{letter}. {x}" for letter, x in zip(ascii_uppercase, options, strict=False)
        )
    prompt += _text(value, "answer_prefix")
    task = _text(value, "task") or _text(value, "dataset") or name
    return Question(task, prompt.encode(), tuple(answers)), ANSWERS[field]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _text(value: Mapping[str, Any], field: str) -> str:
    text = value.get(field, "")
    if not isinstance(text, str):
        raise ValueError(f"{field!r} must be a text")
    return text
