"""Compiled programs, kept by function, settings and shapes, and what compiling them took."""

from __future__ import annotations

import time
from typing import Any

import jax

from jspec.typing import Array


class Programs:
    """Runs jitted functions through executables that it compiles once and keeps.

    Unlike a plain call it knows what compiling cost: ``compile_s`` counts it, and a caller that
    times a run can leave it out.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        self.compile_s = 0.0

    def __call__(self, function: Any, *args: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = (function, structure, tuple(map(_signature, leaves)), tuple(sorted(static.items())))
        if key not in self._kept:
            begin = time.perf_counter()
            self._kept[key] = function.lower(*args, **static).compile()
            self.compile_s += time.perf_counter() - begin
        return self._kept[key](*args)

    def clear(self) -> None:
        """Let go of the executables."""
        self._kept.clear()


def _signature(leaf: Array) -> tuple:
    return leaf.shape, leaf.dtype, leaf.sharding


PROGRAMS = Programs()
