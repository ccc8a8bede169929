"""Scores of answers, in [0, 1], as the benchmarks that they are named for define them."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def recall(output: str, answers: Sequence[str]) -> float:
    """The share of the answers that the output contains, case ignored (RULER's match of all)."""
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def contains(output: str, answers: Sequence[str]) -> float:
    """Whether the output contains one of the answers, case ignored (RULER's match of a part)."""
    text = output.lower()
    return float(any(answer.lower() in text for answer in answers))


def exact(output: str, answers: Sequence[str]) -> float:
    """Whether the output is one of the answers, but for case, articles and punctuation."""
    return float(any(_words(output) == _words(answer) for answer in answers))


def f1(output: str, answers: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of words (LongBench's questions)."""
    return max(_f1(_words(output), _words(answer)) for answer in answers)


def rouge_l(output: str, answers: Sequence[str]) -> float:
    """The best ROUGE-L F-measure: words of the longest common subsequence (summaries)."""
    return max(_rouge_l(output.lower().split(), answer.lower().split()) for answer in answers)


def edit(output: str, answers: Sequence[str]) -> float:
    """The best similarity of the output's first line of code (LongBench's completion)."""
    lines = (line for line in output.splitlines() if not re.search(r"`|#|//", line) and line)
    first = next(lines, "")
    return max(difflib.SequenceMatcher(None, first, answer).ratio() for answer in answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "recall": recall,
    "contains": contains,
    "exact": exact,
    "f1": f1,
    "rouge_l": rouge_l,
    "edit": edit,
}


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(output: list[str], answer: list[str]) -> float:
    common = sum((Counter(output) & Counter(answer)).values())
    return 2 * common / (len(output) + len(answer)) if common else 0.0


def _rouge_l(output: list[str], answer: list[str]) -> float:
    row = [0] * (len(answer) + 1)
    for word in output:
        before = row
        row = [0]
        for at, expected in enumerate(answer):
            row.append(before[at] + 1 if word == expected else max(row[-1], before[at + 1]))
    return 2 * row[-1] / (len(output) + len(answer)) if row[-1] else 0.0
