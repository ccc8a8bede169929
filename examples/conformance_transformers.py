"""The verification of transformers' assisted decoding, put through the sampling laws.

    python -m jspec.conformance --verifier examples.conformance_transformers:verify --rows 20000

It verifies one request at a time, so a law of 20,000 requests takes some 10 seconds.
"""

from __future__ import annotations

import numpy as np

try:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.generation import (  # pyright: ignore[reportMissingImports]
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopPLogitsWarper,
    )
    from transformers.generation.utils import (  # pyright: ignore[reportMissingImports]
        _speculative_sampling,
    )
except ImportError as error:
    raise ImportError("this example needs pip install torch transformers") from error


torch.set_num_threads(1)  # more cost time on arrays of a few tokens


def verify(
    draft_logits: np.ndarray,
    target_logits: np.ndarray,
    *,
    temperature: float,
    top_p: float,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Its own warpers on draft and target, and its own verification of each row's draft."""
    count, gamma, _ = draft_logits.shape
    draft, target = torch.tensor(draft_logits), torch.tensor(target_logits)
    if temperature == 0:
        return _greedy(draft.argmax(-1).numpy(), target.argmax(-1).numpy())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    target = warpers(None, target.flatten(0, 1)).unflatten(0, target.shape[:2])
    if gamma == 0:
        return target[:, 0].softmax(-1).multinomial(1).numpy()
    draft = warpers(None, draft.flatten(0, 1)).unflatten(0, draft.shape[:2])
    tokens = draft.softmax(-1).flatten(0, 1).multinomial(1).reshape(count, gamma)
    blocks = np.full((count, gamma + 1), -1)
    for row in range(count):
        one = slice(row, row + 1)
        block, _ = _speculative_sampling(tokens[one], draft[one], gamma, target[one])
        blocks[row, : block.shape[1]] = block[0].numpy()
    return blocks


def _greedy(draft: np.ndarray, target: np.ndarray) -> np.ndarray:
    """What `generate` does without sampling: the target's tokens up to the first difference."""
    gamma = draft.shape[1]
    matches = (draft == target[:, :gamma]).cumprod(axis=1).sum(axis=1)
    return np.where(np.arange(gamma + 1) <= matches[:, None], target, -1)
