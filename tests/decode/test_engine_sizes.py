"""What an engine holds: its sizes, its rows, and memory that does not grow with requests."""

import dataclasses
import gc
import tracemalloc

import jax
import pytest

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft
from jspec.decode.engine import Engine
from tests.conftest import TINY, make_decoder
from tests.decode.engines import ON_A_MESH, SETTINGS, engine_of
from tests.parameters import default_run


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        *((n, 0, "at least 1") for n in ("slots", "capacity", "prefill_chunk", "stop_tokens")),
        ("slots", "2", "a whole number, at least 1"),
    ],
)
def test_sizes_are_checked(tiny, name, value, bound):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be {bound}"):
        Engine(tiny, **{"slots": 1, "capacity": 8} | {name: value})


def test_more_slots_than_an_engine_can_have_are_refused_at_once(tiny):
    with pytest.raises(ValueError, match="slots=1000000000 must be at most 65536"):
        Engine(tiny, slots=10**9, capacity=8)


def test_a_capacity_above_the_context_takes_the_memory_of_the_context(tiny):
    """Of the model and of the draft model; a request beyond it is told so."""
    short = make_decoder(dataclasses.replace(TINY, max_context=200))
    for model, options in (
        (short, {"draft": None}),
        (tiny, {"draft": ModelDraft(), "draft_model": short}),
    ):
        engine = Engine(model, slots=1, capacity=10**6, **options)
        assert engine.capacity == 200
        assert engine._runner.state.cache.layouts[0].capacity == 256
        engine.submit([1] * 190, SamplingParams(max_new_tokens=10)).cancel()
        with pytest.raises(ValueError, match="exceeds the context of 200; shorten the prompt"):
            engine.submit([1] * 190, SamplingParams(max_new_tokens=11))


@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ON_A_MESH])
def test_what_does_not_run_on_a_mesh_is_refused(name, sharp, other):
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    with pytest.raises(ValueError, match=r"does not run on the mesh of .*; take "):
        engine_of(sharded, name, other)


def test_room_for_stop_tokens_includes_those_of_the_model(tiny):
    model = make_decoder(dataclasses.replace(TINY, stop_tokens=(1, 2, 3)))
    with pytest.raises(ValueError, match="stop_tokens=2 must be at least 3"):
        Engine(model, slots=1, capacity=8, stop_tokens=2)


def live_memory(engine: Engine, count: int) -> tuple[int, int]:
    """Arrays and bytes of Python that live after ``count`` requests."""
    for row in range(count):
        request = engine.submit([1 + row % 7, 2, 3], SamplingParams(max_new_tokens=2, seed=row))
        if row % 10 == 9:
            request.cancel()
            engine.run()  # or the queue's own table would grow
    engine.step()  # reads what ran ahead for nobody
    del request
    gc.collect()
    return len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_an_engine_holds_one_row_more_than_it_has_slots(slots, sharp):
    """And one more for each shared prefix."""
    gc.collect()
    arrays = jax.live_arrays()
    before = set(map(id, arrays))

    def rows() -> float:
        gc.collect()
        new = [x for x in jax.live_arrays() if id(x) not in before and x.ndim == 4]
        layers = len(sharp.config.layers)
        return sum(x.nbytes for x in new) / (2 * layers * 256 * 2 * 16 * 4)  # keys and values

    engine = Engine(sharp, slots=slots, capacity=200, draft=None)
    assert rows() == slots + 1
    engine.share_prefix([1, 2, 3])
    assert rows() == slots + 2
    engine.share_prefix([4, 5])
    assert rows() == slots + 3
    engine.drop_prefix([1, 2, 3])
    engine.drop_prefix([4, 5])
    assert rows() == slots + 1
    del arrays


@pytest.mark.parametrize("count", default_run([200, 10_000], slow=["10000"]))
def test_memory_is_flat(engine, count):
    before = engine.stats
    tracemalloc.start()
    try:
        live_memory(engine, 30)
        # Caches of JAX and NumPy hold what the first hundreds of requests put there.
        arrays, used = live_memory(engine, count // 5)
        result, after = live_memory(engine, count)
    finally:
        tracemalloc.stop()
    assert result == arrays
    assert after - used < 50_000  # a request has more than 500 bytes
    assert engine.stats.rows == before.rows + (30 + count // 5 + count) * 9 // 10


@pytest.mark.slow
def test_a_queue_of_ten_thousand_loses_nobody(engine):
    """All are there at once: most end, the others are refused or cancelled."""
    requests, refused = [], 0
    for row in range(10_000):
        new = 2 if row % 100 else 1000
        try:
            requests.append(engine.submit([1 + row % 40], SamplingParams(max_new_tokens=new)))
        except ValueError:
            refused += 1
    for request in requests[::7]:
        request.cancel()
    engine.run()
    ends = [request.finished for request in requests]
    assert refused == 100
    assert ends[::7] == ["cancelled"] * len(ends[::7])
    assert {end for row, end in enumerate(ends) if row % 7} == {"length"}
    by_prompt = {}
    for row, request in enumerate(requests):
        if row % 7:
            by_prompt.setdefault(request.params.max_new_tokens, set()).add(request.tokens)
    assert len(by_prompt[2]) <= 40
