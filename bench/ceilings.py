"""Ceilings of the machine: reading, copying, matmuls, and launching an empty kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import point
from bench.program import Absent, Program, Source, bound, compile_all
from bench.settings import Settings

SMALL = 30 * 2**20  # below a Hopper's 50 MB of L2, as the paper's stress point is
MATMUL_SIZE = 8192
STATES = ("warm", "cold")


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Ceilings of a device: bytes ``read`` and ``matrix`` operations a second, None if unknown."""

    read: float
    matrix: float | None

    def floor_ns(self, weights: int, cached: int, flops: int) -> float:
        """The least time of a step that reads so many bytes of weights and of the cache.

        ``flops``: of its matmuls with the weights, which overlap with reading them.
        """
        matmuls = weights / self.read
        if self.matrix is not None:
            matmuls = max(matmuls, flops / self.matrix)
        return (matmuls + cached / self.read) * 1e9


@cache
def measured() -> Ceilings:
    """The ceilings of this machine; those of a CPU without the one of matmuls."""
    read_rows = rows(Settings(), ("read",))
    read = bandwidth(read_rows, "read")
    if read is None:
        raise RuntimeError(f"the read ceiling has no time: {read_rows[0].get('reason')}")
    return Ceilings(read, None if jax.default_backend() == "cpu" else matrix_rate())


def matrix_rate() -> float | None:
    """Operations a second of a bfloat16 matmul, None where it failed.

    Its numbers are random because a GPU multiplies zeros at a higher clock.
    """
    x = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE), jnp.bfloat16)
    expected = np.asarray(x[:1], np.float32) @ np.asarray(x[:, :8], np.float32)

    def check(out: jax.Array) -> bool:
        return np.allclose(np.asarray(out[:1, :8], np.float32), expected, rtol=0.02, atol=2)

    program = _program("matmul", x, lambda x: x @ x, check)
    (row,) = point.measure("ceilings", {"work": "matmul"}, [program], Settings())
    time = point.best_clock(row)
    return None if time is None else 2 * MATMUL_SIZE**3 / time.median * 1e6


def sizes() -> list[int]:
    """Sizes in bytes of reads and copies: on a GPU also more than its L2 holds."""
    return [SMALL] if jax.default_backend() == "cpu" else [2**30, SMALL]


def rows(settings: Settings, works: Sequence[str] = ("read", "copy", "launch")) -> list[point.Row]:
    """Time a sum over bfloat16 (read), its negation (copy), and x + 1 of one number (launch).

    Bytes of the copy are those read and written.
    """
    measured_rows = []
    for work in works:
        for size in [8] if work == "launch" else sizes():
            x, function, expected = _work(work, size)
            program = _program(work, x, function, lambda out, y=expected: bool((out == y).all()))
            case, states = {"work": work, "bytes": size}, STATES if size == SMALL else STATES[:1]
            measured_rows += point.measure(
                "ceilings", case, [program], settings, states=states, moved=size
            )
    return measured_rows


def _program(
    work: str, x: jax.Array, function: Callable[..., Any], check: Callable[[Any], bool]
) -> Program | Absent:
    return bound("xla", compile_all(work, {work: Source(function, (x,))})[work], (x,), check)


def _work(work: str, size: int) -> tuple[jax.Array, Any, Any]:
    """Input, function and expected output; ``size`` counts bytes read and written."""
    if work == "launch":
        return jnp.zeros((1,), jnp.int32), lambda x: x + 1, 1
    if work == "copy":
        return jnp.ones((size // 4096, 1024), jnp.bfloat16), jnp.negative, jnp.bfloat16(-1)
    x = jnp.ones((size // 2048, 1024), jnp.bfloat16)
    return x, lambda x: x.sum(axis=1, dtype=jnp.float32), np.float32(1024)


def bandwidth(rows: Sequence[point.Row], work: str, l2: str = "warm") -> float | None:
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
