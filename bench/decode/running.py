"""Running chunks of steps: that follow each other, their memory and their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from bench import point
from bench.clocks import Kernel
from bench.decode import parts
from jspec.decode.state import DecodeState, Models, StepRecord

CHUNKS = (1, 2)  # that follow each other, in the two runs whose difference is timed
REPEATS = 7
LONGEST_KERNELS = 12  # names of a row


class Loop:
    """Runs chunks that follow each other; each takes the state of the one before.

    ``rewound``: gives the state that a run begins with, whatever was decoded since.
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
    """The state after a chunk, its record, and the peak of memory where this run set it.

    A device's peak is that of the whole process: one that did not rise says nothing of this run.
    """
    before = device_bytes("peak_bytes_in_use")
    state, record = jax.block_until_ready(run(state))
    after = device_bytes("peak_bytes_in_use")
    raised = before is not None and after is not None and after > before
    return state, record, {"peak_bytes": after, "peak_measured": True} if raised else {}


def memory_of(program: Any) -> dict[str, Any]:
    """Bytes of a program beside its arguments, and of these."""
    plan = program.memory_analysis()
    if plan is None:
        return {}
    outputs = max(plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)
    return {
        "temp_bytes": plan.temp_size_in_bytes,
        "peak_bytes": plan.argument_size_in_bytes + plan.temp_size_in_bytes + outputs,
    }


def too_large(resident: int, memory: dict[str, Any]) -> str | None:
    """Why a program cannot run in the memory that there is beside ``held`` bytes, or None.

    ``memory``: as `memory_of` gives it.
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
    """How many kernels a step of ``step_ns`` has, how long it waits, and the longest of them."""
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
    """What the device says of its memory, None where it does not."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name)
