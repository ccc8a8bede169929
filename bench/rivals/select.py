"""Rivals of selection: PyTorch's top-k and FlashInfer's, whose result is the same each time."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.program import Absent, Program
from bench.rivals.common import each, module, program, tensor
from bench.settings import Settings

NAMES = ("torch", "flashinfer")


def select(scores: np.ndarray, k: int, settings: Settings) -> list[Program | Absent]:
    """Both, without sorting what they select."""
    wide = scores.astype(np.float32)
    highest = -np.sort(-wide, axis=1)[:, :k]

    def right(slots: Any) -> bool:
        """Their ties may be others."""
        own = np.take_along_axis(wide, slots.cpu().numpy().astype(np.int64), axis=1)
        return np.array_equal(-np.sort(-own, axis=1), highest)

    def torch(name: str) -> Program:
        given = tensor(scores)
        return program(name, lambda: module("torch").topk(given, k, sorted=False)[1], right)

    def flashinfer(name: str) -> Program | Absent:
        if scores.dtype == np.int32:
            return Absent(name, "it selects among floats")
        given, library = tensor(scores), module("flashinfer")
        return program(name, lambda: library.top_k(given, k, deterministic=True)[1], right)

    return each({"torch": torch, "flashinfer": flashinfer}, settings)
