"""What is known of how far drafts are accepted, row by row, and what gamma follows from it."""

import itertools
import math

import numpy as np
import pytest

from jspec.decode.auto import HORIZON, LADDER, MEMORY, PRIOR_STEPS, GammaChoice, RowAcceptance

STEPS = 16


def decode(choose, saw, costs, rates: np.ndarray, slots: int, seed: int) -> float:
    """Seconds to decode a row of 256 tokens for each of ``rates``, which free ``slots`` take."""
    rng, seconds = np.random.default_rng(seed), 0.0
    waiting = list(rng.permutation(rates))
    rows, rate, left = None, np.zeros(slots), np.zeros(slots, int)
    while waiting or left.any():
        for slot in np.flatnonzero(left == 0)[: len(waiting)]:
            rate[slot], left[slot] = waiting.pop(), 256
            if rows is not None:
                rows.renew([int(slot)])
        rows = rows or RowAcceptance(slots, max(LADDER), STEPS, together=slots >= len(rates))
        gamma = choose(rows, left)
        accepted = np.minimum(rng.geometric(1 - np.tile(rate, (STEPS, 1))) - 1, gamma)
        behind = np.vstack([np.zeros(slots, int), np.cumsum(1 + accepted, axis=0)])
        live = behind[:-1] < left
        took = costs[gamma] * rng.lognormal(0, 0.02)
        saw(gamma, took, accepted, live, rows)
        left, seconds = np.maximum(left - behind[-1], 0), seconds + took
    return seconds


@pytest.mark.parametrize("slots", [8, 64])
def test_rows_that_accept_little_weigh_as_much_as_their_steps(slots):
    """Most rows accept nearly everything. The best gamma of their mean loses: the others need far
    more steps with it. Near the best fixed one where slots are refilled, and where none is, so that
    the last row alone counts."""
    costs = {gamma: 1 + 0.2 * gamma for gamma in LADDER}
    rates = np.resize([0.98, 0.98, 0.98, 0.6], 64)
    fixed = {}
    for gamma in LADDER:
        always, deaf = itertools.repeat(gamma), lambda *_: None
        runs = [decode(lambda *_, g=always: next(g), deaf, costs, rates, slots, s) for s in (0, 1)]
        fixed[gamma] = np.mean(runs)
    speeds = {g: (rates[:, None] ** np.arange(g + 1)).sum(axis=1).mean() / costs[g] for g in LADDER}
    fastest = max(LADDER, key=speeds.__getitem__)
    assert min(fixed.values()) < 0.9 * fixed[fastest]
    choice = GammaChoice(LADDER, 8, warm=0)

    def saw(gamma, seconds, accepted, live, rows):
        choice.observe(gamma, seconds, accepted, live)
        choice.met(rows.observe(gamma, accepted, live))

    result = [decode(choice.choose, saw, costs, rates, slots, seed) for seed in range(8)][2:]
    assert np.mean(result) < min(fixed.values()) / 0.95
    assert np.mean(result) < 0.95 * fixed[0]


def test_a_row_goes_by_others_until_it_is_known():
    """By the definition, step for step; what others took is forgotten."""
    rng, rows = np.random.default_rng(0), RowAcceptance(3, 4, 3, together=False)
    begun, gone_on, others = np.zeros((3, 4)), np.zeros((3, 4)), rng.random((2, 4))
    for index, gamma in enumerate((4, 2, 4)):
        accepted, live = rng.integers(0, gamma + 1, (STEPS, 3)), rng.random((STEPS, 3)) < 0.8
        live[:, 2] &= index > 0
        first = rows.observe(gamma, accepted, live)
        new = ([0, 1], [2], [])[index]
        right = [[(accepted[live[:, r], r] >= n).sum() for n in range(gamma + 1)] for r in new]
        assert first.tolist() == right
        begun[:, :gamma] *= 0.5 ** (STEPS / MEMORY)
        gone_on[:, :gamma] *= 0.5 ** (STEPS / MEMORY)
        for step, row in np.argwhere(live):
            begun[row, : min(accepted[step, row] + 1, gamma)] += 1
            gone_on[row, : accepted[step, row]] += 1
    rows.renew([1])
    begun[1] = gone_on[1] = 0
    left, needed = np.array([500, 400, 0]), 0
    for row, kind in itertools.product((0, 1), others):
        tokens, reached = 1.0, 1.0
        for i in range(4):
            reached *= (gone_on[row, i] + PRIOR_STEPS * kind[i]) / (begun[row, i] + PRIOR_STEPS)
            tokens += reached
        needed += -(-left[row] // (tokens * 3)) * 3 / 2
    assert rows.tokens(4, left, others) == pytest.approx(900 / needed)
    assert rows.tokens(0, left, others) == pytest.approx(900 / (501 + 402))
    far = rows.tokens(2, np.array([HORIZON, 0, 0]), others)
    assert rows.tokens(2, np.array([9 * HORIZON, 0, 0]), others) == far


def test_rows_that_are_waited_for_together_need_as_many_steps_as_the_last():
    """Each is like any of the others as often: the mean over all ways, one by one."""
    rows, rng = RowAcceptance(3, 4, 2, together=True), np.random.default_rng(1)
    left, others = np.array([90, 70, 0]), rng.random((3, 4))
    results = []
    for kinds in itertools.product(others, repeat=3):
        steps = [
            2 * math.ceil(tokens_left / (1 + np.cumprod(kind[:2]).sum()) / 2)
            for tokens_left, kind in zip(left, kinds, strict=True)
        ]
        results.append(max(steps))
    assert rows.tokens(2, left, others) == pytest.approx(160 / (2 * np.mean(results)))


def test_steps_are_compared_at_the_same_number_of_live_rows():
    """A long draft ran while few rows were live, a short one with all: what a row costs is told by
    two chunks of one gamma."""
    choice, rows = GammaChoice((4, 16), 4, warm=0), RowAcceptance(8, 16, STEPS, together=True)
    alive = {8: np.full(8, 10_000), 2: np.array([10_000] * 2 + [0] * 6)}
    for gamma, live, seconds in ((4, 8, 9.0), (4, 2, 6.0), (16, 2, 8.0), (16, 2, 8.0)):
        accepted = np.zeros((STEPS, 8), int)
        choice.observe(gamma, seconds, accepted, np.tile(alive[live] > 0, (STEPS, 1)))
    for live, expected in ((8, (9.0, 11.0)), (2, (6.0, 8.0)), (8, (9.0, 11.0))):
        choice.choose(rows, alive[live])
        assert [choice.cost(4), choice.cost(16)] == pytest.approx(expected)


def test_a_row_costs_no_more_than_its_share_of_a_step():
    """Two chunks with nearly as many live rows and unlike times say nothing of one with a few."""
    choice, rows = GammaChoice((0, 4), 4, warm=0), RowAcceptance(8, 4, STEPS, together=True)
    for ended, seconds in ((0, 9.0), (1, 6.0), (0, 9.0)):
        live = np.ones((STEPS, 8), bool)
        live[-1, :ended] = False
        choice.observe(4, seconds, np.zeros((STEPS, 8), int), live)
    choice.choose(rows, np.array([100] + [0] * 7))
    assert 1.0 < choice.cost(4) <= 9.0
