"""Statistics against a count in plain Python that knows nothing of the step."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.generation import generate
from jspec.decode.state import StepRecord
from jspec.decode.stats import PositionRate, Stats, Tally
from tests.conftest import make_decoder
from tests.decode.common import DRAFT_LIMITS, NEW, NGRAM, STREAMING, prompts
from tests.decode.test_draft import lookup
from tests.parameters import default_run


def counted(prompt, truth, stops, limit, draft_limit, gamma) -> list[tuple[int, int, int]]:
    """(drafted, accepted, committed) of each step of one row, replayed on its greedy text.

    A stop token inside the accepted run ends the row there, and draft tokens after it count in
    nothing.
    """
    text, steps = list(prompt), []
    last = len(prompt) + limit
    while len(text) < last and (len(text) == len(prompt) or text[-1] not in stops):
        room = min(gamma, last - len(text) - 1, gamma if draft_limit is None else draft_limit)
        draft = lookup(text, NGRAM, gamma)[:room]
        ahead = truth[len(text) - len(prompt) :]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == ahead[accepted]:
            accepted += 1
        block = ahead[: accepted + 1]
        end = next((i + 1 for i, token in enumerate(block) if token in stops), len(block))
        if end <= accepted:
            draft, accepted = draft[:end], end
        text += block[:end]
        steps.append((len(draft), accepted, end))
    return steps


@pytest.mark.parametrize("gamma", default_run([3, 6], "3"))
def test_statistics_equal_an_independent_count(gamma, sharp):
    # Prompts that end in the model's own circles: what is copied from them is accepted, and may
    # hold the stop tokens, of which some come early, some late, some never.
    greedy = SamplingParams(max_new_tokens=40)
    begun = generate(sharp, prompts(), greedy, draft=None).tokens
    texts = [[*text, *new] for text, new in zip(prompts(), begun, strict=True)]
    truth = generate(sharp, texts, greedy, draft=None).tokens
    stops = [(tokens[3 * row],) if row % 2 else () for row, tokens in enumerate(truth)]
    params = [
        SamplingParams(max_new_tokens=new, stop_tokens=stop, draft_limit=limit)
        for new, stop, limit in zip(NEW, stops, DRAFT_LIMITS, strict=True)
    ]
    got = generate(sharp, texts, params, gamma=gamma, draft=NGRAM)

    rows = [
        counted(text, list(tokens), stop, new, limit, gamma)
        for text, tokens, stop, new, limit in zip(
            texts, truth, stops, NEW, DRAFT_LIMITS, strict=True
        )
    ]
    steps = [step for row in rows for step in row]
    stats = got.stats
    assert [len(tokens) for tokens in got.tokens] == [sum(s[2] for s in row) for row in rows]
    assert stats.steps == len(steps)
    assert stats.drafted == sum(s[0] for s in steps)
    assert stats.accepted == sum(s[1] for s in steps)
    assert stats.committed == sum(s[2] for s in steps) == sum(map(len, got.tokens))
    assert stats.acceptance_by_position == tuple(
        PositionRate(sum(s[0] > i for s in steps), sum(s[1] > i for s in steps))
        for i in range(gamma)
    )
    assert stats.mean_accepted_length == pytest.approx(stats.committed / len(steps))
    assert stats.acceptance_rate == pytest.approx(stats.accepted / stats.drafted)
    assert stats.rows == 8
    assert stats.prompt_tokens == sum(map(len, texts))
    # The cases this is about did occur.
    assert any(s[2] == s[1] for s in steps), "no stop token stood inside an accepted run"
    assert len({len(row) for row in rows}) > 3, "all rows ended together"


def test_plain_decoding_commits_one_token_a_step(sharp):
    stats = generate(sharp, prompts(), SamplingParams(max_new_tokens=5), draft=None).stats
    assert (stats.steps, stats.committed, stats.drafted, stats.accepted) == (40, 40, 0, 0)
    assert stats.mean_accepted_length == 1
    assert stats.acceptance_rate == 0
    assert stats.acceptance_by_position == ()


def record(drafted, accepted, committed, gamma: int) -> StepRecord:
    """The record of steps with these counts, each ``[steps][B]``."""
    counts = [drafted, np.zeros_like(drafted), accepted, committed]
    tokens = np.zeros((*np.shape(drafted), gamma + 1), int)
    return StepRecord(jnp.asarray(np.concatenate([np.stack(counts, axis=-1), tokens], axis=-1)))


def test_a_row_that_was_done_counts_nothing():
    tally = Tally(2)
    drafted, accepted, committed = [[2, 2], [1, 0]], [[1, 2], [1, 0]], [[2, 3], [2, 0]]
    assert tally.add(record(drafted, accepted, committed, 2), np.array([9, 9])).tolist() == [2, 1]
    times = {"compilations": 3, "compile_s": 1.0, "prefill_s": 0.5, "decode_s": 2.0}
    stats = tally.stats(rows=2, prompt_tokens=7, **times)
    assert (stats.steps, stats.drafted, stats.accepted, stats.committed) == (3, 5, 4, 7)
    assert stats.acceptance_by_position == (PositionRate(3, 3), PositionRate(2, 1))
    assert stats.acceptance_by_position[1].rate == 0.5
    assert stats.decode_tokens_per_s == 3.5
    assert stats.prefill_tokens_per_s == 14
    plain = stats.as_dict()
    assert plain["acceptance_by_position"][1] == {"attempts": 2, "accepted": 1, "rate": 0.5}
    assert plain["mean_accepted_length"] == pytest.approx(7 / 3)


def test_a_row_that_ends_within_a_chunk_counts_what_it_keeps():
    """Three rows of three steps: one keeps all 9 tokens, one 4, one none."""
    drafted = np.array([[3, 3, 3], [3, 3, 3], [3, 3, 3]])
    accepted = np.array([[3, 2, 3], [1, 3, 0], [2, 3, 3]])
    committed = accepted + 1
    tally = Tally(3)
    steps = tally.add(record(drafted, accepted, committed, 3), np.array([9, 4, 0]))
    assert steps.tolist() == [3, 2, 0]
    assert tally.attempts_at.sum() == (3 + 3 + 3) + (3 + 1)
    assert tally.accepted_at.sum() == (3 + 1 + 2) + (2 + 1)
    assert tally.committed == 9 + 4
    assert tally.attempts_at.tolist() == [5, 4, 4]
    assert tally.accepted_at.tolist() == [5, 3, 1]
    assert tally.steps_at == {3: 5}


@pytest.mark.parametrize("chunk", default_run([1, 7], "7"))
def test_an_end_that_the_caller_finds_counts_as_a_stop_token_there(chunk):
    """The same texts end at the same tokens: by stop tokens in the step, or after a chunk by the
    caller, who sees tokens that come after. No count tells the two apart."""
    # Two layers: the text of one accepts no draft before its first token that repeats.
    model = make_decoder(seed=1, embedding=400.0, head=4.0)
    texts, free = prompts(), SamplingParams(max_new_tokens=40)
    truth = generate(model, texts, free, draft=None).tokens
    stops = [tokens[3 * row] for row, tokens in enumerate(truth)]
    params = [SamplingParams(max_new_tokens=40, stop_tokens=(stop,)) for stop in stops]
    settings = {"draft": NGRAM, "gamma": 6}
    expected = generate(model, texts, params, **settings)

    def on_tokens(row, tokens):
        return tokens.index(stops[row]) + 1 if stops[row] in tokens else None

    got = generate(model, texts, free, **settings, steps_per_chunk=chunk, on_tokens=on_tokens)
    assert got.tokens == expected.tokens
    assert got.finished == expected.finished == ("stop",) * 8
    counts = "steps drafted accepted committed acceptance_by_position".split()
    assert [getattr(got.stats, n) for n in counts] == [getattr(expected.stats, n) for n in counts]
    assert got.stats.drafted > got.stats.accepted > 0


@pytest.mark.exhaustive
def test_merged_statistics_are_the_sum(sharp):
    params = SamplingParams(max_new_tokens=12)
    parts = [
        generate(sharp, prompts()[:2], params, gamma=2, draft=STREAMING).stats,
        generate(sharp, prompts()[2:4], params, gamma=4, draft=STREAMING).stats,
    ]
    merged = Stats.merged(parts)
    names = "rows prompt_tokens steps drafted accepted committed compilations decode_s"
    for name in names.split():
        assert getattr(merged, name) == sum(getattr(part, name) for part in parts)
    for index, at in enumerate(merged.acceptance_by_position):
        present = [p.acceptance_by_position[index] for p in parts if index < p_length(p)]
        assert at.attempts == sum(p.attempts for p in present)
        assert at.accepted == sum(p.accepted for p in present)
    assert p_length(merged) == 4


def p_length(stats: Stats) -> int:
    return len(stats.acceptance_by_position)
