"""Arguments of another kind than asked for: one line with the value and the way out."""

import dataclasses
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.config import LayerSpec, SamplingParams
from jspec.decode.checks import as_ids, check_requests, one_each
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.prefill_pass import prefill_chunk
from jspec.decode.settings import StepConfig
from tests.conftest import TINY
from tests.decode.common import NGRAM

ONE = [[1, 2]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A config by hand, of which a test leaves something out."""

    vocab_size: object = 41
    layers: object = TINY.layers
    max_context: object = 64
    stop_tokens: object = ()


@jax.tree_util.register_static
class Handmade:
    """A model by name alone: nothing is computed before it is refused."""

    dtype = jnp.float32

    def __init__(self, config):
        self.config = config

    def __call__(self, tokens, positions, attend, cache):
        raise AssertionError("a refused model was called")

    logits = __call__


@jax.tree_util.register_static
class Traced(Handmade):
    """A model whose trace is right, so that other checks refuse it."""

    def __call__(self, tokens, positions, attend, cache):
        for layer, spec in enumerate(self.config.layers):
            x = jnp.zeros((*tokens.shape, spec.kv_heads, spec.key_size), self.dtype)
            _, cache = attend(layer, x, x, x[..., : spec.value_size], cache)
        return jnp.zeros((*tokens.shape, 1)), cache

    def logits(self, hidden):
        return jnp.zeros((*hidden.shape[:2], self.config.vocab_size))


class Unregistered(Handmade):
    """A class of one's own that JAX knows nothing of."""


def without(name: str):
    """A config that has all but one of what jspec reads."""
    members = {field.name: field.default for field in dataclasses.fields(Shape)}
    del members[name]
    return type("HandmadeConfig", (), members)()


PROMPTS = [
    ("def f():", "prompts='def f():' must be a list of prompts, each the token ids of one"),
    (b"def f():", "prompts=b'def f():' must be a list of prompts"),
    (7, "prompts=7 must be a list of prompts"),
    (["def f():"], "prompt 0 is text, 'def f():'; pass tokenizer.encode(text)"),
    ([[1], b"f"], "prompt 1 is text, b'f'; pass tokenizer.encode(text)"),
    ([1, 2, 3], "prompt 0 is 1; each must be a list of token ids: [[1, 2]] is one"),
    (np.arange(3), "prompt 0 is np.int64(0); each must be a list of token ids"),
    ([None], "prompt 0 is None; each must be a list of token ids"),
    ([{1, 2}], "prompt 0 is {1, 2}; each must be a list of token ids"),
    (np.array(3), "prompts=array(3) must be a list of prompts"),
    ([np.array(3)], "prompt 0 is array(3); each must be a list of token ids"),
    ([[1], [1, 2.0]], "prompt 1 holds 2.0, which is no token id"),
    ([[True]], "prompt 0 holds True, which is no token id"),
    ([["1"]], "prompt 0 holds '1', which is no token id"),
    ([[[1, 2]]], "prompt 0 holds [1, 2], which is no token id"),
    ([np.array([1.0])], "prompt 0 is an array of float64; it must hold integers"),
    ([np.array([True])], "prompt 0 is an array of bool; it must hold integers"),
    ([jnp.array([1.0])], "prompt 0 is an array of float32; it must hold integers"),
]


@pytest.mark.parametrize(("prompts", "message"), PROMPTS, ids=[m[:40] for _, m in PROMPTS])
def test_prompts_that_are_no_ids_are_refused(prompts, message, tiny):
    for start in (generate, start_decoding):
        with pytest.raises(TypeError, match=re.escape(message)) as caught:
            start(tiny, prompts)
        assert "\n" not in str(caught.value)


def test_an_id_of_hundreds_of_digits_is_refused(tiny):
    with pytest.raises(ValueError, match="prompt 1 holds a token id of more than 63 bits"):
        generate(tiny, [[1], [10**400]])


def test_ids_may_be_arrays():
    for prompts in (
        [[1, 2], (3,)],
        [np.array([1, 2], np.uint8), np.array([3])],
        [jnp.array([1, 2]), [np.int32(3)]],
        (iter([1, 2]), range(3, 4)),
    ):
        assert [ids.tolist() for ids in as_ids(prompts)] == [[1, 2], [3]]
    assert [ids.tolist() for ids in as_ids(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]


OTHERS = [
    (
        {"params": {"top_k": 3}},
        TypeError,
        "params={'top_k': 3} must be a SamplingParams, or a list",
    ),
    ({"params": [None]}, TypeError, "params hold None, which is no SamplingParams"),
    ({"params": 0.7}, TypeError, "params=0.7 must be a SamplingParams, or a list of one each"),
    ({"params": []}, ValueError, "got 1 prompts but 0 sampling params; pass one or each"),
    ({"draft": "ngram"}, TypeError, "draft='ngram' is a string; pass jspec.named_draft('ngram')"),
    ({"draft": jspec.NgramDraft}, TypeError, "draft=NgramDraft is a class; pass one of it, NgramD"),
    (
        {"draft": jspec.policies.Dense()},
        TypeError,
        "draft=Dense() is a policy; pass SelfDraft(Dense())",
    ),
    ({"draft": 3}, TypeError, "draft=3 must be a drafter, as NgramDraft() is"),
    ({"gamma": 2.0}, TypeError, "gamma=2.0 must be a whole number"),
    ({"gamma": "4"}, TypeError, "gamma='4' must be a whole number or 'auto'"),
    ({"gamma": True}, TypeError, "gamma=True must be a whole number"),
    ({"backends": "cuda"}, TypeError, "backends='cuda' must name backends of operations, as in {"),
    (
        {"steps_per_chunk": 2.5},
        ValueError,
        "steps_per_chunk=2.5 must be a whole number, at least 1",
    ),
    ({"prefill_chunk": 2.5}, ValueError, "a prefill chunk of 2.5 tokens must be at least 1"),
    ({"cache_dtype": "int8"}, ValueError, "a cache of 'int8' must be of float32, bfloat16,"),
    ({"cache_dtype": "fast"}, ValueError, "a cache of 'fast' must be of float32, bfloat16,"),
    ({"cache_dtype": jnp.float8_e5m2}, ValueError, "bfloat16, float16 or float8_e4m3fn"),
    ({"cache_dtype": np.float64}, ValueError, "bfloat16, float16 or float8_e4m3fn"),
    (
        {"draft_model": "a/path"},
        TypeError,
        "draft_model='a/path' is a path; pass jspec.load_model(",
    ),
]


@pytest.mark.parametrize(
    ("settings", "kind", "message"), OTHERS, ids=[message[:40] for *_, message in OTHERS]
)
def test_settings_of_another_kind_are_refused(settings, kind, message, tiny):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        generate(tiny, ONE, **{"draft": NGRAM} | settings)
    assert "\n" not in str(caught.value)


def test_a_step_takes_numpys_whole_numbers():
    assert StepConfig(np.int64(3), NGRAM) == StepConfig(3, NGRAM)
    assert type(StepConfig(np.int64(3), NGRAM).gamma) is int


MODELS = [
    ("bundled_model", TypeError, "model='bundled_model' is a path; pass jspec.load_model(path)"),
    (Handmade, TypeError, "model=Handmade is a class; pass a model that was made of it"),
    ((1, 2), TypeError, "model of type tuple lacks config, dtype, logits, __call__; it must have"),
    (Handmade(None), TypeError, "model.config of type NoneType lacks vocab_size, layers, max_cont"),
    *(
        (Handmade(without(name)), TypeError, f"model.config of type HandmadeConfig lacks {name}; i")
        for name in ("vocab_size", "layers", "max_context", "stop_tokens")
    ),
    (Unregistered(Shape()), TypeError, "model of type Unregistered is no pytree; make it a flax"),
    (Handmade(Shape(max_context=None)), ValueError, "model.config: max_context=None must be a pos"),
    (Handmade(Shape(vocab_size=0)), ValueError, "model.config: vocab_size=0 must be a positive in"),
    (Handmade(Shape(layers=2)), ValueError, "model.config: layers=2 must be a LayerSpec for each"),
    (Handmade(Shape(layers=(2,))), ValueError, "model.config: layers=(2,) must be a LayerSpec for"),
    (Handmade(Shape(stop_tokens=2)), ValueError, "model.config: stop_tokens=2 must be token ids"),
]


@pytest.mark.parametrize(
    ("model", "kind", "message"), MODELS, ids=[message[:50] for *_, message in MODELS]
)
def test_what_is_no_model_is_refused(model, kind, message, tiny):
    for start in (generate, start_decoding):
        with pytest.raises(kind, match=re.escape(message)) as caught:
            start(model, ONE)
        assert "\n" not in str(caught.value)
    draft = {"draft": jspec.ModelDraft(), "draft_model": model}
    with pytest.raises(kind, match=re.escape("draft_" + message)):
        generate(tiny, ONE, **draft)


def test_a_config_may_keep_its_layers_in_a_list(tiny):
    """What the contract asks for is a sequence."""
    spec = LayerSpec(kv_heads=2, key_size=16, value_size=16)
    with pytest.raises(ValueError, match="prompt 0: the prompt is empty"):
        start_decoding(Traced(Shape(layers=[spec])), [[]], SamplingParams())


def skip(function, *args, **static):
    """In the place of the prefill, whose program nothing here needs."""
    if function is not prefill_chunk:
        return function(*args, **static)
    _, cache, rows_state, *_ = args
    return cache, rows_state, None


def test_the_context_takes_as_many_tokens_as_it_says(tiny):
    """The longest request that fits is taken, one token more is not: of prompt or of output."""
    context = TINY.max_context
    fits = SamplingParams(max_new_tokens=12)
    state = start_decoding(tiny, [[1] * (context - 12)], fits, run=skip)
    assert state.limits.tolist() == [context]
    for length, new in ((context - 11, 12), (context - 12, 13)):
        params = SamplingParams(max_new_tokens=new)
        with pytest.raises(ValueError, match=f"exceeds the context of {context}"):
            start_decoding(tiny, [[1] * length], params)


def test_the_context_of_a_draft_model_takes_as_many_too(tiny):
    models = jspec.Models(tiny, Traced(Shape(max_context=20)))
    config = StepConfig(2, jspec.ModelDraft())
    start_decoding(models, [[1] * 8], SamplingParams(max_new_tokens=12), config, run=skip)
    with pytest.raises(ValueError, match=r"for the draft model: .* exceeds the context of 20"):
        start_decoding(models, [[1] * 8], SamplingParams(max_new_tokens=13), config)


# --- any request at all ------------------------------------------------------------------------

TOKENS = [0, 1, 40, 41, -1, 2**31, 2**63, 10**5000, True, None, 1.0, math.nan, "1", b"1", [1]]
TOKENS += [np.int8(3), np.uint64(2**63), np.float32(1), np.array([1]), np.array(7), object()]
LISTS = ["def f():", b"f", 7, None, 1.5, object, [], (), np.arange(5), np.zeros((2, 2)), range(9)]
LISTS += [np.array(3), np.array([1.5]), np.array([], int), jnp.arange(3), {1: 2}, {3}, [0] * 600]
PARAMS = [SamplingParams(max_new_tokens=4), None, {}, "greedy", SamplingParams, 4, [None], []]


def any_list(rng: random.Random):
    """What may stand where a prompt should."""
    if rng.random() < 0.3:
        return rng.choice(LISTS)
    valid = [rng.randrange(41) for _ in range(rng.randrange(4))]
    return [*valid, rng.choice(TOKENS)] if rng.random() < 0.4 else valid


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(200_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_any_request_is_served_or_refused_in_one_line(count):
    """What is served are ids of the vocabulary, with settings for each."""
    rng, chosen = random.Random(count), 0
    models = jspec.Models(Handmade(Shape()))
    for _ in range(count):
        prompts = [any_list(rng) for _ in range(rng.randrange(3))]
        if rng.random() < 0.1:
            prompts = rng.choice(LISTS)
        params = PARAMS[0] if rng.random() < 0.7 else rng.choice(PARAMS)
        if rng.random() < 0.2:
            params = [params] * rng.randrange(3)
        try:
            ids = as_ids(prompts)
            rows = one_each(params, len(ids))
            check_requests(models, ids, rows)
        except (TypeError, ValueError) as error:
            message = str(error)
            assert_one_line(message)
            continue
        chosen += 1
        assert len(rows) == len(ids) > 0
        for row in ids:
            assert row.dtype.kind in "iu"
            assert 0 <= row.min() <= row.max() < 41
    assert 0.1 < chosen / count < 0.6


def assert_one_line(message: str) -> None:
    assert message.isprintable()
    assert 0 < len(message) < 250
    # Python's own words would name nothing that the caller passed.
    assert re.search("prompt|params", message)
