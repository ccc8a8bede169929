"""Rivals of stochastic verification: PyTorch and FlashInfer, with the softmax they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench import workload
from bench.program import Absent, Program
from bench.rivals.common import Maker, module, program, tensor

NAMES = ("torch", "flashinfer")


def sampling(logits: workload.Logits, uniforms: np.ndarray) -> Mapping[str, Maker]:
    """Softmax and rejection in eager PyTorch, and FlashInfer's chain sampling with its softmax."""
    gamma = logits.draft.shape[1]

    def tensors() -> tuple[Any, Any, Any]:
        draft_tensor = None if logits.draft_logits is None else tensor(logits.draft_logits)
        return tensor(logits.draft.astype(np.int64)), tensor(logits.target), draft_tensor

    def eager(name: str) -> Program:
        arguments = (*tensors(), tensor(uniforms))

        def check(outputs: Any) -> bool:
            accepted, following = (x.cpu().numpy() for x in outputs)
            return workload.plausible(logits, uniforms, accepted, following)

        return program(name, lambda: rejected(*arguments), check)

    def chain(name: str) -> Program | Absent:
        torch, flashinfer = module("torch"), module("flashinfer")
        if not torch.cuda.is_available():
            return Absent(name, "FlashInfer needs a GPU")
        draft, target, draft_logits = tensors()
        short = draft.to(torch.int32)

        def call() -> Any:
            p = torch.softmax(target.float(), dim=-1)
            if draft_logits is None:
                q = torch.zeros_like(p[:, :gamma]).scatter_(2, draft[..., None], 1)
            else:
                q = torch.softmax(draft_logits.float(), dim=-1)
            return flashinfer.sampling.chain_speculative_sampling(q, short, p)[0]

        def check(out: Any) -> bool:
            # Its random numbers differ: each row must be a prefix of its draft and one other token.
            blocks = out.cpu().numpy()
            committed = (blocks >= 0).sum(axis=1)
            index = np.arange(gamma)[None]
            stands = (blocks[:, :gamma] == logits.draft) | (index >= committed[:, None] - 1)
            return bool(stands.all() and (committed >= 1).all())

        return program(name, call, check)

    return {"torch": eager, "flashinfer": chain}


def rejected(draft: Any, target: Any, draft_logits: Any, u: Any) -> tuple[Any, Any]:
    """Accepted count and next token by rejection sampling over materialised probabilities."""
    torch = module("torch")
    batch, gamma = draft.shape
    rows = torch.arange(batch, device=draft.device)
    p = torch.softmax(target.float(), dim=-1)
    p_token = p[:, :gamma].gather(2, draft[..., None])[..., 0]
    q = None if draft_logits is None else torch.softmax(draft_logits.float(), dim=-1)
    q_token = 1 if q is None else q.gather(2, draft[..., None])[..., 0]
    stands = u[0, :, :gamma] * q_token < p_token
    accepted = stands.to(torch.int64).cumprod(dim=1).sum(dim=1)
    at = accepted.clamp(max=gamma - 1)
    p_next = p[rows, accepted]
    if q is None:
        residual = p_next.scatter(1, draft[rows, at][:, None], 0)
    else:
        residual = (p_next - q[rows, at]).clamp(min=0)
    fell = accepted < gamma
    ends = torch.where(fell[:, None], residual, p_next).cumsum(dim=1)
    uniform = torch.where(fell, u[1][rows, accepted], u[2][rows, accepted])
    following = torch.searchsorted(ends, (uniform * ends[:, -1])[:, None], right=True)[:, 0]
    return accepted, following.clamp(max=p.shape[-1] - 1)
