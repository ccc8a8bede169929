"""Tasks in a user's own file: the fields of each benchmark, and lines that are none."""

import json

import pytest

from jspec.eval.jsonl import read_questions
from jspec.eval.questions import Question


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_the_fields_of_three_benchmarks_are_read(tmp_path):
    ruler = {"index": 0, "input": "Find it.", "outputs": ["7", "8"], "length": 4096}
    long = {"input": "Who?", "context": "Text.", "answers": ["Ann"], "dataset": "qasper"}
    infinite = {"id": 1, "context": "Text.", "input": "Who?", "answer": "Ann"}
    read = [read_questions(write(tmp_path / "own.jsonl", x, "")) for x in (ruler, long, infinite)]
    assert read == [
        ([Question("own", b"Find it.", ("7", "8"))], "recall"),
        ([Question("qasper", b"Text.\n\nWho?", ("Ann",))], "f1"),
        ([Question("own", b"Text.\n\nWho?", ("Ann",))], "contains"),
    ]


def test_options_and_the_beginning_of_the_answer_are_part_of_the_prompt(tmp_path):
    """As InfiniteBench and RULER have them."""
    choice = {"context": "Text.", "input": "Who?", "options": ["Ann", "Bo"], "answer": "Bo"}
    begun = {"input": "Find it.", "outputs": ["7"], "answer_prefix": " It is"}
    prompts = [
        read_questions(write(tmp_path / "own.jsonl", x))[0][0].prompt for x in (choice, begun)
    ]
    assert prompts == [b"Text.\n\nWho?\nA. Ann\nB. Bo", b"Find it. It is"]


GOOD = {"prompt": "x", "outputs": ["y"], "task": "t"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no tasks"),
        ([GOOD, "{"], "line 2: is not valid JSON"),
        (["[]"], "line 1: must be a JSON object, got list"),
        ([{"prompt": "x"}], "has no answers; name them by one of outputs, answers, answer"),
        ([{"prompt": "x", "answer": []}], "'answer' must be a text or a list of texts"),
        ([{"prompt": "x", "outputs": [""]}], "none of them empty"),
        ([{"answer": "y"}], "has no 'context', 'input' or 'prompt'"),
        ([{"prompt": 1, "answer": "y"}], "'prompt' must be a text"),
        ([{"prompt": "x", "answer": "y", "options": [1]}], "'options' must be a list of up to 26"),
        ([GOOD, {"prompt": "x", "answer": "y"}], "mixes kinds of tasks"),
    ],
)
def test_a_file_that_is_none_says_why(lines, message, tmp_path):
    with pytest.raises(ValueError, match=r"own\.jsonl") as error:
        read_questions(write(tmp_path / "own.jsonl", *lines))
    assert message in str(error.value)
