"""The clocks: what each counts, with a recorder in the place of CUPTI."""

import jax
import numpy as np
import pytest

from bench import ceilings, clocks, point, verify, workload
from bench.clocks import DeviceClock, Kernel
from bench.program import Program, Source, bound, compile_all, shapes, sources
from bench.settings import Settings
from jspec.dispatch import BackendError
from jspec.ops.verify import VERIFY_GREEDY


class Recorder(DeviceClock):
    """A device clock whose kernels are lines of a log."""

    def __init__(self, monkeypatch, lost: int | None = None):
        self.log: list[Kernel] = []
        monkeypatch.setattr(clocks, "_session", self._session)
        self.__dict__ |= {"_marker_name": "marker", "_other": None, "_lost": lost}
        self.__dict__["_flush"] = lambda x: self.log.append(Kernel("flush", 1000, True))

    def _mark(self, *, wait=False):
        self.log.append(Kernel("marker", 1, True))

    def _session(self, calls, repeats):
        begin = len(self.log)
        calls(repeats)
        return [kernel for i, kernel in enumerate(self.log[begin:]) if i != self._lost]

    def program(self, name: str, *kernels: int, alone: bool = False) -> Program:
        def start():
            # The last kernel starts before the one before it has ended.
            last = len(kernels) - 1
            self.log.extend(
                Kernel(name, ns, i != last, gap=100 * (i != last)) for i, ns in enumerate(kernels)
            )

        return Program(name, start, lambda outputs: True, lambda outputs: outputs, alone)


@pytest.mark.parametrize("alone", [False, True], ids=["queued", "alone"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_device_time_is_the_sum_of_the_kernels_of_a_call(monkeypatch, cold, alone):
    clock = Recorder(monkeypatch)
    programs = [clock.program("one", 7), clock.program("two", 5, 2, 4, alone=alone)]
    times = clock.time([*programs, clock.program("none")], 4, cold=cold)
    assert [t.samples for t in times] == [[7] * 4, [11] * 4, [0] * 4]
    assert [t.spans for t in times] == [[7] * 4, [111] * 4, [0] * 4]  # no gap before the first
    assert [t.kernels for t in times] == [1, 3, 0]
    assert [t.waits for t in times] == [0, 1, 0]
    assert sum(kernel.name == "flush" for kernel in clock.log) == (12 if cold else 0)


def test_kernels_that_overlap_are_counted_once():
    rng = np.random.default_rng(3)
    for count in (0, 1, 2, 40):
        starts = rng.integers(0, 300, count)
        ends = starts + rng.integers(0, 60, count)
        runs = np.zeros(400, bool)
        for start, end in zip(starts, ends, strict=True):
            runs[start:end] = True
        spans = zip(starts, ends, strict=True)
        events = [(str(i), float(s), float(e)) for i, (s, e) in enumerate(spans)]
        kernels = clocks.exclusive_times(iter(events))
        assert sum(kernel.ns for kernel in kernels) == runs.sum()
        assert [starts[int(kernel.name)] for kernel in kernels] == sorted(starts)
    # The second starts before the first has ended, the third runs inside it, the fourth after.
    events = [("late", 30.0, 35.0), ("a", 0.0, 10.0), ("b", 8.0, 20.0), ("inside", 9.0, 12.0)]
    assert clocks.exclusive_times(events) == [
        ("a", 10, True, 0),
        ("b", 10, False, 0),
        ("inside", 0, False, 0),
        ("late", 5, True, 10),
    ]


def test_a_program_in_place_goes_on_from_its_outputs():
    x = jax.device_put(np.zeros(3, np.float32))
    source = Source(lambda x, y: (y, x + y), (x, x), (0,))
    compiled = compile_all("x", {"x": source})["x"]
    ones = jax.device_put(np.ones(3, np.float32))
    program, other = (
        bound("x", compiled, (x, ones), lambda outputs: True, in_place={1: 0}) for _ in range(2)
    )
    counts = [float(program.start()[1][0]) for _ in range(3)]
    assert counts == [1, 2, 3]
    assert float(other.start()[1][0]) == 1
    assert float(x[0]) == 0  # not donated


def test_a_program_of_layers_has_the_span_of_one_layer_and_is_compared_by_it(monkeypatch):
    clock = Recorder(monkeypatch)
    clock.__dict__["reason"] = None
    monkeypatch.setattr(point, "DEVICE", clock)
    programs = [clock.program("gaps", 6, 5, 5, 4), clock.program("none", 80, 0)]
    rows = point.measure("x", {}, programs, Settings(True), states=("cold",), layers=2)
    assert [row["device_ns"] for row in rows] == [[10] * 10, [40] * 10]
    assert [row["span_ns"] for row in rows] == [[110] * 10, [40] * 10]
    assert [(row["kernels"], row["waits"]) for row in rows] == [(2, 1), (1, 0)]
    assert [point.best_clock(row).median for row in rows] == [0.11, 0.04]
    (without,) = point.measure("x", {}, programs[:1], Settings(True), states=("cold",))
    assert "span_ns" not in without
    monkeypatch.setattr(point, "wall", lambda program, repeats: [90])
    (warm,) = point.measure("x", {}, programs[:1], Settings(True), layers=2)
    assert warm["wall_ns"] == [45]


@pytest.mark.parametrize("lost", [0, 5])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_lost_kernels_are_an_error(monkeypatch, cold, lost):
    clock = Recorder(monkeypatch, lost)
    with pytest.raises(RuntimeError, match="CUPTI recorded"):
        clock.time([clock.program("one", 7, 8)], 4, cold=cold)


def test_where_the_device_clock_fails_the_point_is_a_row_and_the_run_goes_on(monkeypatch):
    clock = Recorder(monkeypatch, lost=5)
    clock.__dict__["reason"] = None
    monkeypatch.setattr(point, "DEVICE", clock)
    states = ("warm", "cold")
    rows = point.measure("x", {"B": 1}, [clock.program("one", 7, 8)], Settings(), states=states)
    warm, cold = rows
    assert (warm["name"], warm["checked"], warm["case"]) == (
        "device clock",
        False,
        {"B": 1, "l2": "warm"},
    )
    assert "CUPTI recorded" in warm["reason"]
    assert cold["name"] == "device clock"


def test_without_a_gpu_the_device_clock_says_why():
    assert "NVIDIA" in str(DeviceClock().reason)


def test_a_loop_feeds_a_verification_the_counts_that_the_last_one_accepted():
    tokens = workload.make_tokens(5, 8, 0.6)
    recorded = []

    def counting(*arguments):
        jax.debug.callback(lambda x: recorded.append(x.tolist()), arguments[2])
        return VERIFY_GREEDY(*arguments)

    source = Source(counting, shapes(tokens.inputs))
    for count, loop in zip(clocks.LENGTHS, clocks.loops(source, verify.FEED), strict=True):
        recorded.clear()
        outputs = jax.jit(loop.function)(*tokens.inputs)
        jax.effects_barrier()
        assert recorded == [[8] * 5] + [tokens.accepted.tolist()] * count
        np.testing.assert_array_equal(outputs[0], tokens.accepted)


def test_step_time_is_the_difference_of_two_loops(monkeypatch):
    now = [0]
    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: now[0])

    def loop(steps):
        def run():
            now[0] += 5000 + 30 * steps

        return run

    samples = clocks.step(*map(loop, clocks.LENGTHS), empty=10.0, repeats=6)
    assert samples == [20] * 6


@pytest.mark.parametrize("checked", [True, None], ids=["checked", "unchecked"])
def test_the_step_clock_times_each_backend_that_was_right_once(monkeypatch, checked):
    monkeypatch.setattr(clocks, "LENGTHS", (2, 4))
    arguments = tuple(map(jax.device_put, workload.make_tokens(2, 4, 0.5).inputs))
    by_backend = sources(VERIFY_GREEDY, shapes(arguments), Settings(only=("xla",)))
    rows = [
        point.row("verify_greedy", {"l2": l2}, name, checked=checked)
        for l2, name in [("warm", "xla"), ("cold", "xla"), ("warm", "torch")]
    ]
    clocks.add_steps(rows, by_backend, arguments, verify.FEED, repeats=7)
    counts = [len(row.get("step_ns", ())) for row in rows]
    assert counts == ([7, 0, 0] if checked else [0, 0, 0])


def test_spread_is_in_microseconds():
    result = point.spread({"wall_ns": list(range(1000, 12000, 1000))}, "wall")
    assert result == point.Spread(6.0, 1.5, 10.5)
    assert point.spread({}, "wall") is None


def test_what_fails_to_compile_is_a_row_and_the_rest_goes_on():
    def broken(*arguments):
        raise ValueError("no such tile\nand more")

    arguments = shapes(workload.make_tokens(2, 4, 0.5).inputs)
    result = sources(VERIFY_GREEDY, arguments, Settings(only=("xla",)))
    done = compile_all("x", {("good",): result["xla"], ("bad",): Source(broken, arguments)})
    assert callable(done["good",])
    bad = done["bad",]
    assert (bad.name, bad.reason, bad.failed) == ("bad", "failed: ValueError: no such tile", True)


def test_a_backend_that_refuses_while_it_is_lowered_has_not_failed():
    def refuses(*arguments):
        raise BackendError("x cannot run as asked; pallas: needs sm_90")

    arguments = shapes(workload.make_tokens(2, 4, 0.5).inputs)
    result = compile_all("x", {("case", "pallas"): Source(refuses, arguments)})["case", "pallas"]
    reason = "x cannot run as asked; pallas: needs sm_90"
    assert (result.name, result.reason, result.failed) == ("pallas", reason, False)


def test_the_ceiling_of_memory_is_no_read_that_a_gpus_l2_holds():
    def read(size, **clocks):
        row = {"case": {"work": "read", "bytes": size, "l2": "warm"}, "checked": True}
        return row | {"bytes": size} | clocks

    small = read(ceilings.SMALL, device_ns=[1000])
    assert ceilings.bandwidth([small], "read") is None
    assert ceilings.bandwidth([small, read(2**30, device_ns=[10**6])], "read") == 2**30 * 1e3
    # Without a device clock it is a CPU.
    assert ceilings.bandwidth([read(10**6, wall_ns=[1000])], "read") == 1e12
