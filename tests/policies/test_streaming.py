"""Sinks and a recent window, at positions of the text and of the window, from the definitions."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, LinearLayout
from jspec.config import LayerSpec, SamplingParams
from jspec.decode.draft import SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import PLAIN
from jspec.parts import Rope, RopeScaling
from jspec.policies import Streaming
from jspec.policies.attend import run_selected
from jspec.policies.compact import Compact, CompactAttend
from jspec.policies.prepare import prepare_params
from jspec.typing import Attend
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts

CAPACITY = 20
SPEC = LayerSpec(kv_heads=1, key_size=2, value_size=2)


@pytest.mark.parametrize(
    ("sinks", "window"),
    [(0, 1), (2, 3), (4, 30), (30, 2), (10, 10), (0, 20), (1, 0.3), (4, 0.01), (0, 1.0)],
    ids=str,
)
def test_it_selects_each_sink_and_each_recent_position_once(sinks, window):
    cache = Cache.create([SPEC], [LinearLayout(CAPACITY)], 4, jnp.float32)
    lengths, policy = [20, 11, 3, 0], Streaming(sinks, window)
    context_len = jnp.asarray(lengths, jnp.int32)
    select = jax.jit(lambda cache, context_len: policy.select(None, 0, cache, None, context_len))
    selected = np.asarray(select(cache, context_len).positions)
    assert selected.dtype == np.int32
    for row, length in enumerate(lengths):
        last = window
        if isinstance(window, float):
            last = max(math.ceil(np.float32(window) * np.float32(length)) - sinks, 1)
        expected = {*range(min(sinks, length)), *range(max(length - int(last), 0), length)}
        assert sorted(p for p in selected[row].tolist() if p >= 0) == sorted(expected)


def test_a_ratio_reads_the_last_position_of_a_full_cache():
    """0.15 of 100 is 15 in float64 and a little more in float32."""
    spec = LayerSpec(kv_heads=1, key_size=4, value_size=4)
    cache = Cache.create([spec], [LinearLayout(100)], 1, jnp.float32)
    chosen = (
        Streaming(sinks=4, window=0.15).select(None, 0, cache, None, jnp.array([100])).positions
    )
    assert chosen is not None
    assert sorted(np.asarray(chosen)[0].tolist()) == [0, 1, 2, 3, *range(88, 100)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"positions": "new"}, "positions='new' must be one of original, window"),
        ({"window": 1.5}, r"window=1.5 must be a ratio in \(0, 1\]"),
    ],
    ids=["sinks", "window", "positions", "ratio"],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Streaming(**settings)


@pytest.fixture(scope="module")
def families():
    """A decoder with a layer of each kind of rope, whose text depends on what attention reads."""
    scalings = [
        None,
        RopeScaling("linear", 3.0),
        RopeScaling("llama3", 8.0, original_context=16),
        RopeScaling("yarn", 4.0, original_context=16),
    ]
    layers = [dataclasses.replace(TINY.layers[0], rope=index) for index in range(4)]
    ropes = tuple(Rope(100.0, scaling) for scaling in scalings)
    config = dataclasses.replace(TINY, layers=tuple(layers), ropes=ropes)
    return make_decoder(config, seed=3, head=8.0)


def paper(model, prompt, new: int, sinks: int, window: int) -> list[int]:
    """Greedy decoding from section 3.2: keys are kept as they are before rotation, and the new
    token rotates those that are left, and itself, by their places in the cache."""
    layers = model.config.layers
    unrotated, values, text = [[] for _ in layers], [[] for _ in layers], list(prompt)
    places = jnp.arange(len(prompt) + new)[None]
    rotations = []
    for layer in layers:
        cosine, sine = model.angles(places, layer)
        rotations.append((np.float64(cosine) + 1j * np.float64(sine))[0])

    def rotated(layer, x, places):
        half = x.shape[-1] // 2
        y = (x[..., :half] + 1j * x[..., half:]) * rotations[layer][np.asarray(places)]
        return np.concatenate([y.real, y.imag], axis=-1)

    def attended(layer, q, k, v, cache, *, qk_rope):
        unrotated[layer].append(np.float64(k[0, 0]))
        values[layer].append(np.float64(v[0, 0]))
        visible = range(len(unrotated[layer]))
        if len(visible) >= len(prompt):
            visible = [*visible[:-1][:sinks], *visible[sinks:-1][-window:], visible[-1]]
        keys = rotated(layer, np.array([unrotated[layer][p] for p in visible]), range(len(visible)))
        query = rotated(layer, np.float64(q[0]), [len(visible) - 1])[0]
        out = np.zeros(query.shape)
        for head in range(4):
            scores = keys[:, head // 2] @ query[head] / 4
            weights = np.exp(scores - scores.max())
            read = np.array([values[layer][p][head // 2] for p in visible])
            out[head] = weights / weights.sum() @ read
        return jnp.asarray(out[None, None], jnp.float32), cache

    class Paper(Attend):
        accepts_qk_rope = True

        def __call__(self, *arguments, **settings):
            return attended(*arguments, **settings)

    # A token at a time: passes of one shape.
    for at in range(len(prompt) + new - 1):
        position = jnp.full((1, 1), at, jnp.int32)
        hidden, _ = model(jnp.full((1, 1), text[at], jnp.int32), position, Paper(), None)
        if at + 1 == len(text):
            text.append(int(model.logits(hidden)[0, 0].argmax()))
    return text[len(prompt) :]


POLICY = Streaming(sinks=3, window=9, positions="window")
PARAMS = SamplingParams(max_new_tokens=5)


@pytest.fixture(scope="module")
def texts():
    """One with much between sinks and window, and one in which they overlap at first."""
    return prompts((40, 10), seed=5)


@pytest.fixture(scope="module")
def plain(families, texts):
    return generate(families, texts, PARAMS, draft=None)


def test_positions_inside_the_window_are_those_of_the_paper(families, texts, plain):
    expected = [tuple(paper(families, text, 5, 3, 9)) for text in texts]
    got = generate(families, texts, PARAMS, draft=None, target=POLICY)
    assert list(got.tokens) == expected
    assert expected[0] != plain.tokens[0], "the case is too easy"


@pytest.mark.exhaustive
def test_a_draft_reads_what_the_model_itself_would_and_stays_lossless(families, texts, plain):
    state = start_decoding(families, texts, PARAMS, PLAIN)
    policy_params = prepare_params(POLICY, families)
    positions = state.cache.lengths[:, None]

    @jax.jit
    def both(state):
        tokens, context_len = state.last_token[:, None], state.cache.lengths
        compact = Compact.of(state.cache, POLICY, policy_params, spare=1)
        got, _ = families(tokens, positions, CompactAttend(positions, jnp.int32(1)), compact)
        expected, *_ = run_selected(
            *(families, tokens, positions, state.cache, context_len, 1),
            policy=POLICY,
            policy_params=policy_params,
        )
        return got, expected

    got, expected = both(state)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert generate(families, texts, PARAMS, draft=SelfDraft(POLICY)).tokens == plain.tokens


def test_a_model_without_ropes_is_refused():
    class NoAngles:
        config = types.SimpleNamespace(layers=[SPEC])

    with pytest.raises(ValueError, match=r"config\.ropes .* which NoAngles does not; use"):
        prepare_params(Streaming(positions="window"), NoAngles())
