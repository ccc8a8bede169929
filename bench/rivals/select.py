"""Rivals of selection: the top-k of PyTorch, of FlashInfer and of CUB, which do not sort it.

FlashInfer's result is the same each time.
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
    """All of them. ``want``: the slots of a stable sort, ascending."""
    wide, k = scores.astype(np.float32), want.shape[1]
    highest = np.sort(np.take_along_axis(wide, want, axis=1), axis=1)

    def stable(slots: Any) -> bool:
        return np.array_equal(np.sort(slots, axis=1), want)

    def right(slots: Any) -> bool:
        """Their ties may be others: they are k slots with the highest scores."""
        found = np.sort(np.asarray(slots).astype(np.int64), axis=1)
        own = np.sort(np.take_along_axis(wide, found, axis=1), axis=1)
        return bool((np.diff(found, axis=1) > 0).all()) and np.array_equal(own, highest)

    def of_tensor(slots: Any) -> bool:
        return right(slots.cpu().numpy())

    def torch(name: str) -> Program:
        given = tensor(scores)
        return program(name, lambda: module("torch").topk(given, k, sorted=False)[1], of_tensor)

    def flashinfer(name: str) -> Program | Absent:
        if scores.dtype == np.int32:
            return Absent(name, "it selects among floats")
        given, library = tensor(scores), module("flashinfer")
        return program(name, lambda: library.top_k(given, k, deterministic=True)[1], of_tensor)

    checks = dict.fromkeys(cub.NAMES, right) | {"cub_stable": stable}
    found = each({"torch": torch, "flashinfer": flashinfer}, settings)
    return found + cub.cub(scores, k, checks, settings)
