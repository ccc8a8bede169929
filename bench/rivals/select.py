"""Rivals of selection: the top-k of JAX, PyTorch, FlashInfer and CUB; only JAX sorts it.

FlashInfer's result is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.program import Absent, Program, Source, bound, compile_all, shapes
from bench.rivals import cub
from bench.rivals.common import Maker, module, program, tensor

NAMES = ("lax.top_k", "torch", "flashinfer", *cub.NAMES)


def select(scores: np.ndarray, expected: np.ndarray) -> Mapping[str, Maker]:
    """All rivals of selection. ``expected``: the slots of a stable sort, ascending."""
    as_float32, k = scores.astype(np.float32), expected.shape[1]
    highest = np.sort(np.take_along_axis(as_float32, expected, axis=1), axis=1)

    def stable(slots: Any) -> bool:
        return np.array_equal(np.sort(slots, axis=1), expected)

    def right(slots: Any) -> bool:
        """Whether ``slots`` are k distinct slots with the highest scores; ties may differ."""
        sorted_slots = np.sort(np.asarray(slots).astype(np.int64), axis=1)
        selected = np.sort(np.take_along_axis(as_float32, sorted_slots, axis=1), axis=1)
        return bool((np.diff(sorted_slots, axis=1) > 0).all()) and np.array_equal(selected, highest)

    def of_tensor(slots: Any) -> bool:
        return right(slots.cpu().numpy())

    def torch(name: str) -> Program:
        array = tensor(scores)
        return program(name, lambda: module("torch").topk(array, k, sorted=False)[1], of_tensor)

    def flashinfer(name: str) -> Program | Absent:
        if scores.dtype == np.int32:
            return Absent(name, "it selects among floats")
        array, library = tensor(scores), module("flashinfer")
        return program(name, lambda: library.top_k(array, k, deterministic=True)[1], of_tensor)

    def top_k(name: str) -> Program | Absent:
        """`jax.lax.top_k`, whose slots are in the order of their scores."""
        array = jnp.asarray(scores)
        source = Source(lambda x: jax.lax.top_k(x, k)[1], shapes((array,)))
        return bound(name, compile_all(name, {name: source})[name], (array,), stable)

    checks = dict.fromkeys(cub.NAMES, right) | {"cub_stable": stable}
    of_cub = {name: partial(cub.cub, scores=scores, k=k, check=checks[name]) for name in checks}
    return {"lax.top_k": top_k, "torch": torch, "flashinfer": flashinfer} | of_cub
