"""vLLM's rejection sampler as its documentation describes it, put through the sampling laws.

    python -m jspec.conformance --verifier examples.conformance_vllm:verify

Written in PyTorch from docs.vllm.ai (`vllm.v1.sample.rejection_sampler`), not vLLM's own code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("this example needs PyTorch: pip install torch") from error

from examples.conformance_torch import probabilities


def verify(
    draft_logits: np.ndarray,
    target_logits: np.ndarray,
    *,
    temperature: float,
    top_p: float,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Accepted, recovered and bonus tokens, in float32.

    A draft token is *accepted* while p / q is at least a uniform number; the first that is not is
    replaced by one *recovered* from max(p - q, 0); after a whole draft a *bonus* follows from p.
    """
    gamma = draft_logits.shape[1]
    p = probabilities(target_logits, temperature, top_p).float()
    bonus = _draw(p[:, gamma])[:, None]
    if gamma == 0:
        return bonus.cpu().numpy()
    q = probabilities(draft_logits, temperature, top_p).float()
    p = p[:, :gamma]
    draft = _draw(q)
    p_draft, q_draft = (x.gather(2, draft[..., None])[..., 0] for x in (p, q))
    accepts = p_draft / q_draft >= torch.rand_like(q_draft, dtype=torch.float64)
    accepted = accepts.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    recovered = _draw((p - q).clamp(min=0))
    index = torch.arange(gamma + 1, device=p.device)
    following = torch.cat([recovered, bonus], dim=1)
    block = torch.where(index < accepted, torch.cat([draft, bonus], dim=1), following)
    return torch.where(index <= accepted, block, -1).cpu().numpy()


def _draw(weights: Any) -> Any:
    """A token of each row: the largest quotient of weight and exponential number."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
