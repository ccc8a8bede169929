"""Log-probabilities on a mesh are those of one device, and no logits are gathered."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import helix
from jspec.decode import score as scoring
from jspec.models.decoder import Decoder
from tests.decode.common import prompts
from tests.helix.test_decoding import CONFIG, gathered
from tests.models.goldens import GOLDEN

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
LENGTHS = (128, 1, 33)  # two chunks of 64 that wrap rings of 80, none at all, a part of a chunk


def gqa() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def golden(name: str) -> Callable[[], Decoder]:
    return lambda: jspec.load_model(GOLDEN / name)


def watched(monkeypatch) -> list[str]:
    """The compiled programs of the chunks to come."""
    programs, right = [], scoring._score_chunk

    def chunk(*args: Any) -> Any:
        programs.append(str(right.lower(*args).compile().as_text()))
        return right(*args)

    monkeypatch.setattr(scoring, "_score_chunk", chunk)
    return programs


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        pytest.param(gqa, {"kvp": 2, "tpa": 2}, id="gqa"),
        pytest.param(
            golden("deepseek_v3"), {"kvp": 4, "ep": 2}, id="latent", marks=pytest.mark.slow
        ),
        pytest.param(gqa, {"kvp": 4, "tpa": 2, "overlap": 2}, id="eight", marks=pytest.mark.slow),
        # Sinks and biases, each once: tokens alone do not tell.
        pytest.param(
            golden("gpt_oss"),
            {"kvp": 2, "tpa": 2, "ep": 4},
            id="sinks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(golden("gemma2"), {"kvp": 2, "tpa": 2}, id="caps", marks=pytest.mark.slow),
        pytest.param(golden("gemma3"), {"kvp": 4}, id="windows", marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_are_those_of_one_device(make, axes, monkeypatch):
    model = make()
    sharded = helix.shard(model, helix.HelixConfig(block=4, **axes))
    assert sharded.vocabulary_axes == sharded.helix.axes
    size = model.config.vocab_size
    texts = prompts(LENGTHS, vocabulary=size)
    right = jspec.score_tokens(model, texts)
    programs = watched(monkeypatch)
    result = jspec.score_tokens(sharded, texts)
    for ours, theirs in zip(result, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert len(programs) == 2
    share = size // sharded.helix.devices
    for program in programs:
        assert max(gathered(program), default=0) < share
        # What is summed is as wide as hidden states at most, not as the vocabulary.
        sums = gathered(program, "all-reduce")
        widest = max(share, model.config.hidden_size + 1)
        assert 0 < max(sums) < len(texts) * scoring.CHUNK * widest


@functools.cache
def scored(name: str) -> tuple[Decoder, list[list[int]], list[np.ndarray]]:
    """A family's checkpoint, texts, and their log-probabilities on one device."""
    model = golden(name)()
    texts = prompts((33, 1, 14), vocabulary=model.config.vocab_size)
    return model, texts, jspec.score_tokens(model, texts)


MESHES = ({"tpa": 2}, {"kvp": 2}, {"kvp": 2, "tpa": 2}, {"kvp": 4}, {"kvp": 2, "overlap": 2})
FAMILIES = {
    "gpt_oss": (*MESHES, {"kvp": 2, "ep": 2}, {"kvp": 4, "ep": 4}),  # sinks, windows, experts
    "gemma3": MESHES,  # windows
    "gemma2": MESHES,  # windows and caps
    "qwen3_moe": (*MESHES, {"kvp": 2, "tpa": 2, "ep": 2}, {"tpa": 2, "ep": 2}),
    # Latents are one key-value head.
    "deepseek_v2": ({"kvp": 2}, {"kvp": 4, "ep": 2}, {"kvp": 4, "up_projection": "before"}),
    "deepseek_v3": ({"kvp": 2, "ep": 2}, {"kvp": 4}, {"kvp": 4, "up_projection": "after"}),
}
FIRST_OF_FAMILIES = (("gemma3", {"kvp": 4}), ("deepseek_v3", {"kvp": 2, "ep": 2}))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(
            *(name, axes),
            id="-".join([name, *(f"{axis}={size}" for axis, size in axes.items())]),
            marks=pytest.mark.exhaustive if (name, axes) in FIRST_OF_FAMILIES else pytest.mark.slow,
        )
        for name, meshes in FAMILIES.items()
        for axes in meshes
    ],
)
def test_a_family_has_the_log_probabilities_of_one_device(name, axes, monkeypatch):
    """In passes of 4 tokens, as those of a verification, that wrap windows of 9."""
    model, texts, right = scored(name)
    monkeypatch.setattr(scoring, "CHUNK", 4)
    result = jspec.score_tokens(helix.shard(model, helix.HelixConfig(block=4, **axes)), texts)
    for ours, theirs in zip(result, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_the_likeliest_tokens_are_those_of_one_device():
    model, texts = gqa(), prompts((9, 5))
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, tpa=2, block=4))
    ours, theirs = (scoring.score_top_tokens(m, texts, 40) for m in (sharded, model))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.top_tokens, other.top_tokens)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_is_whole(tiny):
    """41 tokens on two devices."""
    texts = prompts((20, 5))
    result = jspec.score_tokens(helix.shard(tiny, helix.HelixConfig(kvp=2, block=4)), texts)
    for ours, theirs in zip(result, jspec.score_tokens(tiny, texts), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_what_a_text_exceeds_is_said(tiny):
    with pytest.raises(ValueError, match=r"prompt 0: .* exceeds the context of 512"):
        jspec.score_tokens(helix.shard(tiny, helix.HelixConfig(kvp=2)), [[1] * 513])
