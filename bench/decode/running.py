"""Runs sequences of chunks of steps, and measures their memory and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from bench import point
from bench.clocks import Kernel
from bench.decode import parts
from jspec.decode.state import DecodeState, Models, StepRecord

CHUNKS = (1, 2)  # chunks of the two runs whose difference is timed
REPEATS = 7
LONGEST_KERNELS = 12  # names in a row


class Loop:
    """Runs sequences of chunks; each takes the state of the one before.

    ``rewound``: resets a state to the one that a run begins with.
    """

    def __init__(
        self, models: Models, rewound: Callable[[DecodeState], DecodeState], state: DecodeState
    ):
        self._models, self._rewound, self._state = models, rewound, state

    def run(self, program: Any, count: int) -> jax.Array:
        state = self._rewound(self._state)
        for _ in range(count):
            state, _ = program(self._models, state)
        self._state = state
        return state.cache.lengths


def first_run(
    run: Callable[[DecodeState], Any], state: DecodeState
) -> tuple[DecodeState, StepRecord, dict[str, Any]]:
    """The state after a chunk, its record, and the peak memory if this run raised it.

    A device reports the peak of the whole process.
    """
    before = device_bytes("peak_bytes_in_use")
    state, record = jax.block_until_ready(run(state))
    after = device_bytes("peak_bytes_in_use")
    raised = before is not None and after is not None and after > before
    return state, record, {"peak_bytes": after, "peak_measured": True} if raised else {}


def memory_of(program: Any) -> dict[str, Any]:
    """Temporary and peak bytes of a program, from its memory analysis."""
    plan = program.memory_analysis()
    if plan is None:
        return {}
    outputs = max(plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)
    return {
        "temp_bytes": plan.temp_size_in_bytes,
        "peak_bytes": plan.argument_size_in_bytes + plan.temp_size_in_bytes + outputs,
    }


def too_large(resident: int, memory: dict[str, Any]) -> str | None:
    """Why a program does not fit in memory next to ``resident`` bytes, or None.

    ``memory``: of the program, by `memory_of`.
    """
    limit, temporary = device_bytes("bytes_limit"), memory.get("temp_bytes", 0)
    if limit is None or resident + temporary <= limit:
        return None
    return (
        f"it needs {(resident + temporary) / 1e9:.1f} GB, of which {temporary / 1e9:.1f} are "
        f"temporary, and JAX may use {limit / 1e9:.1f} (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )


def kernels_of(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of a chunk; raises `RuntimeError` where CUPTI has none."""
    kernels = point.DEVICE.kernels(run)
    if not kernels:
        raise RuntimeError("CUPTI recorded no kernel")
    return kernels


def of_kernels(kernels: Sequence[Kernel], steps: int, step_ns: float) -> dict[str, Any]:
    """Kernels per step of ``step_ns``, the idle share of a step, and the longest kernels."""
    busy = sum(ns for _, ns in kernels) / steps
    return {
        "kernels": len(kernels) / steps,
        "idle": 1 - busy / step_ns,
        "longest": {
            name: [count / steps, ns / steps]
            for name, (count, ns) in parts.longest(kernels, LONGEST_KERNELS).items()
        },
    }


def device_bytes(name: str) -> int | None:
    """A memory statistic of the device, None where it has none."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name)
