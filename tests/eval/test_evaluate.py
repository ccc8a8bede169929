"""Questions of a length, and what becomes of the answers of a model that is not there."""

import argparse
import dataclasses
import json
import re

import numpy as np
import pytest
from rich.console import Console

import jspec
from jspec import cli
from jspec.cli import eval as command
from jspec.decode.draft import NoDraft, SelfDraft
from jspec.decode.stats import Stats
from jspec.eval import evaluate as module
from jspec.eval import heatmap, ruler
from jspec.eval.evaluate import GAMMA, Run, budget_of, evaluate, evaluate_all, with_budget
from jspec.eval.fitting import fitted, needle_question, ruler_bytes_questions, ruler_questions
from jspec.eval.questions import Asked, Question, tokenized_questions
from jspec.eval.ruler_bytes import TASKS
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Dense, ExactTopK, Quest, Streaming
from tests.conftest import OF_BYTES, make_decoder
from tests.eval.test_ruler_bytes import solve
from tests.models import tokenizers

LENGTH = 1600


@pytest.fixture(scope="module")
def tokenizer():
    return jspec.load_bundled()[1]


@pytest.fixture
def merging(tmp_path) -> Tokenizer:
    """A tokenizer of fewer tokens than bytes."""
    made = tokenizers.byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    return jspec.load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "merging"])
def test_questions_fill_their_length_with_room_for_the_answer(kind, tokenizer, merging):
    use = tokenizer if kind == "bytes" else merging
    asked = ruler_bytes_questions(use, TASKS, 3000, 1, seed=4)
    assert [x.question.task for x in asked] == list(TASKS)
    for one in asked:
        answer = use.encode(" ".join(one.question.answers), special=False)
        assert len(answer) < one.room
        assert 2700 < len(one.prompt) + one.room <= 3000
        assert solve(one.question.prompt) == list(one.question.answers)


def test_a_length_that_is_too_short_for_a_task_names_one_that_is_enough(tokenizer):
    """With the bundled tokenizer RULER's lists of words do not fit the default length."""
    tasks = [task for task in ruler.TASKS if task not in ruler.QA]
    with pytest.raises(ValueError, match="length=4096 tokens are too few for cwe") as refused:
        ruler_questions(tokenizer, tasks, 4096, 2)
    message = str(refused.value)
    assert "raise the length (--length) or choose other tasks (--only)" in message
    assert message.endswith("; ruler-bytes has tasks for byte-level tokenizers")
    (least,) = map(int, re.findall(r"takes (\d+) at least", message))
    asked = ruler_questions(tokenizer, tasks, least, 2)
    assert max(len(x.prompt) + x.room for x in asked) == least


def test_a_length_without_room_is_refused(tokenizer):
    with pytest.raises(ValueError, match="length=900 tokens are too few"):
        ruler_bytes_questions(tokenizer, ["single_needle"], 900, 1)
    with pytest.raises(ValueError, match="length=900 tokens are too few"):
        ruler_questions(tokenizer, ["niah_single_1"], 900, 1)
    with pytest.raises(ValueError, match="length=8 must be more than the 8 tokens"):
        tokenized_questions(tokenizer, [Question("t", "x", ("y",))], 8, 8)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_lies_at_its_depth(depth, tokenizer):
    one = needle_question(tokenizer, 4000, depth, 3)
    text = one.question.prompt
    haystack = text[: text.index("Question: ")]
    line = next(x for x in haystack.splitlines(keepends=True) if one.question.answers[0] in x)
    before = haystack.index(line)
    assert before / (len(haystack) - len(line)) == pytest.approx(depth, abs=0.02)
    assert solve(text) == list(one.question.answers)


def test_the_middle_of_a_long_prompt_is_left_out(tokenizer):
    prompt = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    (one,) = tokenized_questions(tokenizer, [Question("t", prompt, ("y",))], 14, 4)
    whole = tokenizer.encode(prompt)
    assert list(one.prompt) == [*whole[:5], *whole[-5:]]


def oracle(monkeypatch, tokenizer, say):
    """`generate` that answers ``say(prompt text)``; returns the calls it heard."""
    calls = []

    def generate(model, prompts, params, *, on_tokens, **settings):
        calls.append((len(prompts), settings))
        for row, (prompt, limits) in enumerate(zip(prompts, params, strict=True)):
            assert len(prompt) + limits.max_new_tokens == LENGTH
            tokens = tokenizer.encode(say(tokenizer.decode(prompt)), special=False)
            for begin in range(0, len(tokens), 3):
                count = on_tokens(row, tuple(tokens[begin : begin + 3]))
                if count is not None:
                    assert 1 <= count <= 3
                    break
        return type("Generation", (), {"stats": Stats.merged([])})

    monkeypatch.setattr(module, "generate", generate)
    return calls


@pytest.fixture
def model():
    return make_decoder(dataclasses.replace(OF_BYTES, max_context=4096))


def test_right_answers_score_100_and_the_first_line_alone_counts(monkeypatch, tokenizer, model):
    questions = ruler_bytes_questions(tokenizer, TASKS, LENGTH, 3)

    def say(text):
        right = " ".join(solve(text))
        # Of the needle, an answer on the second line; of the frequent words, two of three.
        if "What is the access code" in text:
            return f"nothing\n{right}"
        if "Which three" in text:
            return right.rpartition(" ")[0] + "\n"
        return f"\n {right}.\nQuestion"

    calls = oracle(monkeypatch, tokenizer, say)
    score = evaluate(model, tokenizer, Quest(), questions, length=LENGTH, batch=5)
    expected = dict.fromkeys(TASKS, 100.0)
    expected |= {"single_needle": 0.0, "multikey_words": 0.0, "frequent_words": 200 / 3}
    assert score.scores == pytest.approx(expected)
    assert score.score == pytest.approx(np.mean(list(expected.values())))
    assert len(score.each) == len(score.answers) == 18
    # The last batch is filled up, so that all have one shape.
    assert [count for count, _ in calls] == [5, 5, 5, 5]
    assert all(isinstance(x["draft"], NoDraft) and x["target"] == Quest() for _, x in calls)


def test_policies_draft_where_that_is_asked_for(monkeypatch, tokenizer, model):
    calls = oracle(monkeypatch, tokenizer, lambda text: "x" * 2000)
    questions = ruler_bytes_questions(tokenizer, ["multikey_uuids"], LENGTH, 1)
    score = evaluate(model, tokenizer, Quest(), questions, length=LENGTH, drafts=True)
    assert calls[0][1]["draft"] == SelfDraft(Quest())
    assert "target" not in calls[0][1]
    # An answer without end is cut after its room.
    assert len(score.answers[0]) == questions[0].room


def test_policies_share_a_prefill(monkeypatch, tokenizer, model):
    prefills, heard = [], []

    def start(model, prompts, params, config, **settings):
        assert config.gamma == GAMMA
        prefills.append(len(prompts))
        return len(prefills)

    monkeypatch.setattr(module, "start_decoding", start)
    calls = oracle(monkeypatch, tokenizer, lambda text: " ".join(solve(text)) + "\n")
    questions = ruler_bytes_questions(tokenizer, ["single_needle"], LENGTH, 3)
    runs = [Run(Quest()), Run(Streaming(), drafts=True)]
    settings = {"length": LENGTH, "batch": 2, "on_batch": heard.append}
    scores = evaluate_all(model, tokenizer, runs, questions, **settings)
    assert [score.score for score in scores] == [100.0, 100.0]
    assert (prefills, heard) == ([2, 2], [2, 2, 1, 1])
    assert [settings["prefilled"] for _, settings in calls] == [1, 1, 2, 2]
    assert [settings.get("target") for _, settings in calls] == [Quest(), None] * 2
    # One policy alone needs no copy of what its prefill leaves.
    evaluate_all(model, tokenizer, runs[:1], questions, **settings)
    assert len(prefills) == 2


def test_a_budget_is_that_of_the_policy():
    assert with_budget(ExactTopK(), 64).budget == 64
    assert with_budget(Streaming(sinks=4), 64) == Streaming(sinks=4, window=60)
    assert with_budget(Streaming(sinks=4), 0.25) == Streaming(sinks=4, window=0.25)
    assert with_budget(Dense(), 64) == Dense()
    assert with_budget(Quest(), None) == Quest()
    with pytest.raises(ValueError, match="budget=16 must be more than sinks=16, which it holds"):
        with_budget(Streaming(), 16)


def test_a_policy_says_what_it_reads():
    for policy in (ExactTopK(), Streaming(sinks=4)):
        for budget in (64, 0.25):
            assert budget_of(with_budget(policy, budget)) == budget
    assert budget_of(Streaming()) == 512
    assert budget_of(Dense()) is None


def test_the_shortest_question_is_asked_where_it_just_fits(tokenizer):
    """At any length that it fits into, however long others were."""
    with pytest.raises(ValueError, match="too few for single_needle") as refused:
        needle_question(tokenizer, 100, 0.5, 0)
    (least,) = map(int, re.findall(r"takes (\d+) at least", str(refused.value)))
    for length in (least, least + 1, least + 20):
        asked = needle_question(tokenizer, length, 0.5, 0)
        assert len(asked.prompt) + asked.room <= length
    with pytest.raises(ValueError, match=f"length={least - 1} tokens are too few"):
        needle_question(tokenizer, least - 1, 0.5, 0)


def test_answers_to_questions_of_a_file_go_on_after_a_line_break(monkeypatch, tokenizer, model):
    question = Question("summary", "Tell the story.", ("one two",))
    oracle(monkeypatch, tokenizer, lambda text: "one\ntwo\nthree")
    (asked,) = tokenized_questions(tokenizer, [question], LENGTH, 7)
    score = evaluate(model, tokenizer, Dense(), [asked], length=LENGTH)
    assert score.answers == ("one\ntwo",)


@pytest.fixture
def small(monkeypatch, model, tokenizer):
    monkeypatch.setattr(command, "load_model", lambda path: model)


def test_the_command_prints_json_and_tables(small, capsys):
    asked = ["eval", "ruler-bytes", "--length", "1300", "--examples", "1"]
    asked += ["--only", "single_needle", "--no-compile-cache", "--policy", "streaming"]
    assert cli.main([*asked, "--budget", "64", "--json", "--answers"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["score"] == printed["scores"]["single_needle"] == 0.0  # random weights
    assert (printed["policy"], printed["budget"], printed["length"]) == ("streaming", 64, 1300)
    assert printed["questions"] == len(printed["answers"]) == 1
    assert printed["environment"]["device"]
    assert cli.main([*asked, "--policy", "dense", "--draft"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # no terminal, no bar
    title, *table = printed.out.splitlines()
    assert title == "ruler-bytes, 1,300 tokens, drafts of each policy: percent right"
    assert [line.split()[-1] for line in table[:3]] == ["tokens", "per", "step"]
    assert [line.split()[0] for line in table[3:]] == ["streaming", "dense"]


def test_all_tasks_of_ruler_fit_80_columns(capsys, monkeypatch):
    """A long policy is folded; no heading and no figure is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    policy, arguments = "streaming:positions=window", argparse.Namespace(draft=True)
    result = {"policy": policy, "budget": 0.0312, "score": 100.0, "stats": {}}
    result["scores"] = dict.fromkeys(TASKS, 100.0)
    result["stats"]["mean_accepted_length"] = 12.34
    Console().print(command._table([result], arguments))
    head, body = (lines := capsys.readouterr().out.splitlines())[:3], lines[3:]
    assert max(map(len, lines)) <= 80
    words = [word for task in TASKS for word in task.split("_")]
    assert not set(words) - set(" ".join(head).split())
    assert body[0].split()[1:] == ["0.0312", *["100.0"] * 7, "12.34"]
    assert "".join(line.split()[0] for line in body) == policy


def test_a_file_of_tasks_and_a_heat_map(small, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"input": "a b", "outputs": ["zz"]}\n')
    monkeypatch.setattr(heatmap, "DEPTHS", (0.0, 1.0))
    picture = tmp_path / "needles.png"
    asked = ["eval", str(tasks), "--length", "5200", "--examples", "1", "--max-new-tokens", "8"]
    monkeypatch.setattr(heatmap, "needles", lambda *args, **settings: np.eye(2, 4))
    with pytest.raises(SystemExit):
        cli.main(["eval", "ruler-bytes", "--metric", "magic"])
    assert cli.main([*asked, "--json"]) == 2
    assert "--length 5200 exceeds the model's context of 4096" in capsys.readouterr().err
    asked[3] = "1600"
    assert cli.main([*asked, "--no-compile-cache", "--json", "--heatmap", str(picture)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["scores"], printed["policy"]) == ({"tasks": 0.0}, "dense")
    assert printed["metrics"] == {"tasks": "recall"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "message"),
    [("x.txt", "x.txt must end in one of ."), ("no/x.png", "no/x.png: no is no folder")],
)
def test_a_heat_map_that_cannot_be_written_is_refused_first(path, message, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["eval", "ruler", "--heatmap", path]) == 2
    assert f"--heatmap {message}" in capsys.readouterr().err


def test_a_heat_map_begins_with_the_shortest_needles(tokenizer, monkeypatch):
    monkeypatch.setattr(heatmap, "DEPTHS", (0.0, 1.0))
    assert heatmap.lengths_up_to(tokenizer, 8192) == [2048, 4096, 6144, 8192]
    with pytest.raises(ValueError, match="--length 900 is too short for --heatmap; its shortest"):
        heatmap.lengths_up_to(tokenizer, 900)
    first, *_, last = heatmap.lengths_up_to(tokenizer, 1600, examples=2)
    assert (first < 1100, last) == (True, 1600)
    for seed in (0, 1):
        assert heatmap.needle_question(tokenizer, first, 1.0, seed).question.answers


def test_names_from_a_file_are_shown_as_they_are(small, capsys, tmp_path, monkeypatch):
    """No markup, no emoji, and no control character reaches the terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    names = ["[bold]x[/nope]", "code[draft]", ":smile:", "\x1b[31mRED\x1b]0;title\x07"]
    file = tmp_path / "e[draft].jsonl"
    file.write_text(
        "".join(json.dumps({"task": x, "input": "a", "outputs": ["b"]}) + "\n" for x in names)
    )
    asked = ["eval", str(file), "--max-new-tokens", "2", "--length", "64", "--batch", "2"]
    assert cli.main([*asked, "--no-compile-cache"]) == 0
    shown = capsys.readouterr().out
    for name in (*names[:3], r"\x1b[31mRED\x1b]0;title\x07", "e[draft].jsonl"):
        assert name in shown
    assert shown.replace("\n", "").isprintable()


def test_many_tasks_are_a_line_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tasks = [f"niah_multikey_{at}" for at in range(13)]
    result = {"policy": "hata", "budget": None, "score": 50.0, "scores": dict.fromkeys(tasks, 50.0)}
    Console().print(command._table([result] * 3, argparse.Namespace(draft=False)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["policy", *["hata"] * 3]
    assert [line.split() for line in lines[3:]] == [[task, *["50.0"] * 3] for task in tasks]


def test_needles_are_counted_by_depth_and_length(monkeypatch, tokenizer, model):
    monkeypatch.setattr(heatmap, "DEPTHS", (0.0, 0.5, 1.0))

    def answered(model, tokenizer, policy, questions, *, length, batch):
        each = [float(at < length // 1000) for at in range(len(questions))]
        return dataclasses.make_dataclass("Found", ["each"])(each)

    monkeypatch.setattr(heatmap, "evaluate", answered)
    found = heatmap.needles(model, tokenizer, Dense(), [2000, 5000], examples=2)
    np.testing.assert_array_equal(found, [[1, 1], [0, 1], [0, 0.5]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ruler", "--policy", "oracle"], "policy 'oracle' is unknown"),
        (["ruler", "--policy", "hata", "--budget", "8"], "policy hata: budget=8 must be at least"),
        (["ruler", "--budget", "few"], "--budget 'few' must be a whole number"),
        (["ruler", "--budget", "64"], "--budget goes with a --policy that has one"),
        (["ruler", "--only", "niah"], "--only 'niah' is unknown; tasks of ruler are niah_single_1"),
        (["ruler", "--length", "0"], "must be at least 1"),
        (["ruler-bytes", "--length", "1000"], "too few for single_needle, of which a question"),
        (["no/such.jsonl"], "no/such.jsonl does not exist; name ruler, ruler-bytes or a file"),
        (["x.jsonl", "--only", "vt"], "--only does not go with x.jsonl"),
        (["x.jsonl", "--qa", "x.json"], "--qa does not go with x.jsonl"),
        (["ruler", "--metric", "f1"], "--metric does not go with ruler"),
        (["ruler-bytes", "--chat"], "--chat does not go with ruler-bytes"),
        (["x.jsonl", "--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["ruler", "--only", "qa_1"], "qa_1 needs --qa with the file of SQuAD"),
        (
            ["ruler", "--policy", "dense", "--policy", "quest", "--heatmap", "x.png"],
            "--heatmap takes one --policy",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert cli.main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_question_may_be_made_by_a_caller(tokenizer):
    def make(size: int) -> Question:
        return Question("own", "x" * size, ("yes",))

    one = fitted(tokenizer, 2000, make)
    assert isinstance(one, Asked)
    assert 1990 <= len(one.prompt) + one.room <= 2000
