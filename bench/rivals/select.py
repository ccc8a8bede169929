"""Rivals of selection: the top-k of PyTorch, of FlashInfer and of CUB, which do not sort it.

FlashInfer's result is deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.program import Absent, Program
from bench.rivals import cub
from bench.rivals.common import each, module, program, tensor
from bench.settings import Settings

NAMES = ("torch", "flashinfer", *cub.NAMES)


def select(scores: np.ndarray, want: np.ndarray, settings: Settings) -> list[Program | Absent]:
    """All rivals of selection. ``want``: the slots of a stable sort, ascending."""
    as_float32, k = scores.astype(np.float32), want.shape[1]
    highest = np.sort(np.take_along_axis(as_float32, want, axis=1), axis=1)

    def stable(slots: Any) -> bool:
        return np.array_equal(np.sort(slots, axis=1), want)

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

    checks = dict.fromkeys(cub.NAMES, right) | {"cub_stable": stable}
    programs = each({"torch": torch, "flashinfer": flashinfer}, settings)
    return programs + cub.cub(scores, k, checks, settings)
