"""Rivals of fused verification: pipelines that end in PyTorch's masked gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bench import workload
from bench.program import Absent, Program
from bench.rivals.common import each, equals, module, program, tensor
from bench.rivals.pack import gathered
from bench.rivals.verify import verified
from bench.settings import Settings

NAMES = ("torch",)


def two_step(
    tokens: workload.Tokens,
    kv: np.ndarray,
    expected: np.ndarray,
    verifies: Callable[[], Any] | None,
    settings: Settings,
) -> list[Program | Absent]:
    """PyTorch's verification, then its masked gather; and the paper's pipeline: the ballot kernel
    ``verifies``, which JAX launches, then PyTorch's masked gather of what it accepted."""

    def eager(name: str) -> Program:
        draft, target, kv_tensor = map(tensor, (tokens.draft, tokens.target, kv))
        return program(
            name, lambda: gathered(kv_tensor, verified(draft, target)[0]), equals(expected)
        )

    def mixed(name: str) -> Program | Absent:
        torch = module("torch")
        kv_tensor = tensor(kv)
        if verifies is None:
            return Absent(name, "it needs the backend cuda of verify_greedy")
        first = verifies

        def call() -> Any:
            accepted = jax.block_until_ready(first()[0])
            return gathered(kv_tensor, torch.from_dlpack(accepted))

        return program(name, call, equals(expected))

    return each({"torch+torch": eager, "cuda+torch": mixed}, settings)
