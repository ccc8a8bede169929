"""Metrics of answers, against their definitions worked out by hand."""

import pytest

from jspec.cli import arguments
from jspec.eval.metrics import METRICS


@pytest.mark.parametrize(
    ("metric", "output", "answers", "expected"),
    [
        ("recall", "Red and BLUE.", ["blue", "green"], 0.5),
        ("recall", "", ["blue"], 0),
        ("contains", "Red and BLUE.", ["green", "blue"], 1),
        ("contains", "blu", ["blue"], 0),
        ("exact", "The Cat!", ["a dog", "cat"], 1),
        ("exact", "the cat sat", ["cat"], 0),
        # Two words of three, and of two: 2 * (2/3) * 1 / (2/3 + 1).
        ("f1", "the cat sat down", ["sat down"], 0.8),
        ("f1", "cat cat", ["cat"], 2 / 3),  # a repeated word counts once
        ("f1", "", ["cat"], 0),
        # "a c d" is the longest common subsequence, of 4 and 5 words.
        ("rouge_l", "a b c d", ["a c x d y"], 2 * 3 / 9),
        ("rouge_l", "b a", ["a b"], 0.5),
        ("rouge_l", "x", ["a", "x y"], 2 / 3),
        ("edit", "```python\n# add\nreturn a\nreturn b", ["return a"], 1),
        ("edit", "ab", ["ad"], 0.5),
        ("edit", "", ["x"], 0),
    ],
)
def test_a_metric_is_what_its_benchmark_says(metric, output, answers, expected):
    assert METRICS[metric](output, answers) == pytest.approx(expected)


def test_the_command_names_all_of_them():
    assert tuple(METRICS) == arguments.METRICS
