"""gamma="auto": its choice against the best fixed gamma, by simulation with stated costs."""

import itertools
from collections import Counter, deque

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode import chunks
from jspec.decode.auto import (
    HORIZON,
    LADDER,
    PROBING,
    RECENT_ROWS,
    GammaChoice,
    RowAcceptance,
    choice_of,
    mean,
)
from jspec.decode.chunks import Chunk, Chunks
from jspec.decode.draft import (
    Chain,
    ModelDraft,
    NgramDraft,
    SelfDraft,
    SuffixDraft,
    named_draft,
)
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models, StepRecord
from jspec.decode.stats import Stats
from jspec.decode.step import speculative_step
from jspec.policies import Dense, Quest
from tests.decode.common import options_of, prompts, requests
from tests.parameters import default_run

STEPS = 16


class World:
    """Steps of stated cost and acceptance.

    A step of gamma g takes 1 + ``draft`` g + ``verify`` g seconds, with 2 % of noise, and twice as
    long in the first two chunks of a gamma. Each of ``rows`` accepts a further draft token with
    probability ``rate``.
    """

    def __init__(self, draft: float, verify: float, rate: float, rows: int, seed: int = 0):
        self.per_token = draft + verify
        self.rate, self.rows, self.speed = rate, rows, 1.0
        self.rng = np.random.default_rng(seed)
        self.runs: dict[int, int] = dict.fromkeys(LADDER, 0)

    def cost(self, gamma: int) -> float:
        return 1 + self.per_token * gamma

    def value(self, gamma: int) -> float:
        """Tokens a second of a row, in the mean."""
        return sum(self.rate**i for i in range(gamma + 1)) / self.cost(gamma)

    def chunk(self, gamma: int) -> tuple[float, np.ndarray]:
        self.runs[gamma] += 1
        seconds = self.cost(gamma) / self.speed * self.rng.lognormal(0, 0.02)
        if self.runs[gamma] <= 2:
            seconds *= 2
        accepted = self.rng.geometric(1 - self.rate, (STEPS, self.rows)) - 1
        return seconds, np.minimum(accepted, gamma)


class Trees(World):
    """Where all tokens of a draft but the first are further chances of each token of a path."""

    def rate_of(self, gamma: int) -> float:
        return 1 - (1 - self.rate) ** (1 + 0.7 * np.log2(max(gamma, 1)))

    def value(self, gamma: int) -> float:
        return sum(self.rate_of(gamma) ** i for i in range(gamma + 1)) / self.cost(gamma)

    def chunk(self, gamma: int) -> tuple[float, np.ndarray]:
        seconds, _ = super().chunk(gamma)
        accepted = self.rng.geometric(1 - self.rate_of(gamma), (STEPS, self.rows)) - 1
        return seconds, np.minimum(accepted, gamma)


def rows_of(
    batch: int, longest: int = max(LADDER), branches: bool = False
) -> tuple[RowAcceptance, np.ndarray]:
    """Rows of which nothing is known, and that are far from their ends."""
    settings = {"together": False, "branches": branches}
    return RowAcceptance(batch, longest, STEPS, **settings), np.full(batch, HORIZON)


def saw(choice: GammaChoice, gamma: int, seconds: float | None, accepted: np.ndarray) -> None:
    """Have it take up a chunk of one row."""
    accepted = accepted[:, None]
    choice.observe(gamma, seconds, accepted, np.ones_like(accepted, bool))


def run(choice: GammaChoice, world: World, chunks: int, ahead: int = 0) -> tuple[float, list[int]]:
    """Tokens a second over so many chunks, and the gammas that ran.

    ``ahead``: how many are chosen before the one at work is seen.
    """
    tokens = time = 0.0
    selected, (rows, left) = [], rows_of(world.rows, branches=choice.branches)
    live = np.ones((STEPS, world.rows), bool)
    chosen = deque(choice.choose(rows, left) for _ in range(ahead))
    for _ in range(chunks):
        chosen.append(choice.choose(rows, left))
        gamma = chosen.popleft()
        seconds, accepted = world.chunk(gamma)
        choice.observe(gamma, seconds, accepted, live)
        choice.add_rows(rows.observe(gamma, accepted, live))
        tokens += (1 + accepted).mean() * STEPS
        time += seconds * STEPS
        selected.append(gamma)
    return tokens / time, selected


# Draft tokens that cost nothing, as n-grams, or a sparse pass; passes that are bound by memory or
# by their products; drafts that are never, seldom and mostly accepted.
COSTS = ((0.0, 0.01), (0.0, 0.2), (0.3, 0.01))
GRID = [(*cost, *rest) for cost, *rest in itertools.product(COSTS, (0.0, 0.5, 0.9), (1, 32))]
# Every cost, rate and number of rows, and both ways to choose; others are slow, three in four.
QUICK = ("0.0-0.2-0.9-1-1", "0.3-0.01-0.0-32-1", "0.0-0.01-0.5-32-0")
WAYS = default_run(
    [(*world, ahead) for world in GRID for ahead in (0, 1)],
    *QUICK,
    slow=[
        "-".join(map(str, (*world, ahead)))
        for i, world in enumerate(GRID)
        for ahead in (0, 1)
        if (i + i // 2 + ahead) % 4
    ],
)


@pytest.mark.parametrize(("draft", "verify", "rate", "rows", "ahead"), WAYS)
def test_it_is_near_the_best_and_never_below_plain(draft, verify, rate, rows, ahead):
    """Once its ladder is warm: at least 0.95 of the best fixed one and 0.99 of plain decoding."""
    world = World(draft, verify, rate, rows)
    choice = GammaChoice(LADDER, 8, warm=2)
    _, first = run(choice, world, 60, ahead)
    got, _ = run(choice, world, 800, ahead)
    best = max(map(world.value, LADDER))
    assert got > 0.95 * best
    assert got > 0.99 * world.value(0)
    assert 0 in first


@pytest.mark.parametrize(
    ("verify", "rate", "rows", "best"), [(0.02, 0.0, 32, 0), (0.02, 0.3, 1, 16), (0.1, 0.3, 32, 8)]
)
def test_a_tree_has_the_number_of_nodes_that_pays(verify, rate, rows, best):
    """By its own acceptance: that of trees of all numbers together misses what more nodes give."""
    got = {}
    for branches in (True, False) if best else (True,):
        world = Trees(0.0, verify, rate, rows)
        choice = GammaChoice(LADDER, 8, warm=2, branches=branches)
        run(choice, world, 60)
        got[branches], _ = run(choice, world, 400)
    assert max(LADDER, key=world.value) == best
    assert got[True] > 0.95 * world.value(best)
    assert got[True] > 0.99 * world.value(0)
    if best:
        assert got[False] < 0.92 * world.value(best)


def test_the_rates_of_a_tree_are_of_its_gamma_and_fade_to_those_of_all():
    choice = GammaChoice((0, 2, 4), 2, branches=True)
    rows, left = rows_of(1, 4, branches=True)
    one = np.ones((STEPS, 1), bool)
    for _ in range(8):
        for gamma, count in ((2, 0), (4, 4)):
            accepted = np.full((STEPS, 1), count)
            choice.observe(gamma, 1.0, accepted, one)
            choice.add_rows(rows.observe(gamma, accepted, one))
    # Rows that just started are like those before them.
    new, _ = rows_of(1, 4, branches=True)
    tokens = {g: new.tokens(g, left, choice._rates(g)) for g in (2, 4)}
    assert tokens[2] < 1.2
    assert tokens[4] > 4
    for _ in range(40):
        accepted = np.full((STEPS, 1), 4)
        choice.observe(4, 1.0, accepted, one)
        rows.observe(4, accepted, one)
    # The first chunk of the row is still what a new row may be like.
    assert rows.tokens(2, left, choice._rates(2)) > 2
    rows.renew([0])
    assert not rows.accepted.pooled.begun.any()


def test_it_follows_what_is_accepted():
    """From no acceptance to much and back: it settles on the best of each."""
    world = World(0.0, 0.01, 0.0, rows=4)
    choice = GammaChoice(LADDER, 8, warm=2)
    run(choice, world, 100)
    assert choice.current == 0
    for rate, low, high in ((0.9, 8, 16), (0.0, 0, 1)):
        world.rate = rate
        run(choice, world, 400)
        assert low <= choice.current <= high


def test_a_device_that_slows_down_does_not_count_against_the_gamma_that_runs():
    world, choice = World(0.0, 0.2, 0.6, rows=4), GammaChoice(LADDER, 8, warm=2)
    run(choice, world, 200)
    before = choice.current
    world.speed = 0.3
    _, chosen = run(choice, world, 40)
    assert chosen.count(before) > 25
    assert choice.pace == pytest.approx(1 / 0.3, rel=0.1)


def test_what_it_chooses_follows_from_what_it_saw():
    chosen = [run(GammaChoice(LADDER, 4), World(0.1, 0.1, 0.5, 2, seed=7), 80)[1] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 2


def test_a_hopeless_gamma_never_runs():
    """What could not win at the cost of a shorter one is not compiled."""
    choice = GammaChoice(LADDER, 1)
    _, chosen = run(choice, World(0.5, 0.0, 0.05, rows=8), 200)
    assert max(chosen) < 8


@pytest.mark.parametrize("ahead", default_run([0, 1], "1"))
def test_looking_again_costs_a_bounded_share(ahead):
    """Where nothing is accepted, drafting takes under 1 % of the time that plain steps take.

    Chunks that were chosen and never seen, as the two runs leave them, end nothing.
    """
    world = World(1.0, 0.2, 0.0, rows=8)
    choice = GammaChoice(LADDER, 1, warm=2)
    run(choice, world, 40, ahead)
    got, chosen = run(choice, world, 2000, ahead)
    assert got > 0.99
    assert 0 < sum(g > 0 for g in chosen) < 20


def test_a_probe_that_was_never_read_is_made_again():
    """The chunk was the one that nobody needed."""
    choice, plain, one = GammaChoice((0, 1), 1), np.zeros(STEPS, int), rows_of(1, 1)
    for gamma in (1, 1, 0, 0):
        saw(choice, gamma, 1.0 + gamma, plain)
    choice.allowance = 10.0
    probes = []
    for _ in range(60):
        if choice.choose(*one) == 1:
            probes.append(choice.chunks)
        saw(choice, 0, 1.0, plain)
    assert probes == list(range(18, 64, 2))
    assert choice.runs[1] == 2


def test_a_probe_is_charged_for_what_it_lost_and_no_other_chunk_is():
    choice, plain, one = GammaChoice((0, 1), 1), np.zeros(STEPS, int), rows_of(1, 1)
    for gamma in (1, 1, *[0] * 16):
        saw(choice, gamma, 1.0 + gamma, plain)
    choice.allowance = 10.0
    assert choice.choose(*one) == 1
    saw(choice, 0, 3.0, plain)  # was at work then
    assert choice.allowance == pytest.approx(10 + PROBING * 3)
    assert choice.choose(*one) == 0
    saw(choice, 1, 2.0, plain)
    assert choice.allowance == pytest.approx(10 + PROBING * 5 - 1)


def test_a_chunk_without_a_time_tells_what_was_accepted():
    choice, accepted, one = GammaChoice((0, 2), 2), np.array([2, 2, 0, 1]), rows_of(1, 2)
    for _ in range(3):
        saw(choice, 2, None, accepted)
    assert not any(choice.times.values())
    assert choice.choose(*one) == choice.start
    of_all = choice.accepted.pooled.rates(0.8)
    assert mean(of_all) == pytest.approx(1.3, abs=0.1)  # 3/4 + 1/2
    assert choice.runs[2] == 3


def test_an_engine_tells_what_rows_need_and_forgets_those_that_others_took(sharp, monkeypatch):
    """With chunks ahead of what was read, too."""
    asked, renewed, right = [], [], RowAcceptance.renew

    def choose(self, rows, left):
        asked.append(left.tolist())
        return 2

    def renew(self, rows):
        renewed.append(rows)
        return right(self, rows)

    monkeypatch.setattr(GammaChoice, "choose", choose)
    monkeypatch.setattr(RowAcceptance, "renew", renew)
    settings = {"draft": NgramDraft(), "gamma": "auto", "steps_per_chunk": 2}
    engine = Engine(sharp, slots=2, capacity=64, **settings)
    requests = [engine.submit(text, SamplingParams(max_new_tokens=9)) for text in prompts()[:4]]
    engine.run()
    assert all(len(request.tokens) == 9 for request in requests)
    assert all(0 <= n <= 9 for left in asked for n in left)
    assert max(asked[0]) == 9
    assert any(left != sorted(left) or 0 < min(left) < 9 for left in asked)
    assert sum(map(len, renewed)) >= 2


def test_a_request_that_came_after_a_chunk_is_not_judged_by_it(sharp):
    """Neither what it accepts nor how much it still needs, where its slot had another before."""
    options = options_of(sharp, draft=NgramDraft(), gamma="auto", steps_per_chunk=2)
    work, choice = Chunks(options, 2), GammaChoice(LADDER, 2)
    committed = np.array([[1, 2, 7, 7, -1], [2, 3, 7, 7, 7]])
    step = StepRecord.of(np.full(2, 2), np.zeros(2, bool), committed)
    record = jax.tree.map(lambda x: np.stack([x, x]), step)

    def chunk() -> Chunk:
        return Chunk(record, 2, choice, 0.0, 0.0, filled={1})

    work.finish(chunk())
    assert work._acceptance.accepted.pooled.begun[:, :2].tolist() == [[2, 2], [0, 0]]
    assert choice.rows_added == 1
    assert work.paces.tolist() == [4, 6]
    work.running.append(chunk())
    assert work._left_after_work(np.array([9, 9])).tolist() == [5, 9]


def test_a_row_that_is_met_replaces_all_of_an_older_one():
    """Its drafts were shorter: of longer ones nothing is known."""
    choice = GammaChoice(LADDER, 2)
    choice.add_rows(np.full((RECENT_ROWS, 5), 3))
    choice.add_rows(np.array([[2, 1]]))
    assert choice.recent_rows.pooled.begun[0].tolist() == [2, *[0] * 15]
    assert choice.recent_rows.pooled.gone_on[0].tolist() == [1, *[0] * 15]
    assert choice.recent_rows.pooled.begun[1, :5].tolist() == [3, 3, 3, 3, 0]


# --- in generation ---------------------------------------------------------------------------


def cycle_gammas(monkeypatch, gammas):
    """Have chunks take these gammas in turn, whatever they cost; returns what is recorded."""
    next_gamma, recorded = itertools.cycle(gammas), []
    monkeypatch.setattr(GammaChoice, "choose", lambda *_: next(next_gamma))

    def observe(self, gamma, seconds, accepted, live):
        recorded.append((gamma, seconds, accepted[live]))

    monkeypatch.setattr(GammaChoice, "observe", observe)
    return recorded


QUEST = "quest:budget=16,page=4,sinks=1,recent=2,dense_layers=0"


@pytest.mark.parametrize(
    "name",
    default_run(["suffix:min_match=1", "vegas", QUEST], "vegas", slow=[QUEST]),
)
def test_greedy_tokens_are_the_plain_ones_whatever_is_chosen(name, tiny, monkeypatch):
    """Plain steps keep what the drafter needs: its index, what guides it, its pages."""
    observed = cycle_gammas(monkeypatch, (0, 4, 1))
    draft = named_draft(name)
    plain = generate(tiny, prompts(), requests(), draft=None)
    settings = {"draft": draft, "steps_per_chunk": 2}
    got = generate(tiny, prompts(), requests(), gamma="auto", **settings)
    assert got.tokens == plain.tokens
    assert [gamma for gamma, *_ in observed[:4]] == [0, 4, 1, 0]
    assert all(accepted.max() <= gamma for gamma, _, accepted in observed)
    assert sum(int(a.sum()) for *_, a in observed) == got.stats.accepted > 10
    assert sum(len(a) for *_, a in observed) == got.stats.steps
    chosen = Counter()
    for gamma, _, accepted in observed:
        chosen[gamma] += len(accepted)
    assert dict(got.stats.steps_at_gamma) == {gamma: n for gamma, n in chosen.items() if n}
    assert Stats.merged([got.stats] * 2).steps_at_gamma == tuple(
        (gamma, 2 * n) for gamma, n in got.stats.steps_at_gamma
    )
    again = generate(tiny, prompts(), requests(), gamma="auto", **settings)
    assert again.stats.compilations == 0


@pytest.mark.exhaustive
def test_a_paused_drafter_is_as_if_it_had_drafted(sharp):
    """The index after plain steps is that of the same tokens after speculative ones."""
    draft = SuffixDraft(min_match=1)
    longest, params = StepConfig(4, draft), SamplingParams(max_new_tokens=8)
    states = []
    for config in (longest, StepConfig(0, draft)):
        state = start_decoding(sharp, prompts((9, 30)), params, longest)
        while not state.done.all():
            state = speculative_step(sharp, state, config)
        states.append(jax.device_get((state.tokens, state.draft)))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_choices_are_remembered_by_what_times_depend_on(sharp, tiny):
    params = SamplingParams(max_new_tokens=8)
    config = StepConfig(max(LADDER), NgramDraft())
    state = start_decoding(sharp, [[1, 2]], params, config)
    result = choice_of(Models(sharp), state, config)
    assert choice_of(Models(tiny), state, config) is result  # of the same shape
    assert choice_of(Models(sharp), state, StepConfig(max(LADDER), NgramDraft())) is result
    other = StepConfig(max(LADDER), NgramDraft(2))
    assert choice_of(Models(sharp), state, other) is not result
    wider = start_decoding(sharp, [[1, 2]] * 2, params, config)
    assert choice_of(Models(sharp), wider, config) is not result


@pytest.mark.parametrize("draft", [NgramDraft(), SelfDraft()], ids=str)
def test_every_drafter_may_draft_as_long(draft, tiny):
    """Beyond the 4 that self-drafts take unless told: their drafts may be accepted whole."""
    assert list(options_of(tiny, draft=draft, gamma="auto").configs) == [0, 1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": None}, "gamma='auto' chooses how much a drafter drafts; pass one, or gamma=0"),
        ({"target": Quest()}, "selects for one token at a time; pass draft=NoDraft"),
    ],
)
def test_what_has_nothing_to_choose_is_refused(settings, message, tiny):
    with pytest.raises(ValueError, match=message):
        generate(tiny, [[1]], gamma="auto", **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "draft",
    [
        ModelDraft(),
        pytest.param(
            Chain(ModelDraft(), SelfDraft(Dense()), inner=2, rounds=1), marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "in-a-chain"],
)
def test_a_second_model_takes_up_what_was_decoded_while_it_rested(draft, tiny, monkeypatch):
    """The target as its own draft model is always right, where its cache lacks nothing."""
    monkeypatch.setattr(chunks, "SYNC_TOKENS", 4)  # so that six tokens take several passes
    cycle_gammas(monkeypatch, (0, 0, 0, 2))
    plain = generate(tiny, prompts(), requests(), draft=None)
    settings = {"draft": draft, "draft_model": tiny, "steps_per_chunk": 2}
    got = generate(tiny, prompts(), requests(), gamma="auto", **settings)
    assert got.tokens == plain.tokens
    assert got.stats.accepted == got.stats.drafted > 10


@pytest.mark.exhaustive
def test_a_second_model_that_rested_takes_up_no_more_than_a_row_holds(tiny, monkeypatch):
    """Requests came and went meanwhile; each brought a whole cache of the second model."""
    cycle_gammas(monkeypatch, (0,))
    settings = {"draft": ModelDraft(), "draft_model": tiny, "gamma": "auto", "steps_per_chunk": 16}
    engine = Engine(tiny, slots=1, capacity=48, **settings)
    for _ in range(8):
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=40))
        engine.run()
    cycle_gammas(monkeypatch, (2,))
    passes, run = [], engine._runner.chunks._synced
    monkeypatch.setattr(engine._runner.chunks, "_synced", lambda x: passes.append(x) or run(x))
    request = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=3))
    want = generate(tiny, [[5, 6, 7]], SamplingParams(max_new_tokens=3), draft=None).tokens[0]
    assert request.result() == want
    assert 1 <= len(passes) <= 5  # of up to 62 new tokens each; the capacity is 256
