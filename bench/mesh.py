"""Programs on the mesh of a `HelixConfig`, and what one more of them costs in a jitted loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

from bench import clocks
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
    return jax.jit(shard)


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
