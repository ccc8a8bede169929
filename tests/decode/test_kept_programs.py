"""The programs that are kept: which calls share one, which go, and who waits for one."""

import dataclasses
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.generation import generate
from jspec.decode.programs import PROGRAMS, Programs, _key_of
from jspec.decode.state import FlatModels, Models
from tests.conftest import TINY, make_decoder
from tests.decode.common import NGRAM, STREAMING


def scaled(name: str):
    """A jitted function that no other test has."""

    def times(x, times):
        return x * times

    times.__name__ = name
    return jax.jit(times, static_argnames="times")


def live() -> int:
    return len(jax.devices()[0].client.live_executables())


def test_programs_tell_functions_settings_and_shapes_apart():
    programs = Programs()
    double = scaled("double")
    for _ in range(2):
        assert programs(double, jnp.arange(3), times=2).tolist() == [0, 2, 4]
        assert programs(double, jnp.arange(3), times=3).tolist() == [0, 3, 6]
        assert programs(double, jnp.arange(2), times=2).tolist() == [0, 2]
        assert programs(double, np.arange(2, dtype=np.int32), times=2).tolist() == [0, 2]
    assert len(programs._compiled) == 4
    assert PROGRAMS is not programs


def test_a_setting_that_changes_a_program_tells_it_apart():
    programs, double = Programs(), scaled("precise")
    x = jnp.ones((2, 2))
    run = programs.timed()
    run(double, x, times=2)
    with jax.default_matmul_precision("bfloat16"):
        run(double, x, times=2)
    assert run.compilations == 2


def test_models_of_the_same_shapes_share_programs(tiny, compiled, monkeypatch):
    """What a program has to know of models is found once; other shapes have their own program."""

    @jax.jit
    def norm(models, x):
        return models.whole.target.norm.scale[...].sum() * x

    programs, x = Programs(), jnp.float32(2)
    first, second = (FlatModels.of(Models(make_decoder(seed=seed))) for seed in (0, 1))
    programs(norm, first, x)
    before = compiled()
    programs(norm, second, x)
    assert (compiled(), len(programs._compiled)) == (before, 1)
    assert first.signature == second.signature
    monkeypatch.setattr(first, "tree_flatten", None)  # nobody looks at its arrays again
    assert _key_of(norm, (first, x), {}) in programs._compiled
    wider = make_decoder(dataclasses.replace(TINY, hidden_size=48))
    other = FlatModels.of(Models(wider))
    programs(norm, other, x)
    assert len(programs._compiled) == 2
    assert other.signature != first.signature


def test_the_programs_that_ran_last_stay():
    programs, grow = Programs(limit=3), scaled("grow")

    def compilations(*all_times: int) -> int:
        """How many of these programs callers compile that live for one call each."""
        callers = [programs.timed() for _ in all_times]
        for run, times in zip(callers, all_times, strict=True):
            assert run(grow, jnp.arange(3), times=times).tolist() == [0, times, 2 * times]
        return sum(run.compilations for run in callers)

    assert compilations(1, 2, 3, 1, 4) == 4  # 2 is the one that ran longest ago
    assert compilations(1, 3, 4) == 0
    assert compilations(2) == 1


def test_what_a_living_caller_ran_stays():
    """Two callers run two programs each, of a table for one."""
    programs, grow, x = Programs(limit=1), scaled("hold"), jnp.arange(3)
    first, second = programs.timed(), programs.timed()
    for _ in range(2):
        for run, counts in ((first, (1, 2)), (second, (2, 3))):
            for times in counts:
                assert run(grow, x, times=times).tolist() == [0, times, 2 * times]
    assert (first.compilations, second.compilations) == (2, 1)
    assert len(programs._compiled) == 1


def test_a_program_that_is_dropped_frees_its_memory():
    """In a long run with a new shape each time, no more executables live than are kept."""
    programs, grow = Programs(limit=3), scaled("drop")
    before = live()
    for times in range(12):
        programs(grow, jnp.arange(3), times=times)
    gc.collect()
    assert live() - before <= 5  # with what arange compiled


def test_a_program_that_cannot_be_compiled_is_tried_again():
    programs, fails = Programs(), [True]

    @jax.jit
    def sometimes(x):
        if fails:
            raise RuntimeError(f"attempt {fails.pop()}")
        return x

    with pytest.raises(RuntimeError, match="attempt True"):
        programs(sometimes, jnp.arange(2))
    assert programs(sometimes, jnp.arange(2)).tolist() == [0, 1]


class Slow:
    """A jitted function whose compiling waits for ``go``; ``begun`` counts how often it began."""

    def __init__(self, fails: int = 0):
        self.begun, self.go, self.fails = 0, threading.Event(), fails
        self.function = scaled("slow")

    def lower(self, *args, **static):
        self.begun += 1
        assert self.go.wait(20)
        if self.begun <= self.fails:
            raise RuntimeError("no memory")
        return self.function.lower(*args, **static)

    def clear_cache(self):
        self.function.clear_cache()


def wait_for(slow: Slow) -> None:
    deadline = time.monotonic() + 20
    while not slow.begun and time.monotonic() < deadline:
        time.sleep(0.001)
    assert slow.begun


@pytest.mark.parametrize("fails", [0, 1])
def test_threads_that_need_one_program_compile_it_once(fails):
    """The others wait for it; where the one that compiles fails, another takes its turn."""
    programs, slow = Programs(), Slow(fails)

    def work():
        run = programs.timed()
        try:
            return run(slow, jnp.arange(2), times=3).tolist(), run.compilations, run.compile_s
        except RuntimeError as error:
            return str(error), run.compilations, run.compile_s

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        wait_for(slow)
        time.sleep(0.05)  # the others come to wait
        slow.go.set()
        result = [future.result(timeout=20) for future in futures]
    values = sorted(str(value) for value, *_ in result)
    assert values == ["[0, 3]"] * (4 - fails) + ["no memory"] * fails
    assert slow.begun == 1 + fails
    assert sum(count for _, count, _ in result) == 1
    assert all(seconds > 0 for *_, seconds in result)


def test_a_thread_that_compiles_takes_no_time_off_another():
    """One thread runs a program that it has while another compiles for long."""
    programs, slow, quick = Programs(), Slow(), scaled("quick")
    programs(quick, jnp.arange(2), times=2)
    with ThreadPoolExecutor(1) as pool:
        other = programs.timed()
        waiting = pool.submit(other, slow, jnp.arange(2), times=3)
        wait_for(slow)
        run = programs.timed()
        run(quick, jnp.arange(2), times=2)
        slow.go.set()
        waiting.result(timeout=20)
    assert (run.compile_s, run.compilations) == (0, 0)
    assert other.compilations == 1
    assert other.compile_s > 0


def test_what_compiling_took_is_in_no_other_time(tiny, monkeypatch):
    """A clock on which each program takes 1000 s to compile, and everything else what it takes."""
    monkeypatch.setattr("jspec.decode.chunks.PROGRAMS", Programs())
    right, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: right() + late[0])

    def on_compile(begins: bool):
        late[0] += 1000 * begins
        heard.append(begins)

    for begun, expected in ((3, [True, False] * 3), (0, [])):
        heard: list[bool] = []
        params = SamplingParams(max_new_tokens=6)
        settings = {"draft": STREAMING, "on_compile": on_compile}
        stats = generate(tiny, [[1, 2, 3, 4, 5]], params, **settings).stats
        assert heard == expected
        assert stats.compilations == begun
        assert 1000 * begun <= stats.compile_s < 1000 * begun + 500
        assert 0 < stats.prefill_s < 500
        assert 0 < stats.decode_s < 500
        assert stats.as_dict()["compilations"] == begun


def test_close_numbers_of_stop_tokens_share_a_program(sharp):
    def run(count: int):
        params = SamplingParams(max_new_tokens=2, stop_tokens=tuple(range(41, 41 + count)))
        return generate(sharp, [[1, 2, 3]], params, draft=NGRAM).stats.compilations

    run(4)
    assert run(3) == 0
