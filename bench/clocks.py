"""Four clocks: device time and span of kernels, wall time of a call, time of a step in a loop.

*device*: the time in which at least one kernel runs, by CUPTI's records of their starts and ends;
gaps between kernels, and copies and fills by the driver, do not count. *span*: from the start of
the first kernel to the end of the last, with gaps. *wall*: from Python's call until the outputs are
ready, launch included. *step*: the marginal time of a step inside a jitted `lax.scan`, from loops
of two lengths, above a step that only counts. All in nanoseconds.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.program import Absent, Program, Source, compile_all

WARMUPS = 3
FLUSH_BYTES = 2**27  # read between calls for a cold L2: more than any GPU's L2 holds


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
        name: of the kernel.
        ns: in which it ran and no kernel that started before it.
        waited: whether no kernel ran when it started.
        gap: nanoseconds before it in which no kernel ran, since the first one started.
    """

    name: str
    ns: int
    waited: bool
    gap: int = 0


@dataclasses.dataclass(frozen=True)
class Times:
    """A program's device time.

    Attributes:
        samples: nanoseconds of each call.
        spans: the same with the gaps between its kernels.
        kernels: that a call launches.
        waits: those of them that start when the one before has ended. A kernel that may start
            earlier does not wait, unless there is nothing left to overlap with.
    """

    samples: list[int]
    spans: list[int]
    kernels: int
    waits: int


class DeviceClock:
    """Device time by CUPTI; ``reason`` says why it is not available, or is None."""

    @cached_property
    def reason(self) -> str | None:
        if jax.default_backend() != "gpu":
            return "CUPTI times the kernels of NVIDIA GPUs, and JAX sees none here"
        try:
            self._marker_name  # noqa: B018 - the first session tells whether CUPTI works
        except RuntimeError as error:
            return f"CUPTI does not work here: {error}"
        return None

    def time(self, programs: Sequence[Program], repeats: int, *, cold: bool) -> list[Times]:
        """Device time of ``repeats`` consecutive calls of each program; ``reason`` must be None.

        Warm calls follow each other immediately, so that L2 holds what the call before left there.
        ``cold``: `FLUSH_BYTES` of other data pass through L2 before each call.
        """

        def calls(count: int) -> None:
            for program in programs:
                split = cold or program.alone
                for repeat in range(count):
                    if cold:
                        self._mark()
                        self._flush(self._other)
                    if split or repeat == 0:
                        self._mark(wait=program.alone)
                    outputs = program.start()
                    if program.alone:
                        program.wait(outputs)
                    del outputs  # the next call reuses its memory, which keeps L2 warm
                self._mark(wait=True)

        groups = self._groups(calls, repeats)
        per_call = 2 if cold else 1
        counts = [repeats * per_call if cold or p.alone else 1 for p in programs]
        expected = sum(counts) + len(programs)
        if len(groups) != expected:
            raise RuntimeError(f"CUPTI recorded {len(groups)} of {expected} marks between calls")
        times = []
        for program, count in zip(programs, counts, strict=True):
            groups_of_program, groups = groups[:count], groups[count + 1 :]
            times.append(_times(groups_of_program[per_call - 1 :: per_call], repeats, program.name))
        return times

    def kernels(self, call: Callable[[], Any]) -> list[Kernel]:
        """The kernels of one call, in order, after a call to warm up."""

        def calls(count: int) -> None:
            for _ in range(count):
                jax.block_until_ready(call())

        return _session(calls, 1)

    def _groups(self, calls: Callable[[int], None], repeats: int) -> list[list[Kernel]]:
        """The kernels after each mark; marks are kernels with a name that no program has."""
        groups: list[list[Kernel]] = []
        for kernel in _session(calls, repeats):
            if kernel.name == self._marker_name:
                groups.append([])
            elif not groups:
                raise RuntimeError(f"CUPTI recorded {kernel.name} but not the mark before it")
            else:
                groups[-1].append(kernel)
        return groups

    def _mark(self, *, wait: bool = False) -> None:
        out = self._marker(self._one)
        if wait:
            out.block_until_ready()

    @cached_property
    def _one(self) -> jax.Array:
        return jnp.ones((1,), jnp.float16)

    @cached_property
    def _marker(self) -> jax.stages.Compiled:
        return jax.jit(jnp.tan).lower(self._one).compile()

    @cached_property
    def _marker_name(self) -> str:
        names = {kernel.name for kernel in _session(lambda count: self._mark(wait=True), 1)}
        if len(names) != 1:
            raise RuntimeError(f"a program of one kernel gave the kernels {names}")
        return names.pop()

    @cached_property
    def _other(self) -> jax.Array:
        return jnp.ones((FLUSH_BYTES // 4096, 1024), jnp.float32)

    @cached_property
    def _flush(self) -> jax.stages.Compiled:
        return jax.jit(lambda x: x.sum(axis=1)).lower(self._other).compile()


def _times(groups: list[list[Kernel]], repeats: int, name: str) -> Times:
    """Times from one group of kernels per call, or from one group of equal calls."""
    if len(groups) == 1:
        size, rest = divmod(len(groups[0]), repeats)
        groups = [groups[0][i * size : (i + 1) * size] for i in range(repeats)]
        names = {tuple(kernel.name for kernel in group) for group in groups}
        if rest or len(names) != 1:
            raise RuntimeError(f"{name}: CUPTI recorded other kernels from call to call")
    samples = [sum(kernel.ns for kernel in group) for group in groups]
    spans = [
        sample + sum(kernel.gap for kernel in group[1:])
        for sample, group in zip(samples, groups, strict=True)
    ]
    waits = [sum(kernel.waited for kernel in group[1:]) for group in groups]
    return Times(samples, spans, len(groups[0]), statistics.median_low(waits))


def _session(calls: Callable[[int], None], repeats: int) -> list[Kernel]:
    """The kernels that ``calls(repeats)`` launches, in the order of their starts."""
    calls(min(WARMUPS, repeats))
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            calls(repeats)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    return exclusive_times(
        (event.name, event.start_ns, event.end_ns)
        for plane in planes
        if plane.name.startswith("/device:GPU:")
        for line in plane.lines
        for event in line.events
        if any(name == "kernel_details" for name, _ in event.stats)
    )


def exclusive_times(events: Iterable[tuple[str, float, float]]) -> list[Kernel]:
    """Kernels in the order of their starts, from their names, starts and ends in nanoseconds.

    Each has the time in which it runs and no kernel that started before it does, so that the sum is
    the time in which at least one kernel runs.
    """
    kernels, until = list[Kernel](), 0.0
    for name, start, end in sorted(events, key=lambda event: event[1:]):
        ns = round(max(end - max(start, until), 0.0))
        gap = round(max(start - until, 0.0)) if kernels else 0
        kernels.append(Kernel(name, ns, waited=start >= until, gap=gap))
        until = max(until, end)
    return kernels


def wall(program: Program, repeats: int) -> list[int]:
    """Nanoseconds from the call until the outputs are ready."""
    for _ in range(WARMUPS):
        program.wait(program.start())
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        program.wait(program.start())
        samples.append(time.perf_counter_ns() - begin)
    return samples


LENGTHS = (64, 320)  # steps of the two loops
UNROLL = 16  # steps of a loop iteration, so that XLA sees many kernels, as in a decoding step
# The index of the output of a step, or the slice of several, and of the argument of the next step
# that it becomes.
Feed = tuple[int | slice, int]


def loops(source: Source, feed: Feed) -> list[Source]:
    """The two loops around an operation, each step of which gets an output of the one before.

    So XLA can remove no step, and a step needs no extra kernel. XLA may still move code that does
    not depend on that argument out of the loop, unless it is a custom kernel.
    """
    output, argument = feed

    def loop(count: int) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            def step(before: Any, _: None) -> tuple[Any, None]:
                fed = (*arguments[:argument], before[output], *arguments[argument + 1 :])
                return source.function(*fed), None

            first = source.function(*arguments)
            return jax.lax.scan(step, first, length=count, unroll=UNROLL)[0]

        return run

    return [Source(loop(count), source.arguments) for count in LENGTHS]


def step(
    short: Callable[[], Any],
    long: Callable[[], Any],
    empty: float,
    repeats: int,
    lengths: tuple[int, int] | None = None,
    warmups: int = WARMUPS,
) -> list[int]:
    """A step's marginal time above ``empty`` in nanoseconds, from two loops timed alternately.

    ``lengths``: of the loops in steps, `LENGTHS` by default; ``warmups``: runs before.
    """
    less, more = LENGTHS if lengths is None else lengths
    samples = []
    for repeat in range(warmups + repeats):
        seconds = []
        for run in (short, long):
            begin = time.perf_counter_ns()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter_ns() - begin)
        if repeat >= warmups:
            samples.append(round((seconds[1] - seconds[0]) / (more - less) - empty))
    return samples


def add_steps(
    rows: Sequence[dict[str, Any]],
    by_backend: Mapping[str, Source | Absent],
    arguments: tuple[Any, ...],
    feed: Feed,
    repeats: int,
) -> None:
    """Add ``step_ns``, the marginal time in a jitted loop, to the first right row of a backend."""
    first_rows = {row["name"]: row for row in reversed(rows) if row["checked"]}
    pairs = {
        name: loops(source, feed)
        for name, source in by_backend.items()
        if name in first_rows and isinstance(source, Source)
    }
    by_key = {(i, name): loop for name, pair in pairs.items() for i, loop in enumerate(pair)}
    compiled = compile_all("loops", by_key)
    for name in pairs:
        short, long = compiled[0, name], compiled[1, name]
        if not isinstance(short, Absent) and not isinstance(long, Absent):
            calls = partial(short, *arguments), partial(long, *arguments)
            first_rows[name]["step_ns"] = step(*calls, empty_step(repeats), repeats)


@cache
def empty_step(repeats: int) -> float:
    """The marginal time of a step that only counts, in nanoseconds."""

    @partial(jax.jit, static_argnums=1)
    def loop(x: jax.Array, length: int) -> jax.Array:
        return jax.lax.scan(lambda n, _: (n + 1, None), x, length=length, unroll=UNROLL)[0]

    short, long = (partial(loop, jax.device_put(np.int32(0)), length) for length in LENGTHS)
    return statistics.median(step(short, long, 0.0, repeats))
