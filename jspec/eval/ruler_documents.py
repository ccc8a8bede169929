"""Questions and documents of SQuAD and HotpotQA, for the tasks qa_1 and qa_2 of RULER."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.models.files import parse_json, read_file

FILE_LIMIT = 1 << 30  # bytes


@dataclasses.dataclass(frozen=True)
class Inquiry:
    """A question, its answers, and numbers of documents: those it needs, and related ones."""

    query: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents, and questions about them, in the order of a file."""

    texts: Sequence[str]
    inquiries: Sequence[Inquiry]

    def example(
        self, rng: random.Random, number: int, size: int
    ) -> tuple[str, tuple[str, ...], list[str]]:
        """A question with about ``size`` documents in random order.

        The documents are those that the question needs, then related ones, then others; where
        there are too few, all of them repeat.

        Args:
            rng: draws the documents.
            number: number of the question.
            size: number of documents, at least those that are needed.

        Returns:
            The question, its answers and the documents.
        """
        asked = self.inquiries[number % len(self.inquiries)]
        missing = max(size - len(asked.needed), 0)
        if size >= len(self.texts):
            texts = (list(self.texts) * (size // len(self.texts) + 1))[:size]
        else:
            chosen = list(asked.needed)
            if missing > len(asked.related):
                used = {*asked.needed, *asked.related}
                others = [at for at in range(len(self.texts)) if at not in used]
                missing -= len(asked.related)
                chosen += [*asked.related, *rng.sample(others, min(missing, len(others)))]
            else:
                chosen += rng.sample(asked.related, missing)
            texts = [self.texts[at] for at in chosen]
        rng.shuffle(texts)
        return asked.query, asked.answers, texts


def read_documents(path: str | Path) -> tuple[str, Documents]:
    """Read a file of SQuAD or HotpotQA.

    Args:
        path: SQuAD's JSON (``{"data": [...]}``), or HotpotQA's (a list).

    Returns:
        The task that asks its questions, ``qa_1`` or ``qa_2``, and the documents.

    Raises:
        ValueError: the file is neither, or has no questions.
    """
    path = Path(path)
    try:
        values = parse_json(read_file(path, FILE_LIMIT))
        if isinstance(values, dict) and "data" in values:
            task, read = "qa_1", _squad(values["data"])
        elif isinstance(values, list):
            task, read = "qa_2", _hotpotqa(values)
        else:
            raise ValueError("must be SQuAD's object with 'data', or HotpotQA's list")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is neither SQuAD's nor HotpotQA's file: {error!r}") from None
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(path) in message else f"{path}: {message}") from None
    if not read.inquiries:
        raise ValueError(f"{path}: has no questions with answers")
    return task, read


def _squad(articles: list[dict[str, Any]]) -> Documents:
    paragraphs = [[_text(p["context"]) for p in article["paragraphs"]] for article in articles]
    texts = sorted({text for article in paragraphs for text in article})
    number = {text: at for at, text in enumerate(texts)}
    inquiries = []
    for article, contexts in zip(articles, paragraphs, strict=True):
        numbers = [number[text] for text in contexts]
        for paragraph, at in zip(article["paragraphs"], numbers, strict=True):
            related = tuple(dict.fromkeys(other for other in numbers if other != at))
            inquiries += [
                Inquiry(
                    _text(x["question"]), _texts(y["text"] for y in x["answers"]), (at,), related
                )
                for x in paragraph["qas"]
                if not x.get("is_impossible", False) and x["answers"]
            ]
    return Documents(texts, inquiries)


def _hotpotqa(items: list[dict[str, Any]]) -> Documents:
    def document(title: str, sentences: list[str]) -> str:
        return f"{_text(title)}\n{''.join(sentences)}"

    contexts = [[document(*pair) for pair in item["context"]] for item in items]
    texts = sorted({text for context in contexts for text in context})
    number = {text: at for at, text in enumerate(texts)}
    inquiries = [
        Inquiry(
            *(_text(item["question"]), _texts([item["answer"]])),
            tuple(dict.fromkeys(number[text] for text in context)),
        )
        for item, context in zip(items, contexts, strict=True)
    ]
    return Documents(texts, inquiries)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(_text(value) for value in values if value)
