"""The engine with its cache in blocks: tokens as in slots of their own, with less memory."""

import dataclasses
import functools
import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.cache.layout import BLOCK
from jspec.config import SamplingParams
from jspec.decode.blocks import Beginning, Blocks
from jspec.decode.chunks import Chunks
from jspec.decode.draft import GuidedDraft, NgramDraft, SelfDraft
from jspec.decode.engine import Engine
from jspec.decode.request import Request
from jspec.decode.runner import Runner
from jspec.helix import HelixConfig, shard
from jspec.policies import ExactTopK, Quest, SparseSpec, Vegas
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import SOME, _requests, apart, check_arrivals, engine_of
from tests.models.goldens import GOLDEN
from tests.parameters import default_run

SIZES = {"slots": 3, "capacity": 390, "cache_blocks": 5, "prefill_chunk": 64}
WITH_GAMMA = {"gamma": 3}


@functools.cache
def requests():
    """Of all kinds, of up to 390 positions, most of which begin in one block and end in another."""
    rng = np.random.default_rng(0)
    return _requests(rng, rng.integers(1, 250, 30), rng.integers(1, 140, 30), 0)


@functools.cache
def alone():
    """What each of them gives by plain decoding; one-hot drafts change no token."""
    return apart(make_decoder(ONE_LAYER, seed=1, embedding=400.0, head=4.0), "none", requests())


@pytest.fixture(scope="module")
def engine(sharp) -> Engine:
    result = engine_of(sharp, "none", **SIZES)
    result.warm_up()
    return result


@pytest.fixture
def removed(monkeypatch) -> list:
    """Requests that lost their slots to others."""
    observed, right = [], jspec.decode.runner.Runner.make_room

    def make_room(self):
        observed.extend(after := right(self))
        return after

    monkeypatch.setattr(jspec.decode.runner.Runner, "make_room", make_room)
    return observed


def held(engine: Engine) -> list[int]:
    """The blocks of all slots; each of these or of the free ones is there."""
    blocks = engine._runner.blocks
    table = blocks._table[blocks._table >= 0].tolist()
    assert sorted([*{*table}, *blocks._free]) == list(range(engine.cache_blocks))
    assert blocks._users.tolist() == [table.count(x) for x in range(engine.cache_blocks)]
    return table


@pytest.mark.parametrize("seed", default_run(range(4), "1"))
def test_a_request_gets_what_it_gets_alone_and_compiles_nothing(engine, seed, ahead, removed):
    expected = alone()
    compiled, before = len(COMPILED), engine.stats.compilations
    check_arrivals(engine, requests(), expected, seed=seed)
    assert len(COMPILED) == compiled
    assert engine.stats.compilations == before
    # The arrivals of seed 2 always leave a prompt that waits, and no chunk runs ahead then.
    assert ahead.at_work.count(2) > 5 or seed == 2
    assert removed
    held(engine)


def poison(engine: Engine) -> None:
    """NaN in every position that is not committed, in all blocks."""
    state, blocks = engine._runner.state, engine._runner.blocks
    used = np.zeros((engine.cache_blocks, BLOCK), bool)
    lengths = np.asarray(state.cache.lengths)
    for slot, i in np.argwhere(blocks._table >= 0):
        used[blocks._table[slot, i]] = i * BLOCK + np.arange(BLOCK) < lengths[slot]
    columns = jax.tree.map(
        lambda x: jnp.where(used[..., None, None], x, jnp.nan), state.cache.columns
    )
    cache = dataclasses.replace(state.cache, columns=columns)
    engine._runner.state = dataclasses.replace(state, cache=cache)


def test_unused_blocks_never_reach_an_output(engine, behind, removed):
    submitted = [engine.submit(*one) for one in requests()[:12]]
    while engine.busy:
        poison(engine)
        engine.step()
    assert tuple(request.tokens for request in submitted) == alone().tokens[:12]


DRAFTS = ("ngram", "suffix", "vegas", "streaming", "model", "chain", "padded")


@pytest.mark.parametrize("name", default_run(DRAFTS, "vegas"))
def test_drafters_read_and_write_blocks(name, sharp, other, removed):
    """Where one-hot drafts change no token, and against slots of their own elsewhere."""
    given = requests()[:10]
    more = {} if name == "padded" else WITH_GAMMA
    engine = engine_of(sharp, name, other, **SIZES, **more)
    got = [engine.submit(*one) for one in given]
    engine.run()
    expected = alone().tokens[:10]
    if name not in ("ngram", "suffix", "padded"):
        plain = engine_of(sharp, name, other, **SIZES | {"cache_blocks": None}, **more)
        expected = [plain.submit(*one) for one in given]
        plain.run()
        expected = tuple(request.tokens for request in expected)
    assert tuple(request.tokens for request in got) == expected
    assert engine.stats.accepted or name == "padded"


@pytest.mark.parametrize("name", default_run(["gemma3", "deepseek_v3"]))
def test_layers_with_windows_keep_their_rings_and_latents_lie_in_blocks(name):
    """A row of latents is keys alone."""
    model = jspec.load_model(GOLDEN / name)
    model.config = dataclasses.replace(model.config, max_context=512)  # of more than a block
    texts, params = prompts((50, 140, 17), vocabulary=112), SamplingParams(max_new_tokens=24)
    settings = {"draft": None, "prefill_chunk": 16}
    engine = Engine(model, slots=2, capacity=200, cache_blocks=3, **settings)
    got = [engine.submit(text, params) for text in texts]
    engine.run()
    expected = jspec.generate(model, texts, params, **settings).tokens
    assert tuple(request.tokens for request in got) == expected


def test_the_newest_request_waits_where_blocks_run_out(engine, behind, removed):
    """Each needs three blocks of five in the end, and the first one never loses its slot."""
    params = [SamplingParams(max_new_tokens=260, seed=seed, temperature=1) for seed in range(3)]
    three = [engine.submit(prompts((90,))[0], x) for x in params]
    ends = []
    while engine.busy:
        ends += engine.step()
    assert ends[0] is three[0]
    assert removed
    assert three[0] not in removed
    text = prompts((90,))[0]
    expected = jspec.generate(engine.model, [text] * 3, params, draft=None)
    assert tuple(request.tokens for request in three) == expected.tokens


def test_only_the_text_of_a_slot_grows_that_has_the_request(engine, behind, removed):
    """A request that lost its slot gets more tokens in another one."""
    texts, params = engine._scheduler.prefill.texts, SamplingParams(max_new_tokens=250)
    three = [engine.submit([*prompts((90,))[0], seed], params) for seed in range(3)]
    while engine.busy:
        engine.step()
        for slot, text in texts._texts.items():
            for request in three:
                if text.tokens is request._tokens and request.finished is None:
                    assert engine._runner.slots[slot] is request
    assert removed


def test_a_request_waits_for_blocks_and_not_for_slots(engine, behind):
    """Two have four of five blocks, and the third one needs two; the fourth one, one, waits too."""
    two = [engine.submit(x, SamplingParams(max_new_tokens=40)) for x in prompts((200, 180))]
    params = SamplingParams(max_new_tokens=6)
    last = [engine.submit(prompts((200,), seed=3)[0], params)]
    while not all(x.tokens for x in two) or engine._scheduler.can_prefill:
        engine.step()
    last.append(engine.submit([1], params))
    engine.step()
    assert not engine._scheduler.can_prefill
    assert None in engine._runner.slots
    assert not any(x.tokens or x.finished for x in last)
    assert not any(x.finished for x in two)
    engine.run()
    assert {x.finished for x in (*two, *last)} == {"length"}


@pytest.mark.parametrize(("length", "steps", "is_counted"), [(200, 5, False), (90, 1, True)])
def test_a_free_slot_that_lacks_blocks_does_not_count(
    length, steps, is_counted, engine, monkeypatch
):
    """A chunk that runs ahead takes it from nobody; the shorter prompt fits, and is in prefill."""
    monkeypatch.setattr("jspec.decode.scheduler.MAX_PIECES", 1)
    asked = []

    def looks_ahead(self, left, *, waiting, fills):
        asked.append((left.tolist(), waiting, fills))
        return False

    monkeypatch.setattr(Chunks, "looks_ahead", looks_ahead)
    params = SamplingParams(max_new_tokens=50)
    two = [engine.submit(x, params) for x in prompts((200, 180))]
    while not all(x.tokens for x in two):
        engine.step()
    engine.submit(prompts((length,), seed=3)[0], params)
    for _ in range(steps):
        asked.clear()
        engine.step()
    ((left, waiting, fills),) = asked
    assert waiting
    assert engine._runner.slots.count(None) == 1
    assert 0 in left
    assert fills == is_counted
    engine.run()


def test_texts_are_found_until_their_blocks_are_taken(engine, behind):
    first = [*range(1, 41)] * 4
    assert engine.submit(first, SamplingParams(max_new_tokens=4)).result()
    before = engine.stats.prompt_tokens
    again = engine.submit([*first, *[7] * 30], SamplingParams(max_new_tokens=4))
    assert again.result()
    assert engine.stats.prompt_tokens - before < 40
    # Long requests take all blocks.
    for text in prompts((380,) * 3, seed=9):
        engine.submit(text, SamplingParams(max_new_tokens=4))
    engine.run()
    before = engine.stats.prompt_tokens
    assert engine.submit(first, SamplingParams(max_new_tokens=4)).result()
    assert engine.stats.prompt_tokens - before == len(first)


def test_the_cache_is_released_and_made_again(engine, behind):
    requests_of = [engine.submit(*one) for one in requests()[:3]]
    engine.step()
    engine.release_cache()
    engine.restore_cache()
    engine.run()
    assert tuple(x.tokens for x in requests_of) == alone().tokens[:3]
    held(engine)


def test_memory_is_that_of_the_blocks_and_of_one_row_and_stays(engine):
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    small = Engine(engine.model, **SIZES, draft=None)
    new = [x for x in jax.live_arrays() if id(x) not in before and x.ndim == 4]
    position = 2 * 2 * 16 * 4  # keys and values
    assert sum(x.nbytes for x in new) == (5 * BLOCK + 512) * position
    del small, new
    counts = []
    for _ in range(2):
        for one in requests()[:6]:
            engine.submit(*one)
        engine.run()
        engine.step()  # reads what ran ahead for nobody
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[1] <= counts[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_blocks": 0}, "cache_blocks=0 must be at least 1"),
        ({"cache_blocks": 3}, r"cache_blocks=3 of 128 positions must be at least 4, so that"),
        ({"target": ExactTopK(**SOME)}, r"target=ExactTopK\(.*reads the keys of a row in one"),
        ({"draft": SelfDraft(Quest())}, "policy=Quest.* reads the keys of a row in one piece"),
        ({"draft": SelfDraft(ExactTopK(**SOME))}, "policy=ExactTopK.* reads the keys of a row"),
        ({"draft": GuidedDraft(SparseSpec())}, "score='weight', collect='all' and refresh=0"),
        ({"draft": GuidedDraft(Vegas(collect="last"))}, "score='logit', collect='last' and"),
        ({"draft": GuidedDraft(Vegas(refresh=2))}, "collect='ends' and refresh=2 score keys again"),
        ({"draft": NgramDraft(branches=2)}, "branches=2.* drafts trees"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_what_cannot_read_blocks_is_refused(settings, message, tiny):
    with pytest.raises(ValueError, match=message):
        Engine(tiny, **SIZES | {"draft": None} | settings)


@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
def test_a_mesh_is_refused(tiny):
    sharded = shard(tiny, HelixConfig(kvp=2, tpa=2, block=4))
    with pytest.raises(ValueError, match="cache_blocks=5: the model is on a mesh"):
        Engine(sharded, **SIZES, draft=None)


def test_a_request_that_ends_in_a_running_chunk_needs_no_more_blocks(engine, monkeypatch):
    """Its slot may have lost them to the next request."""
    runner, prompt = engine._runner, np.zeros(100, np.int32)
    ending, growing = (
        Request(prompt, SamplingParams(max_new_tokens=n, seed=0), (), None) for n in (4, 200)
    )
    slots = [ending, growing, None]
    monkeypatch.setattr(runner, "slots", slots)
    monkeypatch.setattr(runner.chunks, "running", [SimpleNamespace(requests=slots)])
    assert runner.free == [0, 2]
    assert runner._growing(2) == {1: 100 + 2 * 4}


def test_requests_that_fill_slots_together_may_take_the_blocks_of_each_other(engine, behind):
    """One has four of five blocks; two requests of two blocks each fit."""
    runner = engine._runner
    for slot in range(3):
        runner.blocks.release(slot)
    runner.blocks.fill([1, 2], [4 * BLOCK, 1], [Beginning()] * 2, ())
    prompt = np.zeros(BLOCK, np.int32)
    two = [Request(prompt, SamplingParams(max_new_tokens=9, seed=0), (), None) for _ in range(2)]
    assert runner.fitting([*two, two[0]], [Beginning()] * 3) == 2
    runner.reserve([0, 1], two, [Beginning()] * 2)
    assert (runner.blocks._table >= 0).sum(axis=1).tolist() == [2, 2, 1]
    held(engine)


@pytest.fixture
def tables(monkeypatch) -> list:
    """Block tables on the device: what fills slots sees, and what is there after it."""
    observed, fill, reserve = [], Runner.fill, Runner.reserve

    def wrapped(function):
        def run(self, *args):
            function(self, *args)
            if self.blocks is not None:  # as in `generate`
                table = np.array(self.state.cache.table)
                observed.append((table, self.blocks._table.copy()))

        return run

    monkeypatch.setattr(Runner, "fill", wrapped(fill))
    monkeypatch.setattr(Runner, "reserve", wrapped(reserve))
    return observed


@pytest.mark.parametrize("chunk", [64, 320])
def test_texts_that_begin_alike_share_blocks(engine, behind, tables, chunk):
    """Three answers to a prompt of two whole blocks and a part; each has one block of its own.

    One by one after a prefill in pieces, and together.
    """
    size = 270
    if chunk != 64:
        engine = engine_of(engine.model, "none", **SIZES | {"prefill_chunk": chunk})
    prompt, whole = prompts((size,))[0], size // BLOCK
    params = [SamplingParams(max_new_tokens=40, seed=seed, temperature=1) for seed in range(3)]
    three = [engine.submit(prompt, x) for x in params]
    while not all(request.tokens for request in three):
        engine.step()
    assert not any(request.finished for request in three)
    table = held(engine)
    hidden, there = tables[-2:]
    assert (hidden[0] != hidden[1]).sum() == whole * (1 if chunk == 64 else 2)
    assert (hidden[0][hidden[0] != hidden[1]] == -1).all()
    np.testing.assert_array_equal(*there)
    assert len(table) == 3 * (whole + 1)
    assert len({*table}) == whole + 3
    later = engine.submit([*prompt, 7, 8], SamplingParams(max_new_tokens=4))
    while engine.busy:
        poison(engine)
        engine.step()
        held(engine)
    expected = jspec.generate(engine.model, [prompt] * 3, params, draft=None).tokens
    assert tuple(request.tokens for request in three) == expected
    alone_of = jspec.generate(engine.model, [[*prompt, 7, 8]], later.params, draft=None)
    assert later.tokens == alone_of.tokens[0]


# --- the host's side ------------------------------------------------------------------------------


def test_blocks_of_idle_slots_are_taken_oldest_first():
    released = []
    blocks = Blocks(3, 4 * BLOCK, 6, released.append)

    def fill(slot, positions, idle):
        blocks.fill([slot], [positions], [Beginning()], idle)

    fill(1, 2 * BLOCK, [0, 2])
    fill(0, 2 * BLOCK + 1, [2])
    assert (blocks.unused([]), blocks.unused([1])) == (1, 3)
    assert blocks.missing(1, 2 * BLOCK) == 0
    assert blocks.missing(1, 2 * BLOCK + 1) == 1
    fill(2, BLOCK, [0, 1])
    assert not released
    blocks.reserve(2, 2 * BLOCK, [0, 1])
    assert released == [1]
    assert (blocks._table >= 0).sum(axis=1).tolist() == [3, 0, 2]
    fill(0, BLOCK, [1])
    assert released == [1, 0]
    assert blocks.newest([0, 2]) == 0
    assert len({*blocks._table[blocks._table >= 0]}) == 3


def test_whole_blocks_are_shared_and_free_when_no_slot_has_them():
    blocks = Blocks(4, 4 * BLOCK, 6, lambda slot: None)
    blocks.fill([0], [3 * BLOCK], [Beginning()], ())
    # The second slot begins as the first one, and the third one as the second one, which is new.
    begin = [Beginning(0, 2 * BLOCK + 5), Beginning(1, 2 * BLOCK, is_new=True)]
    blocks.fill([1, 2], [2 * BLOCK + 9, 2 * BLOCK], begin, ())
    table = blocks._table
    assert (table[1, :2] == table[0, :2]).all()
    assert (table[2, :2] == table[0, :2]).all()
    assert table[1, 2] not in table[0]
    assert (blocks.unused([]), blocks.unused([0]), blocks.unused([0, 1])) == (2, 3, 4)
    # A slot that is filled again may begin with what it had itself.
    blocks.fill([0], [2 * BLOCK], [Beginning(0, BLOCK)], ())
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]
    for slot in (0, 1, 2):
        blocks.release(slot)
    assert blocks.unused([]) == 6
    assert not blocks._users.any()
