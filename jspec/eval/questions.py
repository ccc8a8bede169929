"""Questions with known answers, of a length in tokens of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jspec.eval import ruler
from jspec.models.tokenizer import Tokenizer

SLACK = 16  # tokens that an answer may have besides those of the expected one
_TRIES = 12


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt that ends where the answer begins, and the expected answers."""

    task: str
    prompt: bytes
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question as tokens; ``room``: most tokens of an answer, which is ``one_line`` or more."""

    question: Question
    prompt: Sequence[int]
    room: int
    one_line: bool = True


def ruler_questions(
    tokenizer: Tokenizer, tasks: Sequence[str], length: int, examples: int, seed: int = 0
) -> list[Asked]:
    """``examples`` of each RULER task, seeds ``seed`` and up, of at most ``length`` tokens."""

    def asked(task: str, each: int) -> Asked:
        return fitted(
            tokenizer, length, lambda size: _ruler(task, ruler.make_task(task, size, each))
        )

    return [asked(task, each) for task in tasks for each in range(seed, seed + examples)]


def needle_question(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Asked:
    """A single needle at a ``depth`` in [0, 1] of its haystack, of at most ``length`` tokens."""
    task = "single_needle"
    return fitted(tokenizer, length, lambda size: _ruler(task, ruler.needle(size, depth, seed)))


def fitted(tokenizer: Tokenizer, length: int, make: Callable[[int], Question]) -> Asked:
    """A question that ``make(bytes)`` gives, which with its answer takes about ``length`` tokens.

    It takes no more. Raises `ValueError` where none is short enough.
    """
    trial = make(max(length, ruler.MIN_LENGTH)).prompt
    size = length * len(trial) // len(tokenizer.encode(trial))
    for _ in range(_TRIES):
        if size <= ruler.MIN_LENGTH:
            break
        asked = _asked(tokenizer, make(size))
        over = len(asked.prompt) + asked.room - length
        if over <= 0:
            return asked
        size -= over * len(asked.question.prompt) // len(asked.prompt) + 1
    shortest = _asked(tokenizer, make(ruler.MIN_LENGTH))
    least = len(shortest.prompt) + shortest.room
    if least > length:
        raise ValueError(
            f"length={length} tokens are too few for a question; the shortest takes {least}"
        )
    return shortest


def _asked(tokenizer: Tokenizer, question: Question) -> Asked:
    prompt = tokenizer.encode(question.prompt)
    room = len(tokenizer.encode(" ".join(question.answers), special=False)) + SLACK
    return Asked(question, prompt, room)


def tokenized_questions(
    tokenizer: Tokenizer, questions: Sequence[Question], length: int, room: int
) -> list[Asked]:
    """Questions of a file; of a prompt that is too long the middle is left out (as LongBench)."""
    if length <= room:
        raise ValueError(f"length={length} must be more than the {room} tokens of an answer")
    tokenized = []
    for question in questions:
        prompt, max_prompt = tokenizer.encode(question.prompt), length - room
        if len(prompt) > max_prompt:
            prompt = [
                *prompt[: max_prompt // 2],
                *prompt[len(prompt) - (max_prompt - max_prompt // 2) :],
            ]
        tokenized.append(Asked(question, prompt, room, one_line=False))
    return tokenized


def _ruler(task: str, example: ruler.Example) -> Question:
    return Question(task, example.prompt, tuple(a.decode() for a in example.answers))
