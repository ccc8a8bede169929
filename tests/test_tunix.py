"""The rollout engine for Tunix, against Tunix's own sampler."""

import dataclasses
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="Tunix is not installed: pip install '.[tunix]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Tunix imports what JAX calls deprecated
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from jspec.tunix import Rollout

from jspec.decode.draft import NgramDraft

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _promotes():
    """Dtypes and ranks are promoted, as Tunix needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


SIZES = {
    "num_layers": 1,
    "vocab_size": 41,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 1_000_000,
    "norm_eps": 1e-5,
}
MODELS = {
    "llama": lambda seed: made(llama3.Llama3, llama3, seed),
    "llama-tied": lambda seed: made(llama3.Llama3, llama3, seed, weight_tying=True),
    "qwen2": lambda seed: made(qwen2.Qwen2, qwen2, seed, use_tied_embedding=True, rope_theta=500),
    "qwen3": lambda seed: made(qwen3.Qwen3, qwen3, seed),
}
PROMPTS = ["hello", "x", "abcabcabcabcab", "hello", "y" * 12]
GREEDY = RolloutConfig(
    max_tokens_to_generate=24,
    temperature=0.0,
    top_p=None,
    max_prompt_length=16,
    kv_cache_size=64,
    return_logprobs=True,
)


class Letters:
    """A tokenizer of letters, with a first token, an end and padding."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 38 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def made(kind, module, seed: int, **settings) -> nnx.Module:
    """A model with random weights, biases and norms included, whose greedy texts have no padding.

    The sampler would not attend to it.
    """
    model = kind(module.ModelConfig(**SIZES | settings), rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    noise = jax.tree.map(lambda x: jnp.float32(0.1 * rng.standard_normal(x.shape)), state)
    nnx.update(model, jax.tree.map(jnp.add, state, noise))
    # Small ones, else a tied one repeats the last token.
    model.embedder.input_embedding[...] = 0.1 * model.embedder.input_embedding[...].at[0].set(0)
    if hasattr(model, "lm_head"):
        model.lm_head.w[...] = model.lm_head.w[...].at[:, 0].set(0)
    return model


def vanilla(model: nnx.Module) -> VanillaRollout:
    return VanillaRollout(model, Letters(), CacheConfig(64, 1, 2, 16))


def check_same(ours, theirs) -> None:
    assert ours.text == theirs.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for one, other in zip(ours.tokens, theirs.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_sampler_also_after_updates(name):
    """With drafts, in fewer slots than prompts; new weights compile nothing."""
    model, other = MODELS[name](0), MODELS[name](1)
    rollout = Rollout(model, Letters(), GREEDY, slots=2, draft=NgramDraft(), gamma=3)
    first = vanilla(model).generate(PROMPTS, GREEDY)
    check_same(rollout.generate(PROMPTS, GREEDY), first)
    compilations = rollout.engine.stats.compilations
    after = vanilla(other).generate(PROMPTS, GREEDY)
    assert after.text != first.text
    for params, expected in ((nnx.state(other, nnx.Param), after), (nnx.state(model), first)):
        rollout.update_params(params, (nnx.Param,))
        check_same(rollout.generate(PROMPTS, GREEDY), expected)
    assert rollout.engine.stats.compilations == compilations


def test_an_end_is_no_token_of_an_answer():
    model = MODELS["qwen3"](0)
    rollout, sampler = Rollout(model, Letters(), GREEDY, draft=None), vanilla(model)
    text = rollout.generate(PROMPTS, GREEDY).tokens[2].tolist()
    config = dataclasses.replace(GREEDY, eos_tokens=[text[5], text[9]])
    ours = rollout.generate(PROMPTS, config)
    check_same(ours, sampler.generate(PROMPTS, config))
    assert len(ours.tokens[2]) <= 5


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probabilities_of_padded_texts_are_those_of_the_sampler(name):
    model, rng = MODELS[name](0), np.random.default_rng(0)
    rollout, sampler = Rollout(model, Letters(), GREEDY, draft=None), vanilla(model)
    prompts, answers = rng.integers(3, 41, (2, 4, 12)).astype(np.int32)
    for row, (start, end) in enumerate(((0, 12), (5, 7), (11, 1), (3, 12))):
        prompts[row, :start], answers[row, end:] = 0, 0
    answers[3, 8:10] = 2, 7  # what follows the end of a text counts as nothing
    ours = np.asarray(rollout.get_per_token_logps(jnp.array(prompts), jnp.array(answers)))
    theirs = np.asarray(sampler.get_per_token_logps(jnp.array(prompts), jnp.array(answers)))
    counts = (12, 7, 1, 9)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(ours[row, :count], theirs[row, :count], atol=2e-4)
        assert not ours[row, count:].any()


def test_sampled_answers_have_a_seed_and_what_they_were_drawn_from():
    model = MODELS["qwen2"](0)
    rollout = Rollout(model, Letters(), GREEDY, slots=3, draft=NgramDraft(), gamma=3)
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    config = dataclasses.replace(GREEDY, **sampled, seed=jax.random.PRNGKey(3))
    one, same = (rollout.generate(PROMPTS, config) for _ in range(2))
    fresh = rollout.generate(PROMPTS, dataclasses.replace(config, seed=None))
    assert one.text == same.text != fresh.text
    assert one.text[0] != one.text[3]  # two answers to one prompt
    width = max(map(len, one.tokens))
    answers = np.array([np.pad(x, (0, width - len(x))) for x in one.tokens])
    scores = rollout.get_per_token_logps(one.left_padded_prompt_tokens, answers)
    for score, logprobs in zip(np.asarray(scores), one.logprobs, strict=True):
        np.testing.assert_allclose(score[: len(logprobs)], logprobs, atol=2e-5)
    bare = dataclasses.replace(config, return_logprobs=False)
    assert rollout.generate(PROMPTS, bare).logprobs is None


def test_what_it_does_not_serve_is_refused():
    model = MODELS["llama"](0)
    with pytest.raises(ValueError, match="mesh of rollouts has 2 devices"):
        Rollout(model, Letters(), GREEDY, SimpleNamespace(size=2))
    with pytest.raises(ValueError, match="Linear is none of Tunix's Llama3, Qwen2"):
        Rollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Letters(), GREEDY)
    rollout = Rollout(model, Letters(), GREEDY, draft=None)
    with pytest.raises(ValueError, match=r"w_lora_a.*an adapter"):
        rollout.update_params({"layers": {0: {"w_lora_a": jnp.zeros(2)}}})
    with pytest.raises(ValueError, match="exceeds capacity=64"):
        rollout.generate(["a" * 50], GREEDY)
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (0, 2, model)
