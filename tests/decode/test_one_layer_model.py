"""A Flax model of the user's own, with every drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jspec.config import LayerSpec, SamplingParams
from jspec.decode.generation import generate
from tests.decode.common import DRAFTERS, full_logits, prompts
from tests.parameters import default_run

TWELVE = SamplingParams(max_new_tokens=12)


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that a model's config must tell."""

    vocab_size: int = 13
    layers: tuple[LayerSpec, ...] = (LayerSpec(kv_heads=1, key_size=8, value_size=8),)
    max_context: int = 64
    stop_tokens: tuple[int, ...] = ()


class OneLayer(nnx.Module):
    """Plain Flax layers around ``attend``; the dropout's random state is the first leaf."""

    dtype = jnp.float32

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.config = Shape()
        self.a_dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.embed = nnx.Embed(13, 8, rngs=rngs)
        self.places = nnx.Embed(64, 8, rngs=rngs)
        self.qkv = nnx.Linear(8, 24, rngs=rngs)
        self.head = nnx.Linear(8, 13, rngs=rngs)

    def __call__(self, tokens, positions, attend, cache):
        x = self.embed(tokens) + self.places(positions)
        q, k, v = jnp.split(self.qkv(self.a_dropout(x))[:, :, None], 3, axis=-1)
        out, cache = attend(0, q, k, v, cache)
        return x + out[:, :, 0], cache

    def logits(self, hidden):
        return 8 * self.head(hidden)


@pytest.mark.parametrize("source", default_run(list(DRAFTERS), "plain", "streaming"))
def test_a_flax_model_of_the_user(source):
    model = OneLayer(0)
    assert not jnp.issubdtype(jax.tree.leaves(model)[0].dtype, jnp.floating)
    second = OneLayer(1) if source == "model" else None
    texts = prompts((9, 1, 4), vocabulary=13)
    got = generate(model, texts, TWELVE, draft=DRAFTERS[source], draft_model=second)
    for text, tokens in zip(texts, got.tokens, strict=True):
        logits = full_logits(model, jnp.asarray([[*text, *tokens]]))
        choice = jnp.argmax(logits, axis=-1)[0, len(text) - 1 : -1]
        assert choice.tolist() == list(tokens)
