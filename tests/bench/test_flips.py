"""Flips against plain decoding: of right and wrong steps, at each batch, and of what fell back."""

import jax
import pytest

import jspec
from bench import flips
from bench.ceilings import Ceilings
from bench.drafters import PLAIN, Drafting
from bench.settings import Settings
from jspec.models.bundled import bundled_path
from jspec.policies import Streaming
from tests.conftest import OF_BYTES, make_decoder

CASE = "S=40,prompts=3,B=2/1,new=24,gamma=3"


@pytest.fixture
def model(monkeypatch):
    # A sharp model, so that some drafts are accepted and others are not.
    model, tokenizer = (
        make_decoder(OF_BYTES, seed=1, head=3.0),
        jspec.load_tokenizer(bundled_path()),
    )
    monkeypatch.setattr(jspec, "load_bundled", lambda: (model, tokenizer))
    monkeypatch.setattr("bench.ceilings.measured", lambda: Ceilings(1e10, None))
    return model


def test_wrong_steps_have_flips_and_right_ones_none(model, monkeypatch):
    """Steps that read a window of the context stand in for a drafter that verifies wrongly."""
    right = flips.drafting_of

    def drafting_of(name, *settings):
        if name != "suffix":
            return right(name, *settings)
        target = Streaming(window=8)
        return Drafting(name, jspec.StepConfig(0, jspec.NoDraft(), target=target))

    monkeypatch.setattr(flips, "drafting_of", drafting_of)
    case = flips.FLIPS.case(f"{CASE},exact=no")
    rows = list(flips.FLIPS.rows(case, Settings(only=("ngram", "suffix"))))
    names = [PLAIN, "ngram", "suffix"]
    assert [(row["case"]["B"], row["name"]) for row in rows] == [
        (batch, name) for batch in (2, 1) for name in names
    ]
    assert {row["checked"] for row in rows} == {None}
    for row in rows:
        if row["name"] == "suffix":
            # Of a row that differs no token counts after the first one that does.
            assert row["flips"] == len(row["first"]) > 0
            assert row["tokens"] < 24 * (4 if row["case"]["B"] == 2 else 3)
        else:
            # The first prompt comes again in the second batch of two rows.
            assert (row["flips"], row["fell_back"]) == (0, 0)
            assert row["tokens"] == 24 * (4 if row["case"]["B"] == 2 else 3)
            assert "first" not in row
    two, one = (row["first"] for row in rows if row["name"] == "suffix")
    assert sorted(map(tuple, two)) == sorted(map(tuple, [*one, *one[:1]]))
    steps = {(row["case"]["B"], row["name"]): row["steps"] for row in rows}
    assert (steps[2, PLAIN], steps[1, PLAIN]) == (2 * 24, 3 * 24)
    assert steps[1, "ngram"] < 3 * 24


def test_rows_that_were_not_exact_are_flips():
    expected = {0: [1, 2, 3], 1: [4, 5, 6]}
    answers = [[1, 2, 3], [4, 0, 6], [1, 2, 0]]
    result = flips.compared(answers, expected, [0, 1, 0], fell_back=False)
    assert result == {"flips": 2, "fell_back": 0, "tokens": 8, "first": [[1, 1], [0, 2]]}
    result = flips.compared(answers[:1], expected, [0], fell_back=True)
    assert result == {"flips": 1, "fell_back": 1, "tokens": 3}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU refuses nothing here")
def test_what_cannot_be_exact_falls_back_or_says_why(model):
    assert flips.drafting_of("ngram", 3, model, "tokens").config.exact is None
    (row,) = flips.FLIPS.rows(flips.FLIPS.case(CASE), Settings(only=("ngram",)))
    assert row["checked"] is None
    assert "Triton needs an NVIDIA GPU" in row["reason"]
