"""What the tests of decoding share: a model without a cache, prompts, drafters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, ModelDraft, NgramDraft, NoDraft, SelfDraft
from jspec.decode.options import ResolvedOptions
from jspec.ops.attention.dense import causal
from jspec.policies import Dense, Streaming
from jspec.typing import Model

LENGTHS = (50, 1, 17, 2, 33, 9, 3, 24)
NEW = (40, 40, 5, 33, 1, 12, 40, 2)
DRAFT_LIMITS = (None, 3, 0, None, 2, 1, 8, None)

# Settings of sampling of eight requests.
MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
    {},
]

STREAMING = SelfDraft(Streaming(sinks=2, window=6))
NGRAM = NgramDraft(min_match=1, max_match=4)
DRAFTERS: dict[str, Drafter] = {
    "streaming": STREAMING,  # drafts in a copy
    "dense": SelfDraft(Dense()),  # drafts in the target's cache
    "ngram": NGRAM,
    "model": ModelDraft(),
    "plain": NoDraft(),
}


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


def options_of(model: Model, **settings: Any) -> ResolvedOptions:
    """Resolved options of ``settings``, which are those of `jspec.generate`."""
    return ResolvedOptions.of(model, {"draft": None, **settings})


@jax.jit
def full_logits(model, tokens):
    """Logits after every prefix of ``tokens [B, T]``, in one causal pass without a cache."""

    def attend(layer, q, k, v, cache):
        return causal(q, k, v), cache

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, attend, None)
    return model.logits(hidden)
