"""What the tests of decoding share: a model without a cache, prompts, sources of drafts."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import SamplingParams
from jspec.ops.attention import causal

LENGTHS = (50, 1, 17, 2, 33, 9, 3, 24)
NEW = (40, 40, 5, 33, 1, 12, 40, 2)
DRAFT_LIMITS = (None, 3, 0, None, 2, 1, 8, None)


def prompts(lengths=LENGTHS, vocabulary: int = 41, seed: int = 0) -> list[list[int]]:
    """Random prompts, half of each a repetition of its own first half, so that lookups hit."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocabulary, length) for length in lengths]
    return [np.resize(text[: (len(text) + 1) // 2], len(text)).tolist() for text in texts]


def requests(**settings) -> list[SamplingParams]:
    """Eight requests with limits and draft limits of their own."""
    return [
        SamplingParams(max_new_tokens=new, draft_limit=limit, seed=100 + row, **settings)
        for row, (new, limit) in enumerate(zip(NEW, DRAFT_LIMITS, strict=True))
    ]


@jax.jit
def full_logits(model, tokens):
    """Logits after every prefix of ``tokens [B, T]``, in one causal pass without a cache."""

    def attend(layer, q, k, v, cache):
        return causal(q, k, v), cache

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, attend, None)
    return model.logits(hidden)
