"""`jspec generate --demo`: the document, what is said of it, and what the model answers."""

import re

import pytest

from jspec.cli import demo
from jspec.decode.generation import Generation
from jspec.decode.stats import Stats
from jspec.models.checkpoint import load_model

NUMBER, NAMES = "71905", ["GZWEN", "YWSQB", "TMCGO", "SNPWR", "JQPCB"]
ANSWER = f"Answer: The names that hold {NUMBER} are {' '.join(NAMES)}.\n"


def test_the_document_answers_its_question():
    text = demo.prompt().decode("ascii")
    assert text.endswith(f"\nQuestion: Which names hold {NUMBER}?\n")
    assert ANSWER not in text
    assert demo.expected() == (NUMBER, NAMES)
    for before, name in zip([NUMBER, *NAMES], NAMES, strict=False):
        assert text.count(f"\nPut {before} into {name}.\n") == 1


def test_the_introduction_shows_the_question_on_80_columns():
    shown = demo.introduction()
    assert shown.endswith(f"\n\nQuestion: Which names hold {NUMBER}?\n")
    for example in re.findall(r"Put \w+ into \w+\.", shown):
        assert example in demo.prompt().decode()
    assert max(map(len, (shown + ANSWER).splitlines())) <= 80


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (ANSWER, True),
        (ANSWER.replace("TMCGO SNPWR", "SNPWR TMCGO"), False),
        (ANSWER.replace(" JQPCB", ""), False),
        (ANSWER.replace(NUMBER, "48213"), False),
        (ANSWER + ANSWER, False),
        (ANSWER[:50], False),
        ("", False),
    ],
    ids=["right", "order", "short", "another", "twice", "cut", "none"],
)
def test_the_verdict_is_the_documents(answer, is_right):
    said = "right: these 5 names, in this order"
    wrong = "wrong: the text says GZWEN YWSQB TMCGO SNPWR JQPCB"
    assert demo.verdict(answer) == (said if is_right else wrong)


def test_the_command_shows_question_answer_and_verdict(run, monkeypatch):
    """What the model would answer is put into its place."""

    def decode(model, prompts, params, *, on_tokens, **settings):
        tokens = tuple(ANSWER.encode())
        assert bytes(prompts[0][1:]) == demo.prompt()
        assert params[0].stop_tokens == (ord(demo.END),)
        assert on_tokens(0, tokens) == len(tokens)
        stats, none = Stats.merged([]), (None,)
        return Generation((tokens,), ("length",), (0,), stats, (len(tokens),), none, none, none)

    monkeypatch.setattr("jspec.cli.serving.decode", decode)
    code, out, err = run("--demo")
    assert (code, out) == (0, ANSWER)
    assert err.startswith(demo.introduction())
    assert re.search(r"^answer +right: these 5 names, in this order *$", err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_the_bundled_model_answers_right(run, draft, monkeypatch):
    monkeypatch.setattr("jspec.cli.generate.load_model", load_model)  # all layers of it
    code, out, err = run("--demo", "--draft", draft)
    assert (code, out) == (0, ANSWER)
    assert max(map(len, err.splitlines())) <= 80
