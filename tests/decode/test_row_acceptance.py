"""What is known of how far drafts are accepted, row by row, and what gamma follows from it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jspec.decode.auto import HORIZON, LADDER, MEMORY, PRIOR_STEPS, GammaChoice, RowAcceptance
from tests.parameters import default_run

STEPS = 16


@dataclasses.dataclass(frozen=True)
class ChunkTime:
    """Rows that were live when a chunk began, its seconds, and the tokens that rows got."""

    live: int
    seconds: float
    tokens: int


def decode(choose, saw, cost, requests, slots: int, seed: int, steps: int = STEPS):
    """The chunks that decode ``requests``, which free ``slots`` take.

    A request has the rate at which it accepts a further draft token, and how many tokens it needs.
    ``cost(gamma, live)``: seconds of a step.
    """
    rng, chunks = np.random.default_rng(seed), []
    waiting = [requests[i] for i in rng.permutation(len(requests))]
    rows, rate, left = None, np.zeros(slots), np.zeros(slots, int)
    while waiting or left.any():
        for slot in np.flatnonzero(left == 0)[: len(waiting)]:
            rate[slot], left[slot] = waiting.pop()
            if rows is not None:
                rows.renew([int(slot)])
        together = slots >= len(requests)
        rows = rows or RowAcceptance(slots, max(LADDER), steps, together=together)
        gamma = choose(rows, left)
        accepted = np.minimum(rng.geometric(1 - np.tile(rate, (steps, 1))) - 1, gamma)
        behind = np.vstack([np.zeros(slots, int), np.cumsum(1 + accepted, axis=0)])
        live = behind[:-1] < left
        took = cost(gamma, live.sum(axis=1).mean()) * rng.lognormal(0, 0.02)
        saw(gamma, took, accepted, live, rows)
        got = np.minimum(behind[-1], left)
        chunks.append(ChunkTime(int((left > 0).sum()), took, int(got.sum())))
        left -= got
    return chunks


def always(gamma: int):
    """What chooses one gamma for all chunks, and what learns nothing."""
    return lambda *_: gamma, lambda *_: None


def choosing(choice: GammaChoice):
    """What chooses as an engine does, and what learns."""

    def saw(gamma, seconds, accepted, live, rows):
        choice.observe(gamma, seconds, accepted, live)
        choice.add_rows(rows.observe(gamma, accepted, live))

    return choice.choose, saw


@pytest.mark.parametrize("slots", [8, 64])
def test_rows_that_accept_little_weigh_as_much_as_their_steps(slots):
    """Most rows accept nearly everything. The best gamma of their mean loses: the others need far
    more steps with it. Near the best fixed one where slots are refilled, and where none is, so that
    the last row alone counts."""
    costs = {gamma: 1 + 0.2 * gamma for gamma in LADDER}
    rates = np.resize([0.98, 0.98, 0.98, 0.6], 64)

    def seconds(how, seed: int) -> float:
        requests = [(rate, 256) for rate in rates]
        chunks = decode(*how, lambda gamma, _: costs[gamma], requests, slots, seed)
        return sum(chunk.seconds for chunk in chunks)

    fixed = {g: np.mean([seconds(always(g), seed) for seed in (0, 1)]) for g in LADDER}
    speeds = {g: (rates[:, None] ** np.arange(g + 1)).sum(axis=1).mean() / costs[g] for g in LADDER}
    fastest = max(LADDER, key=speeds.__getitem__)
    assert min(fixed.values()) < 0.9 * fixed[fastest]
    how = choosing(GammaChoice(LADDER, 8, warm=0))
    result = [seconds(how, seed) for seed in range(8)][2:]
    assert np.mean(result) < min(fixed.values()) / 0.95
    assert np.mean(result) < 0.95 * fixed[0]


# Seconds of a step by gamma and live rows: where all slots are computed, where keys are read, where
# a pass is bound by the arithmetic of its tokens, and where it is so only if these are many.
STEP_COSTS = {
    "slots": lambda gamma, live: 1 + 0.12 * gamma,
    "keys": lambda gamma, live: 1 + 0.03 * gamma + 0.1 * live,
    "tokens": lambda gamma, live: 1 + 0.02 * live * (gamma + 1),
    "many tokens": lambda gamma, live: max(1.0, 0.02 * live * (gamma + 1)),
}


@pytest.mark.parametrize("cost", default_run(STEP_COSTS, "tokens"))
def test_both_phases_of_a_rollout_are_near_their_best_gamma(cost):
    """Many short answers that accept little, then the end of a long one that accepts much.

    From the third rollout on: the time until half of the slots are free, and the time of a token
    after it.
    """
    slots, steps = 32, 4
    requests = [(0.2, 256)] * 63 + [(0.8, 6144)]

    def phases(how, seed: int) -> tuple[float, float]:
        chunks = decode(*how, cost, requests, slots, seed, steps)
        wide, tail = [], []
        for chunk in chunks:
            (wide if chunk.live > slots // 2 else tail).append(chunk)
        tokens = sum(chunk.tokens for chunk in tail)
        return sum(x.seconds for x in wide), sum(x.seconds for x in tail) / tokens

    best = np.min([phases(always(gamma), 0) for gamma in LADDER], axis=0)
    how = choosing(GammaChoice(LADDER, 8, warm=1))
    result = np.mean([phases(how, seed) for seed in range(4)][2:], axis=0)
    assert (result < best / 0.95).all()


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


@pytest.mark.parametrize(("seconds", "then"), [(2.0, 8), (6.0, 0)])
def test_a_draft_that_lost_with_many_rows_is_tried_once_with_few(seconds, then):
    choice, rows = GammaChoice((0, 8), 8, warm=0), RowAcceptance(32, 8, STEPS, together=False)
    left = {live: np.where(np.arange(32) < live, 10_000, 0) for live in (32, 2)}

    def ran(gamma, live, took):
        accepted, is_live = np.full((STEPS, 32), min(gamma, 4)), np.tile(left[live] > 0, (STEPS, 1))
        choice.observe(gamma, took, accepted, is_live)
        choice.add_rows(rows.observe(gamma, accepted, is_live))

    for gamma, live, took in ((8, 32, 7.0), (0, 32, 1.0), (0, 2, 1.0)):
        ran(gamma, live, took)
    assert choice.choose(rows, left[32]) == 0
    assert choice.choose(rows, left[2]) == 8
    ran(8, 2, seconds)
    assert choice.choose(rows, left[2]) == then
    assert choice.choose(rows, left[32]) == 0
