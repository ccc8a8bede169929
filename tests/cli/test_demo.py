"""`jspec generate --demo`: the document, what is said of it, and what the model answers."""

import re

import pytest

from jspec.cli import demo
from jspec.decode.engine import Generation
from jspec.decode.stats import Stats


def test_the_document_answers_its_question_once():
    document, question = demo.prompt().decode("ascii").rsplit("\nQuestion: ", 1)
    (asked,) = re.findall(r"^Where does record ([\w-]+) point\?\n$", question)
    assert document.count(asked) == 1
    assert asked in demo.facts()
    assert len(set(demo.facts().values())) == len(demo.facts()) == 7


def test_the_introduction_shows_the_question_on_80_columns():
    shown = demo.introduction()
    assert shown.endswith(demo.prompt().decode().splitlines()[-1] + "\n")
    assert " 7 records " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_verdict_knows_what_the_document_says():
    (record, target), (other, _), *_ = demo.facts().items()
    for answer, said in (
        (f"Answer: Record {record} points to {target}.", "right"),
        (f"Answer: Record {other} points to {target}.", "wrong"),
        (f"Record {record} points to {target}. Record {record} points to {other}.", "wrong"),
        (f"Record nobody points to {target}.", "wrong"),
        (f"Answer: Record {record} points to {target[:9]}", "none"),
    ):
        assert demo.verdict(answer).startswith(said), answer


def test_the_command_shows_question_answer_and_verdict(run, monkeypatch):
    """Without a model: what it would answer is put into its place."""
    ((record, target),) = list(demo.facts().items())[:1]

    def decode(model, prompts, params, *, on_tokens, **settings):
        model_tokens = tuple(f"Record {record} points to {target}.\n".encode())
        assert bytes(prompts[0][1:]) == demo.prompt()
        assert params[0].stop_tokens == (ord(demo.END),)
        end = on_tokens(0, model_tokens)
        assert end == len(model_tokens)
        return Generation((model_tokens,), ("length",), (0,), Stats.merged([]))

    monkeypatch.setattr("jspec.cli.generate.decode", decode)
    code, out, err = run("--demo")
    assert code == 0
    assert out == f"Record {record} points to {target}.\n"
    assert err.startswith(demo.introduction())
    assert re.search(r"^answer +right: the text says so *$", err, re.MULTILINE)


@pytest.mark.slow
def test_the_bundled_model_answers_right(run):
    for more in ((), ("--draft", "none")):
        code, _, err = run("--demo", *more)
        assert code == 0
        assert "right: the text says so" in err
        assert max(map(len, err.splitlines())) <= 80
