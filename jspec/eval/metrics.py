"""Scores of answers, in [0, 1], as the benchmarks that they are named for compute them.

Every metric is ``metric(output, answers, classes)``, where ``classes`` are the names of all
classes, which `classification` alone reads.
"""

from __future__ import annotations

import difflib
import functools
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from jspec.extras import install

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
PARAGRAPH, PARAGRAPH_ZH = re.compile(r"Paragraph (\d+)"), re.compile(r"段落(\d+)")
CHINESE = frozenset({"f1_zh", "rouge_l_zh"})  # need jieba

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's list: it has a right title mark and no left one.
_PUNCTUATION_ZH = str.maketrans(
    "",
    "",
    string.punctuation
    + "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～"
    + "｟｠｡｢｣､、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)
_CHOICES = tuple(re.compile(rf"The correct answer is {x}") for x in (r"\(([A-D])\)", "([A-D])"))


def recall(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the answers that the output contains, case ignored (RULER's match of all)."""
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def contains(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Whether the output contains one of the answers, case ignored (RULER's match of a part)."""
    text = output.lower()
    return float(any(answer.lower() in text for answer in answers))


def choice(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Whether the output says "The correct answer is (A)" of the right letter (LongBench-v2)."""
    text = output.replace("*", "")
    matches = (pattern.search(text) for pattern in _CHOICES)
    return float(next((match[1] for match in matches if match), None) in answers)


def _best(score: Callable[[str, str], float]) -> Metric:
    """The metric that is the highest ``score(output, answer)`` of any answer."""

    @functools.wraps(score)
    def metric(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
        return max(score(output, answer) for answer in answers)

    return metric


@_best
def exact(output: str, answer: str) -> float:
    """Whether the output is an answer, but for case, articles and punctuation."""
    return float(_words(output) == _words(answer))


@_best
def f1(output: str, answer: str) -> float:
    """The harmonic mean of precision and recall of words (LongBench's questions)."""
    return _f1(_words(output), _words(answer))


@_best
def f1_zh(output: str, answer: str) -> float:
    """`f1` of the words that jieba cuts a Chinese text into."""
    return _f1(_words_zh(output), _words_zh(answer))


@_best
def rouge_l(output: str, answer: str) -> float:
    """ROUGE-L of summaries, as the package ``rouge`` that LongBench calls computes it.

    Its sentences end at full stops, and it counts different words: those that lie on a longest
    common subsequence of any two sentences, over those of each text.
    """
    return _rouge_l(output, answer)


@_best
def rouge_l_zh(output: str, answer: str) -> float:
    """`rouge_l` of the words that jieba cuts a Chinese text into."""
    return _rouge_l(" ".join(_cut(output)), " ".join(_cut(answer)))


@_best
def count(output: str, answer: str) -> float:
    """The share of the output's numbers that are the answer (LongBench's passage_count)."""
    return _share_of_numbers(output, answer)


@_best
def retrieval(output: str, answer: str) -> float:
    """The share of the output's numbers that are the answer's, "Paragraph 3" (LongBench)."""
    return _share_of_numbers(output, PARAGRAPH.findall(answer)[0])


@_best
def retrieval_zh(output: str, answer: str) -> float:
    """`retrieval` of answers such as "段落3"."""
    return _share_of_numbers(output, PARAGRAPH_ZH.findall(answer)[0])


@_best
def code_similarity(output: str, answer: str) -> float:
    """The similarity of the output's first line of code, in whole percent (LongBench).

    That of the package ``fuzzywuzzy`` without its optional C library, which is `difflib`'s.
    """
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def classification(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 / n where the output names n classes, the answer among them (LongBench's trec and lsht).

    Classes whose names are parts of the answer's do not count.
    """

    def score(answer: str) -> float:
        named = [name for name in classes if name in output]
        at = 0
        while at < len(named):  # LongBench does not look at the class after one that it leaves out
            if named[at] in answer and named[at] != answer:
                named.remove(named[at])
            at += 1
        return 1 / len(named) if answer in named else 0.0

    return max(map(score, answers))


METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        *(recall, contains, exact, f1, f1_zh, rouge_l, rouge_l_zh),
        *(classification, retrieval, retrieval_zh, count, code_similarity, choice),
    )
}


def check_jieba() -> None:
    """Raise `ValueError` with the way out where jieba is missing."""
    if find_spec("jieba") is None:
        raise ValueError(f"Chinese answers need jieba; {install('eval')}")


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_PUNCTUATION_ZH).split()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    check_jieba()
    with warnings.catch_warnings():  # of its source, and of setuptools
        warnings.simplefilter("ignore")
        import jieba  # pyright: ignore[reportMissingImports]
    jieba.setLogLevel("ERROR")
    return jieba.lcut(text)


def _f1(output: Sequence[str], answer: Sequence[str]) -> float:
    common = sum((Counter(output) & Counter(answer)).values())
    return 2 * common / (len(output) + len(answer)) if common else 0.0


def _rouge_l(output: str, answer: str) -> float:
    outputs, answers = _sentences(output), _sentences(answer)
    if not outputs or not answers:
        return 0.0
    common = {word for x in answers for y in outputs for word in _common_subsequence(x, y)}
    precision, recall = (len(common) / len(set().union(*x)) for x in (outputs, answers))
    return 2 * precision * recall / (precision + recall + 1e-8)  # the package's own summand


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; spaces after a full stop are a sentence of one empty word."""
    return [part.split() or [""] for part in text.split(".") if part]


def _common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """The longest common subsequence, of several the one that skips words of ``y`` first."""
    lengths = [[0] * (len(y) + 1)]
    for word in x:
        above, row = lengths[-1], [0]
        for at, other in enumerate(y):
            row.append(above[at] + 1 if word == other else max(row[-1], above[at + 1]))
        lengths.append(row)
    words, i, j = [], len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            words.append(x[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _share_of_numbers(output: str, number: str) -> float:
    numbers = re.findall(r"\d+", output)
    return numbers.count(number) / len(numbers) if numbers else 0.0
