"""Questions with known answers, as tokens of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jspec.eval.metrics import METRICS
from jspec.models.chat import ChatTemplate
from jspec.models.tokenizer import Tokenizer

MAX_NEW_TOKENS = 128  # of an answer, where neither the question nor the caller says


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, the expected answers and how an answer is scored.

    Attributes:
        task: the name under which scores are averaged.
        prompt: the text that a user would send.
        answers: the expected answers.
        metric: a name of `jspec.eval.metrics.METRICS`.
        classes: the names of all classes, for the metric ``classification``.
        answer_prefix: the text with which the answer begins; the model goes on after it.
        max_new_tokens: tokens of an answer; None for `MAX_NEW_TOKENS`.
        chat: whether a chat template applies.
        one_line: whether an answer ends at its first line break after text.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    metric: str = "recall"
    classes: tuple[str, ...] = ()
    answer_prefix: str = ""
    max_new_tokens: int | None = None
    chat: bool = True
    one_line: bool = False

    def complete(self, answer: str) -> bool:
        """Whether an answer so far needs no further token."""
        return self.one_line and "\n" in answer.lstrip("\n")


def score(question: Question, answer: str) -> float:
    """The score of an answer, in [0, 1]."""
    if question.one_line:
        answer = answer.lstrip("\n").partition("\n")[0]
    return METRICS[question.metric](answer, question.answers, question.classes)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question as tokens.

    Attributes:
        question: the question.
        prompt: its token ids.
        room: the most tokens of an answer.
    """

    question: Question
    prompt: Sequence[int]
    room: int


def encoded(
    tokenizer: Tokenizer, question: Question, template: ChatTemplate | None = None
) -> list[int]:
    """The tokens of a question's prompt.

    Spaces at its end are left to the answer: most vocabularies have them at the start of words, and
    no model was trained on a word after a space of its own.

    Args:
        tokenizer: the model's tokenizer.
        question: the question.
        template: the model's chat template, applied to questions with ``chat``.
    """
    prefix = question.answer_prefix.rstrip(" ")
    if template is None or not question.chat:
        text = question.prompt + prefix
        return tokenizer.encode(text if prefix else text.rstrip(" "))
    messages = [{"role": "user", "content": question.prompt}]
    return tokenizer.encode(template.render(messages) + prefix, special=False)


def tokenized_questions(
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    length: int,
    max_new_tokens: int | None = None,
    template: ChatTemplate | None = None,
) -> list[Asked]:
    """Tokenize questions; prompts that are too long lose their middle, as in LongBench.

    Args:
        tokenizer: the model's tokenizer.
        questions: the questions.
        length: the most tokens of a prompt with its answer.
        max_new_tokens: the most tokens of an answer; None for what each question says.
        template: as in `encoded`.

    Raises:
        ValueError: answers leave no tokens for a prompt.
    """
    asked = []
    for question in questions:
        room = max_new_tokens or question.max_new_tokens or MAX_NEW_TOKENS
        if length <= room:
            raise ValueError(f"length={length} must be more than the {room} tokens of an answer")
        asked.append(Asked(question, _cut(tokenizer, question, length - room, template), room))
    return asked


def _cut(
    tokenizer: Tokenizer, question: Question, limit: int, template: ChatTemplate | None
) -> list[int]:
    """At most ``limit`` tokens: the first and last ones of the question's own text."""
    prompt = encoded(tokenizer, question, template)
    if len(prompt) <= limit:
        return prompt
    if template is None or not question.chat:
        return _ends(prompt, limit)
    text = tokenizer.encode(question.prompt, special=False)
    size = len(text)
    while len(prompt) > limit:  # tokens that meet at the cut may become more, or fewer
        size -= len(prompt) - limit
        if size <= 0:
            raise ValueError(f"{limit} tokens are too few for the chat template alone")
        ends = _ends(text, size)
        shorter = tokenizer.decode(ends[: size // 2]) + tokenizer.decode(ends[size // 2 :])
        prompt = encoded(tokenizer, dataclasses.replace(question, prompt=shorter), template)
    return prompt


def _ends(tokens: list[int], size: int) -> list[int]:
    return [*tokens[: size // 2], *tokens[len(tokens) - (size - size // 2) :]]
