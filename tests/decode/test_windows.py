"""A model whose layers differ: rings for windows, soft caps, and the tokens of a whole pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, RingLayout
from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft, NgramDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.step import speculative_step
from jspec.ops.attention.dense import attention
from jspec.policies import Streaming
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts, requests
from tests.parameters import default_run
from tests.policies.common import NormTopK

WINDOWS = (5, None, 1)
SPECS = tuple(
    dataclasses.replace(TINY.layers[0], window=window, softcap=cap, scale=scale)
    for window, cap, scale in zip(WINDOWS, (None, 3.0, None), (None, None, 0.4), strict=True)
)
CONFIG = dataclasses.replace(TINY, layers=SPECS)
DRAFTS = {
    "ngram": NgramDraft(min_match=1, max_match=4),
    "streaming": SelfDraft(Streaming(sinks=2, window=6)),
    "norms": SelfDraft(NormTopK()),
    "model": ModelDraft(),
}


@pytest.fixture(scope="module")
def layered():
    """Its text mostly follows from the last tokens, so that drafts are accepted and rejected."""
    return make_decoder(CONFIG, seed=4, embedding=30.0, head=4.0)


@jax.jit
def full_logits(model, tokens):
    """Logits after every prefix in one pass without a cache, each layer as its spec says."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(layer, q, k, v, cache, **_):
        spec = SPECS[layer]
        settings = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
        return attention(q, k, v, positions, implementation="xla", **settings)[0], cache

    return model.logits(model(tokens, positions, attend, None)[0])


@pytest.fixture(scope="module")
def plain(layered):
    return generate(layered, prompts(), requests(), draft=None, prefill_chunk=16)


def test_plain_decoding_follows_the_argmax_of_a_full_pass(plain, layered):
    """Prefill in chunks of 16 overwrites rings of 6 and 2 slots many times over."""
    for prompt, tokens in zip(prompts(), plain.tokens, strict=True):
        text = np.zeros((1, 96), np.int32)
        text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
        choice = np.asarray(jnp.argmax(full_logits(layered, jnp.asarray(text)), axis=-1))[0]
        assert choice[len(prompt) - 1 :][: len(tokens)].tolist() == list(tokens)


@pytest.mark.parametrize(
    ("name", "chunk"),
    default_run([("ngram", 7), ("streaming", 64), ("norms", 3), ("model", 64)], "ngram-7"),
)
def test_drafted_tokens_are_the_plain_ones(name, chunk, plain, layered):
    """Prefill by 7 is the least that overwrites, in the ring of 10 slots, what its queries read."""
    second = layered if name == "model" else None
    got = generate(
        layered,
        prompts(),
        requests(),
        draft=DRAFTS[name],
        draft_model=second,
        gamma=4,
        prefill_chunk=chunk,
    )
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.1


def test_layers_with_a_window_keep_no_more_than_they_need(layered):
    config = StepConfig(4, DRAFTS["ngram"])
    state = start_decoding(layered, prompts(), requests(), config, capacity=128)
    assert state.cache.layouts == (RingLayout(10), LinearLayout(128), RingLayout(6))
    assert [state.cache.keys(layer).shape[1] for layer in range(3)] == [10, 128, 6]


def test_a_step_with_a_longer_draft_is_refused(layered):
    params = SamplingParams(max_new_tokens=9)
    state = start_decoding(layered, [[1]], params, StepConfig(2, DRAFTS["ngram"]), capacity=64)
    with pytest.raises(ValueError, match=r"gamma=3 does not fit a cache .* made for gamma=2"):
        speculative_step(layered, state, StepConfig(3, DRAFTS["ngram"]))
