"""Ceilings of the machine: reading, copying, and launching an empty kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import point
from bench.program import Absent, Program, Source, compile_all
from bench.settings import Settings

SMALL = 30 * 2**20  # below a Hopper's 50 MB of L2, as the paper's stress point is
STATES = ("warm", "cold")


def sizes() -> list[int]:
    """Sizes in bytes of reads and copies: on a GPU also more than its L2 holds."""
    return [SMALL] if jax.default_backend() == "cpu" else [2**30, SMALL]


def rows(settings: Settings) -> list[point.Row]:
    """Time a sum over bfloat16 (read), its negation (copy), and x + 1 of one number (launch).

    Bytes of the copy are those read and written.
    """
    measured = []
    cases = [(work, size) for work in ("read", "copy") for size in sizes()]
    for work, size in [*cases, ("launch", 8)]:
        x, function, expected = _work(work, size)
        compiled = compile_all(work, {work: Source(function, (x,))})[work]

        def check(out: jax.Array, expected: Any = expected) -> bool:
            return bool((out == expected).all())

        program: Program | Absent
        if isinstance(compiled, Absent):
            program = compiled
        else:
            program = Program("xla", lambda c=compiled, x=x: c(x), check)
        case = {"work": work, "bytes": size}
        states = STATES if size == SMALL else STATES[:1]
        measured += point.measure("ceilings", case, [program], settings, states=states, moved=size)
    return measured


def _work(work: str, size: int) -> tuple[jax.Array, Any, Any]:
    """Input, function and expected output; ``size`` counts bytes read and written."""
    if work == "launch":
        return jnp.zeros((1,), jnp.int32), lambda x: x + 1, 1
    if work == "copy":
        x = jnp.ones((size // 4096, 1024), jnp.bfloat16)
        return x, jnp.negative, jnp.bfloat16(-1)
    x = jnp.ones((size // 2048, 1024), jnp.bfloat16)
    return x, lambda x: x.sum(axis=1, dtype=jnp.float32), np.float32(1024)


def bandwidth(rows: list[point.Row], work: str, l2: str = "warm") -> float | None:
    """Bytes a second of the largest ``work`` measured in this state, None where it failed.

    On a GPU, sizes that fit in L2 are left out.
    """
    matching = [
        r
        for r in rows
        if r["case"]["work"] == work
        and r["case"].get("l2") == l2
        and r["checked"]
        and (r["case"]["bytes"] > SMALL or not point.spread(r, "device"))
    ]
    if not matching:
        return None
    largest = max(matching, key=lambda r: r["case"]["bytes"])
    time = point.best_clock(largest)
    return None if time is None else largest["bytes"] / time.median * 1e6
