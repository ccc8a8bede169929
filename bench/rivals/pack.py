"""The rival of packing: PyTorch's `kv[mask]`."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.program import Absent, Program
from bench.rivals.common import each, equals, module, program, tensor
from bench.settings import Settings

NAMES = ("torch",)


def pack(
    kv: np.ndarray, accepted: np.ndarray, expected: np.ndarray, settings: Settings
) -> list[Program | Absent]:
    """`kv[mask]`."""

    def eager(name: str) -> Program:
        tensors = tuple(map(tensor, (kv, accepted)))
        return program(name, lambda: gathered(*tensors), equals(expected))

    return each({"torch": eager}, settings)


def gathered(kv: Any, accepted: Any) -> Any:
    """The accepted KV rows by a mask, which asks the device how many there are."""
    index = module("torch").arange(kv.shape[1], device=kv.device)
    return kv[index[None] < accepted[:, None]]
