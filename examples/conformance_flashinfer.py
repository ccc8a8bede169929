"""FlashInfer's chain speculative sampling, put through the sampling laws on an NVIDIA GPU.

python -m jspec.conformance --verifier examples.conformance_flashinfer:verify
"""

from __future__ import annotations

import numpy as np

try:
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("this example needs pip install flashinfer-python torch") from error


def verify(
    draft_logits: np.ndarray,
    target_logits: np.ndarray,
    *,
    temperature: float,
    top_p: float,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Its own softmax, filter, draft sampling and chain, with its own random numbers."""
    count, gamma, _ = draft_logits.shape
    target = _probabilities(target_logits, temperature, top_p)
    if gamma == 0:
        return flashinfer.sampling.sampling_from_probs(target[:, 0])[:, None].cpu().numpy()
    draft = _probabilities(draft_logits, temperature, top_p)
    tokens = flashinfer.sampling.sampling_from_probs(draft.flatten(0, 1)).reshape(count, gamma)
    chain = flashinfer.sampling.chain_speculative_sampling
    return chain(draft, tokens.int(), target)[0].cpu().numpy()


def _probabilities(logits: np.ndarray, temperature: float, top_p: float) -> torch.Tensor:
    x = torch.tensor(logits, device="cuda")
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).float()
    p = (x / temperature).softmax(-1)
    if top_p < 1 and p.numel():
        p = flashinfer.sampling.top_p_renorm_probs(p.flatten(0, 1), top_p).reshape(p.shape)
    return p.contiguous()
