"""A verifier in PyTorch, put through the sampling laws.

    python -m jspec.conformance --verifier examples.conformance_torch:verify

It draws with a generator of its own, so it takes neither seeds nor positions into account.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("this example needs PyTorch: pip install torch") from error


def verify(
    draft_logits: np.ndarray,
    target_logits: np.ndarray,
    *,
    temperature: float,
    top_p: float,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Rejection sampling token by token, as it is usually written."""
    count, gamma, _ = draft_logits.shape
    p = probabilities(target_logits, temperature, top_p)
    if gamma == 0:
        return p[:, 0].multinomial(1).cpu().numpy()
    q = probabilities(draft_logits, temperature, top_p)
    draft = q.flatten(0, 1).multinomial(1).reshape(count, gamma)
    p_tokens, q_tokens = (x[:, :gamma].gather(2, draft[..., None])[..., 0] for x in (p, q))
    accepts = torch.rand_like(p_tokens) * q_tokens < p_tokens
    accepted = accepts.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(count, device=p.device)
    # After the last draft token q is 0: the residual is the target distribution.
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))
    residual = (p[rows, accepted] - q[rows, accepted]).clamp(min=0)
    following = residual.multinomial(1)
    index = torch.arange(gamma + 1, device=p.device)
    block = torch.nn.functional.pad(draft, (0, 1))
    block = torch.where(index == accepted[:, None], following, block)
    return torch.where(index <= accepted[:, None], block, -1).cpu().numpy()


def probabilities(logits: np.ndarray, temperature: float, top_p: float) -> Any:
    """The law of each position, float64: temperature, then top-p."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(logits, device=device).double()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).double()
    p = (x / temperature).softmax(-1)
    if top_p < 1:
        falling, order = p.sort(dim=-1, descending=True)
        keep = falling.cumsum(-1) - falling < top_p
        p = torch.where(torch.zeros_like(keep).scatter(-1, order, keep), p, 0)
        p = p / p.sum(-1, keepdim=True)
    return p
