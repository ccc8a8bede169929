"""Rivals of greedy verification and packing: PyTorch, one operation after the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from bench import workload
from bench.program import Absent, Program
from bench.rivals.common import Check, Maker, graph, module, program, tensor
from jspec.ops.verify import VERIFY_GREEDY

VERIFY = ("torch", "torch_graph")
PACK = ("torch",)
VERIFY_AND_PACK = ("torch+torch", "cuda+torch")


def verify(tokens: workload.Tokens) -> Mapping[str, Maker]:
    """The verification paper's baseline: one ATen operation after the other, also as a graph."""

    def check(outputs: Any) -> bool:
        accepted, _, mismatch, following, *_ = workload.expected_verified(tokens)
        actual = [x.cpu().numpy() for x in outputs]
        pairs = zip(actual, (accepted, mismatch, following), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    def eager(name: str) -> Program:
        draft, target = map(tensor, (tokens.draft, tokens.target))
        return program(name, lambda: _verified(draft, target), check)

    return {"torch": eager, "torch_graph": lambda name: graph(eager(name))}


def pack(kv: np.ndarray, accepted: np.ndarray, expected: np.ndarray) -> Mapping[str, Maker]:
    """`kv[mask]`."""

    def eager(name: str) -> Program:
        tensors = tuple(map(tensor, (kv, accepted)))
        return program(name, lambda: _gathered(*tensors), _equals(expected))

    return {"torch": eager}


def verify_and_pack(
    tokens: workload.Tokens, kv: np.ndarray, expected: np.ndarray
) -> Mapping[str, Maker]:
    """PyTorch's verification, then its masked gather; and the paper's pipeline, in which the
    backend `cuda` verifies and PyTorch gathers."""

    def eager(name: str) -> Program:
        draft, target, kv_tensor = map(tensor, (tokens.draft, tokens.target, kv))
        return program(
            name, lambda: _gathered(kv_tensor, _verified(draft, target)[0]), _equals(expected)
        )

    def mixed(name: str) -> Program | Absent:
        torch, kv_tensor = module("torch"), tensor(kv)
        arguments = tuple(map(jax.device_put, tokens.inputs))
        backend = VERIFY_GREEDY.backend("cuda")
        if reason := backend.supports(*arguments):
            return Absent(name, reason)
        start = partial(jax.jit(backend.run).lower(*arguments).compile(), *arguments)

        def call() -> Any:
            accepted = jax.block_until_ready(start()[0])
            return _gathered(kv_tensor, torch.from_dlpack(accepted))

        return program(name, call, _equals(expected))

    return {"torch+torch": eager, "cuda+torch": mixed}


def _verified(draft: Any, target: Any) -> tuple[Any, Any, Any]:
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


def _gathered(kv: Any, accepted: Any) -> Any:
    """The accepted KV rows by a mask, which asks the device how many there are."""
    index = module("torch").arange(kv.shape[1], device=kv.device)
    return kv[index[None] < accepted[:, None]]


def _equals(expected: np.ndarray) -> Check:
    return lambda out: np.array_equal(out.cpu().numpy(), expected)
