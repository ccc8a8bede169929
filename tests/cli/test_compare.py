"""`--compare`: identical tokens, or the same distribution, and how it is said."""

import dataclasses
import json

import pytest

from jspec.cli.requests import CliRequest
from jspec.cli.show import POSITIONS, print_table
from jspec.config import SamplingParams
from jspec.decode.stats import PositionRate, Stats


@pytest.mark.parametrize(
    ("draft", "temperature"),
    [
        ("ngram", "9"),
        pytest.param("streaming", "0", marks=pytest.mark.exhaustive),
        pytest.param("dense", "0", marks=pytest.mark.slow),
        ("none", "0"),
    ],
)
def test_compare_says_identical(run, source, draft, temperature):
    asked = ("--prompt-file", source, "--draft", draft, "--temperature", temperature)
    # The seed is a fresh one, and so hot a request may draw an end token.
    length = ("--max-new-tokens", "24", "--ignore-eos")
    code, out, _ = run(*asked, *length, "--compare", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["compare"]["identical"] is True
    assert result["compare"]["speedup"] > 0
    assert len(result["tokens"]) == result["stats"]["committed"] == 24


@pytest.mark.exhaustive
def test_compare_expects_of_sampled_tokens_the_same_law_alone(run, source):
    # So hot that two runs never draw the same 24 tokens.
    asked = ("--prompt-file", source, "--draft", "streaming", "--temperature", "9")
    code, _, err = run(*asked, "--max-new-tokens", "24", "--compare")
    assert code == 0
    assert "other tokens of the same distribution" in err


def test_a_lossy_policy_is_compared_as_such(run, source):
    """Eight positions in every layer cannot give what the whole context gives."""
    policy = "exact_topk:budget=8,sinks=1,recent=4,dense_layers=0"
    asked = ("--prompt-file", source, "--max-new-tokens", "24", "--policy", policy, "--compare")
    code, out, _ = run(*asked, "--json")
    result = json.loads(out)
    assert code == 0
    assert not result["compare"]["lossless"]
    assert not result["compare"]["identical"]
    assert result["stats"]["drafted"] == 0


def compared(rows: list[tuple[float, list[int], list[int]]], *, lossless: bool = True) -> dict:
    """What `--compare` says of rows of (temperature, tokens, tokens of plain decoding)."""
    from jspec.cli import generate

    def outcome(which: int) -> generate.Outcome:
        served = []
        for row in rows:
            params = SamplingParams(temperature=row[0])
            text = type("Row", (), {"tokens": row[which]})
            served.append(generate.Served(CliRequest(b"x", params, ()), text, "stop"))
        return generate.Outcome(served, Stats.merged([]), False)

    return generate._compare(outcome(1), outcome(2), lossless=lossless)


@pytest.mark.parametrize(
    ("rows", "sampled", "said"),
    [
        ([(0, [1], [1]), (0, [2], [2])], False, "identical tokens"),
        ([(0, [1], [1]), (0, [2], [3])], False, "tokens differ"),
        ([(0, [1], [1]), (1, [2], [3])], True, "other tokens of the same distribution"),
        ([(1, [1], [1]), (0, [2], [3])], True, "tokens differ"),
        ([(1, [1], [1]), (0, [2], [2])], True, "identical tokens"),
        ([(1, [1], [2])], True, "other tokens of the same distribution"),
    ],
    ids=["same", "differ", "sampled-differs", "greedy-differs", "mixed-same", "sampled"],
)
def test_compare_tells_greedy_from_sampled_in_a_mixed_batch(rows, sampled, said, capsys):
    result = compared(rows)
    assert result["sampled"] == sampled
    assert result["identical"] == (said == "identical tokens")
    assert result["greedy_identical"] == (said != "tokens differ")
    print_table(Stats.merged([]), [], result)
    assert f"against plain decoding  {said}, " in capsys.readouterr().err


def test_compare_promises_no_law_of_a_lossy_policy(capsys):
    print_table(Stats.merged([]), [], compared([(1, [1], [2])], lossless=False))
    assert "tokens differ, as --policy is not lossless, " in capsys.readouterr().err


def test_prompts_that_an_engine_prefilled_as_it_decoded_have_no_rate(capsys):
    stats = dataclasses.replace(Stats.merged([]), prompt_tokens=20)
    print_table(stats, [], None)
    assert "prefill  20 tokens, in the time of decode" in capsys.readouterr().err


def test_acceptance_is_shown_of_positions_that_were_drafted(capsys):
    positions = (PositionRate(4, 3), PositionRate(2, 0), PositionRate(0, 0))
    stats = dataclasses.replace(Stats.merged([]), drafted=6, acceptance_by_position=positions)
    print_table(stats, [], None)
    shown = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert "acceptance by position  0.75 0.00" in shown


def test_acceptance_of_long_drafts_says_how_many_positions_there_are(capsys):
    positions = (PositionRate(4, 1),) * 20
    stats = dataclasses.replace(Stats.merged([]), drafted=2000, acceptance_by_position=positions)
    print_table(stats, [], None)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"by position {'0.25 ' * POSITIONS}... (20 positions)" in shown


def test_drafts_that_never_came_are_said_to_be_none(capsys):
    stats = dataclasses.replace(Stats.merged([]), acceptance_by_position=(PositionRate(0, 0),))
    print_table(stats, [], None)
    assert "drafted tokens  none" in capsys.readouterr().err
