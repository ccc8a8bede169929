"""Programs on the mesh of a `HelixConfig`: checked, and what one more costs in a jitted loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

from bench import clocks, point
from bench.cases import Case
from bench.program import Absent, Program
from bench.settings import Settings
from jspec.helix import HelixConfig

LENGTHS = (16, 80)  # steps of the two loops


def on_mesh(
    helix: HelixConfig,
    body: Callable[..., Any],
    specs: tuple[Any, ...],
    *,
    steps: int | None = None,
    out: Any = None,
) -> Any:
    """``body(x, *others)`` on every device, or a loop of ``steps`` of it, each on the one before.

    ``specs``: of the arguments; ``out``: of what it gives, by default as of the first of them.
    """

    def run(x: Any, *others: Any) -> Any:
        if steps is None:
            return body(x, *others)
        return jax.lax.scan(lambda x, _: (body(x, *others), None), x, length=steps)[0]

    shard = jax.shard_map(
        run,
        mesh=helix.mesh,
        in_specs=specs,
        out_specs=specs[0] if out is None else out,
        check_vma=False,
    )
    return jax.jit(shard, compiler_options=helix.compiler_options)


def measured(
    operation: str,
    here: Case,
    name: str,
    helix: HelixConfig,
    body: Callable[..., Any],
    specs: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    arguments: Callable[[], tuple[Any, ...]],
    is_right: Callable[[Any], bool],
    settings: Settings,
    moved: Callable[[tuple[Any, ...]], int],
) -> list[point.Row]:
    """Rows of ``body`` as `on_mesh` takes it: with its wall time and its marginal time where
    ``is_right`` of what it gives, with the reason where it cannot run.

    ``specs``: how the arguments are sharded; ``moved``: the bytes that a device has to read and
    write for them.
    """
    if jax.device_count() < helix.devices:
        reason = f"it needs {helix.devices} devices, and {jax.device_count()} are here"
        return point.measure(operation, here, [Absent(name, reason)], settings)
    given = arguments()
    placed = specs(given)
    compiled = on_mesh(helix, body, placed).lower(*given).compile()
    program = Program(name, lambda: compiled(*given), is_right)
    rows = point.measure(
        *(operation, here, [program], settings), clocks=("wall",), moved=moved(given)
    )
    for own in rows:
        if own["checked"]:
            own["step_ns"] = marginal(helix, body, placed, given, settings)
    return rows


def marginal(
    helix: HelixConfig,
    body: Callable[..., Any],
    specs: tuple[Any, ...],
    arguments: tuple[Any, ...],
    settings: Settings,
) -> list[int]:
    """Nanoseconds of one more ``body`` above an iteration that only counts, sample by sample."""
    short, long = (
        partial(on_mesh(helix, body, specs, steps=steps).lower(*arguments).compile(), *arguments)
        for steps in LENGTHS
    )
    return clocks.step(short, long, _empty(settings.repeats), settings.repeats, LENGTHS)


@cache
def _empty(repeats: int) -> float:
    """The marginal time of a step that only counts."""
    one = jax.numpy.int32(0)
    short, long = (partial(jax.jit(x.function), one) for x in clocks.counting_loops())
    return statistics.median(clocks.step(short, long, 0.0, repeats))
