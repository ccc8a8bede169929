"""What the built-in logits processors do, written from their documentation in float64 numpy."""

from collections.abc import Callable, Sequence

import numpy as np

from jspec.config import SamplingParams

Change = Callable[[np.ndarray, Sequence[int]], np.ndarray]  # of logits [V], by the tokens so far


def processed(
    logits: np.ndarray,
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    ends: Sequence[int] = (),
) -> np.ndarray:
    """``logits [V]`` of the token after ``answer``, token by token; ``ends``: the model's."""
    changed = np.array(logits, np.float64)
    for token, bias in dict(params.logit_bias).items():
        changed[token] += bias
    for token in params.banned_tokens:
        changed[token] = -np.inf
    if len(answer) < params.min_new_tokens:
        changed[[*params.stop_tokens, *ends]] = -np.inf
    for token in {*prompt, *answer}:
        x, penalty = changed[token], params.repetition_penalty
        changed[token] = x / penalty if x > 0 else x * penalty
    for token in answer:
        changed[token] -= params.frequency_penalty
    for token in set(answer):
        changed[token] -= params.presence_penalty
    return changed
