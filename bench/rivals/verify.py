"""Rivals of greedy verification: PyTorch, one operation after the other, and as a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench import workload
from bench.program import Absent, Program
from bench.rivals.common import each, graph, module, program, tensor
from bench.settings import Settings

NAMES = ("torch", "torch_graph")


def verify(tokens: workload.Tokens, settings: Settings) -> list[Program | Absent]:
    """The paper's baseline: one ATen operation after the other."""

    def check(outputs: Any) -> bool:
        accepted, _, mismatch, following, *_ = workload.expected_verified(tokens)
        actual = [x.cpu().numpy() for x in outputs]
        pairs = zip(actual, (accepted, mismatch, following), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    def eager(name: str) -> Program:
        draft, target = map(tensor, (tokens.draft, tokens.target))
        return program(name, lambda: verified(draft, target), check)

    return each({"torch": eager, "torch_graph": lambda name: graph(eager(name))}, settings)


def verified(draft: Any, target: Any) -> tuple[Any, Any, Any]:
    """Accepted count, mismatch flag and next token: eq, bitwise_not, any, to, argmax, two where,
    arange."""
    torch = module("torch")
    batch, gamma = draft.shape
    differs = torch.bitwise_not(torch.eq(draft, target[:, :gamma]))
    mismatch = differs.any(dim=1)
    first = differs.to(torch.int64).argmax(dim=1)
    corrected = target[torch.arange(batch, device=draft.device), first]
    following = torch.where(mismatch, corrected, target[:, gamma])
    return torch.where(mismatch, first, gamma), mismatch, following
