"""Compiles programs of chunks, runs sequences of them, and plans their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import clocks
from jspec.decode.state import DecodeState, Models

CHUNKS = (1, 2)  # chunks of the two runs whose difference is timed
REPEATS = 7
CPU_REPEATS = 3  # where a chunk takes seconds


def compiled(lowerings: Mapping[str, Callable[[], jax.stages.Lowered]]) -> dict[str, Any]:
    """The programs of ``lowerings``: lowered one after the other, compiled concurrently."""
    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(lower().compile) for name, lower in lowerings.items()}
    return {name: future.result() for name, future in futures.items()}


def rewound(state: DecodeState, length: int, draft: Any = None) -> DecodeState:
    """The state with its lengths reset to ``length``.

    ``draft``: a drafter's state, which a chunk consumes, so that the state gets a copy; None for
    the state's own.
    """
    # Made on the host: a copy to the device launches no kernel.
    lengths = np.full(state.tokens.shape[0], length, np.int32)
    lengths = jax.device_put(lengths, state.cache.lengths.sharding)
    state = dataclasses.replace(state, cache=state.cache.with_lengths(lengths))
    copy = jax.tree.map(jnp.copy, draft)
    return state if draft is None else dataclasses.replace(state, draft=copy)


class Loop:
    """Runs sequences of chunks; each takes the state of the one before.

    Args:
        program: the compiled chunk.
        models: its first argument.
        state: to begin with; consumed.
        length: of each row where a sequence begins.
        draft: the drafter's state there.
    """

    def __init__(
        self,
        program: Any,
        models: Models | Any,
        state: DecodeState,
        length: int,
        draft: Any,
    ):
        self._program, self._models, self._state = program, models, state
        self._length, self._draft = length, draft

    def run(self, count: int) -> jax.Array:
        """Run ``count`` chunks; an array to wait for."""
        state = rewound(self._state, self._length, self._draft)
        for _ in range(count):
            state, _ = self._program(self._models, state)
        self._state = state
        return state.cache.lengths

    def step_ns(self, steps: int) -> list[int]:
        """Samples of the marginal nanoseconds of a step, in chunks of ``steps``."""
        repeats = CPU_REPEATS if jax.default_backend() == "cpu" else REPEATS
        short, long = (lambda count=count: self.run(count) for count in CHUNKS)
        samples = clocks.step(short, long, 0.0, repeats, lengths=CHUNKS, warmups=1)
        return [round(ns / steps) for ns in samples]


def memory_of(program: Any) -> dict[str, int]:
    """Temporary and peak bytes of a program, from its memory analysis; empty if it has none."""
    plan = program.memory_analysis()
    if plan is None:
        return {}
    outputs = max(plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)
    return {
        "temp_bytes": plan.temp_size_in_bytes,
        "peak_bytes": plan.argument_size_in_bytes + plan.temp_size_in_bytes + outputs,
    }


def too_large(resident: int, memory: Mapping[str, int]) -> str | None:
    """Why a program with this `memory_of` does not fit next to ``resident`` bytes, or None."""
    limit, temporary = device_bytes("bytes_limit"), memory.get("temp_bytes", 0)
    if limit is None or resident + temporary <= limit:
        return None
    return (
        f"it needs {(resident + temporary) / 1e9:.1f} GB, of which {temporary / 1e9:.1f} are "
        f"temporary, and JAX may use {limit / 1e9:.1f} (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )


def device_bytes(name: str) -> int | None:
    """A memory statistic of the device, None where it has none."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name)
