"""Questions from files: the formats of published benchmarks, and lines that are none."""

import json

import pytest

from jspec.eval.jsonl import read_questions
from jspec.eval.longbench import DATASETS
from jspec.eval.metrics import METRICS
from jspec.eval.questions import Question, score


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def longbench(dataset: str, **fields):
    known = {"input": "Who?", "context": "Text {0}.", "answers": ["Ann", "Bo"], "dataset": dataset}
    return known | {"length": 9, "language": "en", "all_classes": None, "_id": "x"} | fields


V2 = {
    "_id": "1",
    "domain": "Single-Document QA",
    "difficulty": "easy",
    "length": "short",
    "question": " Which colour? ",
    "answer": "A",
    "context": "It is red.\n",
    **{f"choice_{x}": y for x, y in zip("ABCD", ("Red", "Green", "Blue", "Grey"), strict=True)},
}


def test_longbench_is_asked_and_scored_as_its_authors_do(tmp_path):
    lines = [
        longbench("trec_e", answers=["Human"], all_classes=["Human", "Location"]),
        longbench("passage_retrieval_en_e", answers=["Paragraph 3"], input="About bees."),
        longbench("passage_count_e", answers=["7"]),
        longbench("repobench-p", answers=["return x"], input="def f(x):\n", context="x = 1\n"),
    ]
    trec, retrieval, count, code = read_questions(write(tmp_path / "own.jsonl", *lines))
    assert (trec.task, trec.metric, trec.max_new_tokens) == ("trec_e", "classification", 64)
    assert trec.prompt.endswith("examples of questions.\n\nText {0}.\nWho?")
    assert (trec.chat, trec.one_line, code.chat) == (False, True, False)
    assert code.prompt.endswith("below. \nx = 1\ndef f(x):\nNext line of code:\n")
    assert retrieval.prompt.startswith("Here are 30 paragraphs from Wikipedia, along with an")
    assert retrieval.prompt.endswith('"Paragraph 2", etc.\n\nThe answer is: ')
    assert retrieval.chat
    assert not retrieval.one_line
    assert score(trec, "\nThe type is Human.\nLocation") == 1
    assert score(retrieval, "The answer is Paragraph 3, since it mentions it") == 1
    assert score(count, "There are 7 unique paragraphs") == 1


def test_every_data_set_of_longbench_has_a_prompt_and_a_metric():
    assert len(DATASETS) == 21
    for name, dataset in DATASETS.items():
        assert dataset.metric in METRICS
        assert ("{input}" in dataset.prompt) == (
            name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        )
        assert dataset.prompt.count("{context}") == 1
        assert dataset.one_line == (name in ("trec", "triviaqa", "samsum", "lsht"))
        assert dataset.metric.endswith("_zh") == (
            name in ("multifieldqa_zh", "dureader", "vcsum", "passage_retrieval_zh")
        )
    lengths = {name: dataset.max_new_tokens for name, dataset in DATASETS.items()}
    assert sum(lengths.values()) == 3 * 128 + 128 + 4 * 512 + 6 * 64 + 7 * 32


def test_a_choice_is_read_from_the_answer(tmp_path):
    (question,) = read_questions(write(tmp_path / "own.jsonl", V2))
    assert question.prompt.startswith("Please read the following text and answer the question")
    assert "<text>\nIt is red.\n</text>\n\nWhat is the correct answer to this question: Which" in (
        question.prompt
    )
    assert "Choices:\n(A) Red\n(B) Green\n(C) Blue\n(D) Grey\n\nFormat your" in question.prompt
    assert score(question, "The correct answer is (D)") == 0
    assert score(question, "The correct answer is **(A)**") == 1


def test_ruler_s_own_files_are_scored_by_the_kind_of_their_prompt(tmp_path):
    niah = {
        "index": 0,
        "outputs": ["12", "34"],
        "length": 100,
        "length_w_model_temp": 100,
        "input": "Some special magic numbers are hidden ...\nWhat are all the ... text?",
        "answer_prefix": " The special magic numbers for x mentioned in the provided text are",
    }
    qa = {
        "index": 0,
        "outputs": ["1945", "in 1945", "September 1945"],
        "length": 100,
        "input": "Answer the question ...\n\nQuestion: When?",
        "answer_prefix": " Answer:",
    }
    (first,) = read_questions(write(tmp_path / "niah.jsonl", niah))
    (second,) = read_questions(write(tmp_path / "qa_1.jsonl", qa))
    assert (first.metric, first.max_new_tokens, first.task) == ("recall", 128, "niah")
    assert (second.metric, second.max_new_tokens, second.task) == ("contains", 32, "qa_1")
    assert score(first, "12 and\n56") == 0.5
    assert score(second, "It ended in 1945.") == 1
    assert second.answer_prefix == " Answer:"


def test_a_user_s_own_fields_are_read(tmp_path):
    def read(**fields):
        return read_questions(write(tmp_path / "own.jsonl", fields, ""))

    assert read(input="Find it.", outputs=["7", "8"]) == [
        Question("own", "Find it.", ("7", "8"), "recall")
    ]
    assert read(prompt="Who?", context="Text.", answers=["Ann"], task="t") == [
        Question("t", "Text.\n\nWho?", ("Ann",), "f1")
    ]
    assert read(input="Who?", answer="Ann", answer_prefix=" It is") == [
        Question("own", "Who?", ("Ann",), "contains", answer_prefix=" It is")
    ]


GOOD = {"prompt": "x", "outputs": ["y"], "task": "t"}
CHOICE = {"id": 1, "context": "x", "input": "y", "answer": ["z"], "options": ["y", "z"]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no tasks"),
        ([GOOD, "{"], "line 2: is not valid JSON"),
        (["[]"], "line 1: must be a JSON object, got list"),
        ([{"prompt": "x"}], "must have its answers in one of outputs, answers, answer, got []"),
        ([GOOD | {"answer": "y"}], "must have its answers in one of"),
        ([{"prompt": "x", "answer": []}], "'answer' must be a text or a list of texts"),
        ([{"prompt": "x", "outputs": [""]}], "none of them empty"),
        ([{"answer": "y"}], "has no 'context', 'input' or 'prompt'"),
        ([{"prompt": 1, "answer": "y"}], "'prompt' must be a text"),
        ([GOOD | {"input": "z"}], "has both 'input' and 'prompt'"),
        ([GOOD, {"prompt": "x", "answer": "y", "task": "t"}], "is scored by contains, earlier"),
        ([CHOICE], "is of an unknown format: 'options'; known are LongBench, LongBench-v2"),
        ([longbench("squad")], "dataset='squad' is none of LongBench's narrativeqa"),
        ([longbench("trec")], "'all_classes' must be a list of texts"),
        ([longbench("passage_count", answers=[])], "'answers' must be a list of texts"),
        ([longbench("passage_retrieval_en")], "must be such as 'Paragraph 3'"),
        ([longbench("lcc", more=1)], "is of an unknown format: 'all_classes', 'dataset'"),
        ([V2 | {"answer": "E"}], "answer='E' must be one of A, B, C and D"),
        ([{k: v for k, v in V2.items() if k != "choice_C"}], "choice_C is missing"),
    ],
)
def test_a_file_that_is_none_says_why(lines, message, tmp_path):
    with pytest.raises(ValueError, match=r"own\.jsonl") as error:
        read_questions(write(tmp_path / "own.jsonl", *lines))
    assert message in str(error.value)
