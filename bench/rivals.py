"""What jspec is measured against: PyTorch, eager and as a CUDA graph, and FlashInfer.

Each rival is a `Program` of the same inputs, or an `Absent` with the reason. They run on the GPU
where PyTorch sees one, else on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bench import workload
from bench.program import Absent, Program, failure
from bench.settings import Settings

NAMES = ("torch", "torch_graph", "flashinfer")
Check = Callable[[Any], bool]
Maker = Callable[[str], Program | Absent]


def verify(tokens: workload.Tokens, settings: Settings) -> list[Program | Absent]:
    """The paper's baseline: one ATen operation after the other."""

    def check(outputs: Any) -> bool:
        accepted, _, mismatch, following, *_ = workload.expected_verified(tokens)
        own = [x.cpu().numpy() for x in outputs]
        pairs = zip(own, (accepted, mismatch, following), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    def eager(name: str) -> Program:
        draft, target = map(_tensor, (tokens.draft, tokens.target))
        return _program(name, lambda: verified(draft, target), check)

    return _each({"torch": eager, "torch_graph": lambda name: _graph(eager(name))}, settings)


def pack(
    rows: np.ndarray, accepted: np.ndarray, expected: np.ndarray, settings: Settings
) -> list[Program | Absent]:
    """`kv[mask]`."""

    def eager(name: str) -> Program:
        own_rows, own_accepted = map(_tensor, (rows, accepted))
        return _program(name, lambda: gathered(own_rows, own_accepted), _equals(expected))

    return _each({"torch": eager}, settings)


def two_step(
    tokens: workload.Tokens,
    rows: np.ndarray,
    expected: np.ndarray,
    verifies: Callable[[], Any] | None,
    settings: Settings,
) -> list[Program | Absent]:
    """PyTorch's verification, then its masked gather; and the paper's pipeline: the ballot kernel
    ``verifies``, which JAX launches, then PyTorch's masked gather of what it accepted."""

    def eager(name: str) -> Program:
        draft, target, own_rows = map(_tensor, (tokens.draft, tokens.target, rows))
        return _program(
            name, lambda: gathered(own_rows, verified(draft, target)[0]), _equals(expected)
        )

    def mixed(name: str) -> Program | Absent:
        torch = _module("torch")
        own_rows = _tensor(rows)
        if verifies is None:
            return Absent(name, "it needs the backend cuda of verify_greedy")
        first = verifies

        def call() -> Any:
            accepted = jax.block_until_ready(first()[0])
            return gathered(own_rows, torch.from_dlpack(accepted))

        return _program(name, call, _equals(expected))

    return _each({"torch+torch": eager, "cuda+torch": mixed}, settings)


def sampling(
    logits: workload.Logits, uniforms: np.ndarray, settings: Settings
) -> list[Program | Absent]:
    """Softmax and rejection in eager PyTorch, and FlashInfer's chain sampling with its softmax."""
    gamma = logits.draft.shape[1]

    def tensors() -> tuple[Any, Any, Any]:
        own_draft = None if logits.draft_logits is None else _tensor(logits.draft_logits)
        return _tensor(logits.draft.astype(np.int64)), _tensor(logits.target), own_draft

    def eager(name: str) -> Program:
        arguments = (*tensors(), _tensor(uniforms))

        def check(outputs: Any) -> bool:
            accepted, following = (x.cpu().numpy() for x in outputs)
            return workload.plausible(logits, uniforms, accepted, following)

        return _program(name, lambda: rejected(*arguments), check)

    def chain(name: str) -> Program | Absent:
        torch, flashinfer = _module("torch"), _module("flashinfer")
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
            # Its random numbers are its own: each row must be its draft up to one other token.
            blocks = out.cpu().numpy()
            committed = (blocks >= 0).sum(axis=1)
            index = np.arange(gamma)[None]
            stands = (blocks[:, :gamma] == logits.draft) | (index >= committed[:, None] - 1)
            return bool(stands.all() and (committed >= 1).all())

        return _program(name, call, check)

    return _each({"torch": eager, "flashinfer": chain}, settings)


def verified(draft: Any, target: Any) -> tuple[Any, Any, Any]:
    """Accepted count, mismatch flag and next token: eq, bitwise_not, any, to, argmax, two where,
    arange."""
    torch = _module("torch")
    batch, gamma = draft.shape
    differs = torch.bitwise_not(torch.eq(draft, target[:, :gamma]))
    mismatch = differs.any(dim=1)
    first = differs.to(torch.int64).argmax(dim=1)
    corrected = target[torch.arange(batch, device=draft.device), first]
    following = torch.where(mismatch, corrected, target[:, gamma])
    return torch.where(mismatch, first, gamma), mismatch, following


def gathered(rows: Any, accepted: Any) -> Any:
    """The accepted rows by a mask, which asks the device how many there are."""
    index = _module("torch").arange(rows.shape[1], device=rows.device)
    return rows[index[None] < accepted[:, None]]


def rejected(draft: Any, target: Any, draft_logits: Any, u: Any) -> tuple[Any, Any]:
    """Accepted count and next token by rejection sampling over materialised probabilities."""
    torch = _module("torch")
    batch, gamma = draft.shape
    rows = torch.arange(batch, device=draft.device)
    p = torch.softmax(target.float(), dim=-1)
    p_token = p[:, :gamma].gather(2, draft[..., None])[..., 0]
    q = None if draft_logits is None else torch.softmax(draft_logits.float(), dim=-1)
    q_token = 1 if q is None else q.gather(2, draft[..., None])[..., 0]
    stands = u[0, :, :gamma] * q_token < p_token
    accepted = stands.to(torch.int64).cumprod(dim=1).sum(dim=1)
    at = accepted.clamp(max=gamma - 1)
    here = p[rows, accepted]
    if q is None:
        residual = here.scatter(1, draft[rows, at][:, None], 0)
    else:
        residual = (here - q[rows, at]).clamp(min=0)
    fell = accepted < gamma
    ends = torch.where(fell[:, None], residual, here).cumsum(dim=1)
    own = torch.where(fell, u[1][rows, accepted], u[2][rows, accepted])
    following = torch.searchsorted(ends, (own * ends[:, -1])[:, None], right=True)[:, 0]
    return accepted, following.clamp(max=p.shape[-1] - 1)


def _each(makers: Mapping[str, Maker], settings: Settings) -> list[Program | Absent]:
    """The rivals that the settings want, by the last part of their names."""
    found: list[Program | Absent] = []
    for name, maker in makers.items():
        if not settings.wants(name.rpartition("+")[2]):
            continue
        try:
            found.append(maker(name))
        except ModuleNotFoundError as error:
            found.append(Absent(name, f"{error.name} is not installed"))
        except Exception as error:
            found.append(failure(name, error))
    return found


def _module(name: str) -> Any:
    """A package that need not be there: imported when a rival is made."""
    return importlib.import_module(name)


def _program(name: str, call: Callable[[], Any], check: Check) -> Program:
    torch = _module("torch")

    def wait(outputs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return outputs

    return Program(name, call, check, wait, alone=True)


def _graph(eager: Program) -> Program | Absent:
    """The same kernels recorded once and replayed by one launch."""
    torch = _module("torch")
    if not torch.cuda.is_available():
        return Absent(eager.name, "CUDA graphs need a GPU")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            eager.start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = eager.start()

    def replay(recorded: Program = eager) -> Any:
        graph.replay()  # it reads the inputs in place, which `recorded` keeps
        return outputs

    return _program(eager.name, replay, eager.check)


def _tensor(x: np.ndarray) -> Any:
    torch = _module("torch")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).to(where).view(torch.bfloat16)
    return torch.from_numpy(x).to(where)


def _equals(expected: np.ndarray) -> Check:
    return lambda out: np.array_equal(out.cpu().numpy(), expected)
