"""Programs on the mesh of a `HelixConfig`: their check and their marginal time in a loop."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench import clocks, point
from bench.cases import Case
from bench.program import Absent, failure
from bench.settings import Settings, bar
from jspec.helix import HelixConfig

LENGTHS = (16, 112)  # steps of the two loops of a program, of which a call runs one
REPEATS = 12  # of both at most: a step over a million positions takes a millisecond


@dataclasses.dataclass(frozen=True)
class Shared:
    """A program on the devices of ``helix``, measured as a row of the ``case``.

    On every device, ``body(*arguments)`` returns the outputs that ``is_right(outputs, arguments)``
    checks, and ``following(*arguments)`` the first argument of a loop's next step. ``arguments()``
    makes the arguments and is also traced for their shapes. ``specs(arguments)`` and ``out`` are
    the sharding of arguments and outputs. ``moved(arguments)``: bytes that a device reads and
    writes.
    """

    operation: str
    case: Case
    name: str
    helix: HelixConfig
    body: Callable[..., Any]
    following: Callable[..., Any]
    specs: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    arguments: Callable[[], tuple[Any, ...]]
    is_right: Callable[[Any, tuple[Any, ...]], bool]
    out: Any
    moved: Callable[[tuple[Any, ...]], int]


def on_mesh(helix: HelixConfig, body: Callable[..., Any], specs: tuple[Any, ...], out: Any) -> Any:
    """``body`` on every device, jitted; ``specs`` of its arguments, ``out`` of its outputs."""
    shard = jax.shard_map(body, mesh=helix.mesh, in_specs=specs, out_specs=out, check_vma=False)
    places = jax.tree.map(
        partial(NamedSharding, helix.mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return jax.jit(shard, in_shardings=places, compiler_options=helix.compiler_options)


def measure(label: str, groups: Sequence[Sequence[Shared]], settings: Settings) -> Iterator[Any]:
    """Rows of each group: marginal times of correct programs, reasons of the others.

    All are compiled before the first is timed, lowered one after the other and compiled on all
    cores.
    """
    with ThreadPoolExecutor() as pool, bar(f"compile {label}", sum(map(len, groups))) as advance:
        every = [[_compiled(x, pool, advance) for x in group] for group in groups]
    with bar(label, len(groups)) as advance:
        for group, programs in zip(groups, every, strict=True):
            yield [_measured(*pair, settings) for pair in zip(group, programs, strict=True)]
            advance()


def _compiled(
    shared: Shared, pool: ThreadPoolExecutor, advance: Callable[[], None]
) -> Future[jax.stages.Compiled] | Absent:
    """A program being compiled that returns the outputs of ``shared`` and of one of its loops.

    Both loops are in one program, chosen by its first argument: lowering takes longer than
    compiling.
    """
    helix = shared.helix
    if jax.device_count() < helix.devices:
        reason = f"it needs {helix.devices} devices, and {jax.device_count()} are here"
        return Absent(shared.name, reason)
    if reason := helix.refuses_all_to_all():
        return Absent(shared.name, reason)

    def loop(steps: int) -> Callable[..., Any]:
        def run(x: Any, *others: Any) -> Any:
            def step(x: Any, _: None) -> tuple[Any, None]:
                return shared.following(x, *others), None

            return jax.lax.scan(step, x, length=steps)[0]

        return run

    def body(which: Any, *arguments: Any) -> Any:
        return shared.body(*arguments), jax.lax.switch(which, [*map(loop, LENGTHS)], *arguments)

    try:
        shapes = jax.eval_shape(shared.arguments)
        specs = shared.specs(shapes)
        jitted = on_mesh(helix, body, (PartitionSpec(), *specs), (shared.out, specs[0]))
        which = jax.ShapeDtypeStruct((), np.int32)
        return pool.submit(jitted.lower(which, *shapes).compile)
    except Exception as error:
        return failure(shared.name, error)
    finally:
        advance()


def _measured(
    shared: Shared, program: Future[jax.stages.Compiled] | Absent, settings: Settings
) -> point.Row:
    row = partial(point.row, shared.operation, shared.case, shared.name)
    if isinstance(program, Absent):
        return row(checked=False if program.failed else None, reason=program.reason)
    if not settings.check:
        return row(checked=None, reason="not checked, so not timed")
    try:
        arguments = shared.arguments()
        short, long = (
            partial(
                program.result(), jax.device_put(np.int32(i), shared.helix.sharding()), *arguments
            )
            for i in range(2)
        )
        if not shared.is_right(short()[0], arguments):
            return row(checked=False, reason="its output is wrong")
        times = marginal(short, long, min(settings.repeats, REPEATS))
        return row(checked=True, bytes=shared.moved(arguments), step_ns=times)
    except Exception as error:
        return row(checked=False, reason=failure(shared.name, error).reason)


def marginal(short: Callable[[], Any], long: Callable[[], Any], repeats: int) -> list[int]:
    """Samples of the marginal nanoseconds of a step, above a step that only counts."""
    return clocks.step(short, long, _empty(repeats), repeats, LENGTHS)


@cache
def _empty(repeats: int) -> float:
    """The marginal time of a step that only counts, in loops that are not unrolled."""
    one = jax.numpy.int32(0)
    short, long = (partial(jax.jit(x.function), one) for x in clocks.counting_loops(unroll=1))
    return statistics.median(clocks.step(short, long, 0.0, repeats))
