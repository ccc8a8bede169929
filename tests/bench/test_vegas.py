"""The suites about drafts that verification guides: their checks, their tables, their sections."""

import numpy as np
import pytest
from scipy import stats

import jspec
from bench import acceptance, overlap
from bench.__main__ import main
from jspec.decode.draft import named_draft


def test_positions_in_common():
    picked = np.array([[[1, 2, 3, 4], [1, 2, -1, -1]], [[3, 4, 5, 6], [2, 1, -1, -1]]])
    np.testing.assert_allclose(overlap.shared(picked), [[1, 0.75], [0.75, 1]])


def test_every_draft_of_the_table_has_a_name():
    for text in acceptance.drafts(0.07).values():
        named_draft(text)


def row(name: str, temperature: float, committed: int, per_text=(1.5, 2.5)) -> dict:
    plan = {"context": 512, "texts": 2, "new": 8, "gamma": 2, "ratio": 0.07}
    return {
        "case": plan | {"temperature": temperature},
        "name": name,
        "checked": True,
        "steps": 10,
        "committed": committed,
        "attempts_at": [10, 10],
        "accepted_at": [8, 4],
        "per_text": list(per_text),
    }


def test_the_lines_of_drafters():
    """By their means, highest first; one of which a temperature is missing is left out."""
    published, found = acceptance.PUBLISHED, [("b", 0.0, 25, (2.5, 2.5)), ("b", 1.0, 30)]
    rows = [row(*x) for x in ((published, 0.0, 20), (published, 1.0, 15), *found)]
    ((title, lines),) = acceptance.by_plan({"rows": [*rows, row("c", 0.0, 30)]}).items()
    assert title == "2 texts of 512 tokens, 8 new ones each, gamma 2, 7 % of the context"
    # Differences of 1 and 0: their mean, and sqrt(0.5 / 2).
    assert lines[0] == ["b", "2.50", "+0.50 ± 0.50", "3.00", "+0.00 ± 0.00", "0.80 0.40"]
    assert lines[1][:5] == [published, "2.00", "", "1.50", ""]
    assert len(lines) == 2


def test_what_tokens_have_in_common_by_distance():
    alike = {"overlap": [[1, 0.5, 0.2], [0.5, 1, 0.7], [0.2, 0.7, 1]]}
    assert list(overlap.by_distance(alike)) == ["0.600", "0.200"]


def test_the_error_of_a_difference_is_that_of_pairs():
    rng = np.random.default_rng(0)
    own, other = rng.uniform(1, 8, (2, 20))
    mean, error = (float(x) for x in acceptance.over(list(own), list(other)).split(" ± "))
    assert mean == pytest.approx(np.mean(own - other), abs=5e-3)
    assert error == pytest.approx(stats.sem(own - other), abs=5e-3)


def test_texts_behind_others_are_those_of_a_longer_plan():
    _, tokenizer = jspec.load_bundled()
    whole = acceptance.texts_of(acceptance.plan_of("S=1K,texts=5"), tokenizer)
    rest = acceptance.texts_of(acceptance.plan_of("S=1K,texts=3,skip=2"), tokenizer)
    assert rest == whole[2:]
    assert len({tuple(text) for text in whole}) == 5
    with pytest.raises(ValueError, match=r"texts=9 after skip=99999 are more than the \d+ source"):
        acceptance.texts_of(acceptance.plan_of("texts=9,skip=99999"), tokenizer)


def test_a_drafter_is_run_by_its_name():
    plan = acceptance.plan_of("S=32000,gamma=11,percent=3")
    assert plan == acceptance.Plan(32000, 16, 256, 11, 0.03)
    configs = {
        name: acceptance.config_of(plan, name, text)
        for name, text in acceptance.drafts(plan.ratio).items()
    }
    assert {name for name, own in configs.items() if own.rule == "block"} == {acceptance.BLOCK}
    assert {name for name, own in configs.items() if own.gamma != 11} == {"none"}
    assert configs["none"].gamma == 0


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["vegas-accept", "vegas-overlap"])
def test_a_quick_run(suite, capsys):
    assert main([suite, "--quick"]) == 0
    assert capsys.readouterr().out
