"""Questions with known answers, of a length in tokens of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jspec.eval import ruler
from jspec.models.tokenizer import Tokenizer

SLACK = 16  # tokens that an answer may have in addition to those of the expected one
_TRIES = 12


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt that ends where the answer begins, and the expected answers."""

    task: str
    prompt: bytes
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question as tokens.

    Attributes:
        question: the question.
        prompt: its token ids.
        room: the most tokens of an answer.
        one_line: whether the answer ends at its first line break.
    """

    question: Question
    prompt: Sequence[int]
    room: int
    one_line: bool = True


def ruler_questions(
    tokenizer: Tokenizer, tasks: Sequence[str], length: int, examples: int, seed: int = 0
) -> list[Asked]:
    """Create examples of RULER's tasks.

    Args:
        tokenizer: the model's tokenizer.
        tasks: names of `jspec.eval.ruler.TASKS`.
        length: the most tokens of a prompt with its answer.
        examples: examples of each task.
        seed: seed of the first example; the next ones take the seeds after it.

    Raises:
        ValueError: ``length`` is too short for a task.
    """

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
    """Find the longest question that with its answer takes at most ``length`` tokens.

    Args:
        tokenizer: the model's tokenizer.
        length: limit in tokens, approached from below.
        make: ``make(size)`` creates a question of at most ``size`` bytes.

    Raises:
        ValueError: the shortest question is too long.
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
    """Tokenize questions; prompts that are too long lose their middle, as in LongBench.

    Args:
        tokenizer: the model's tokenizer.
        questions: the questions.
        length: the most tokens of a prompt with its answer.
        room: the most tokens of an answer.

    Raises:
        ValueError: ``room`` leaves no tokens for a prompt.
    """
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
