"""A decoder whose layers differ, against a forward pass in NumPy, one token and head at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec import Decoder, LayerSpec, ModelConfig, Rope, RopeScaling
from tests.conftest import TINY
from tests.models.helpers import parameters, together

UNEQUAL = ModelConfig(
    vocab_size=13,
    hidden_size=24,
    intermediate_size=20,
    num_heads=4,
    layers=(
        LayerSpec(kv_heads=1, key_size=8, value_size=12),
        LayerSpec(kv_heads=4, key_size=16, value_size=6, rope=1),
        LayerSpec(kv_heads=2, key_size=8, value_size=5, rope=1),
    ),
    ropes=(Rope(100.0), Rope(5000.0, RopeScaling("linear", 4.0))),
    qk_norm=True,
)


def abstract_decoder(config: ModelConfig) -> Decoder:
    """A decoder with shapes for parameters."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def random_decoder(config: ModelConfig) -> Decoder:
    """Random weights, large enough that attention is far from uniform."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        mean, deviation = (0, 2 * leaf.shape[0] ** -0.5) if leaf.ndim > 1 else (1, 0.3)
        return jnp.asarray(mean + deviation * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, abstract_decoder(config))


def causal(layer, q, k, v, cache, *, sinks=None, up=None):
    """Softmax attention over the pass's own tokens; ``cache`` collects what `attend` was given."""
    assert layer == len(cache)
    kv_heads = k.shape[2]
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * q.shape[3] ** -0.5
    observed = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))[None, None, None]
    weights = jax.nn.softmax(jnp.where(observed, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(*q.shape[:3], -1)
    return out, [*cache, (q, k, v)]


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean() + eps) * scale


def rotated(x, position, rope: Rope):
    """Su et al. 2021: channel pairs (i, i + H / 2) as complex numbers, turned by m theta_i."""
    half = len(x) // 2
    step = 1.0 if rope.scaling is None else rope.scaling.factor
    angle = position / step * rope.theta ** (-np.arange(half) / half)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def attention_layer(x, w, spec: LayerSpec, config: ModelConfig):
    rope, eps = config.ropes[spec.rope], config.norm_eps
    shared = config.num_heads // spec.kv_heads
    ends = np.cumsum([shared * spec.key_size, spec.key_size])
    apart = dict(zip("qkv", np.split(w["qkv.kernel"], ends, axis=2), strict=True))

    def heads(name, size, count, normed):
        kernel = apart[name].reshape(x.shape[1], -1)
        rows = [(row @ kernel).reshape(count, size) for row in x]
        if not normed:
            return rows
        scale = w[f"{name}_norm.scale"]
        return [
            [rotated(rms_norm(head, scale, eps), at, rope) for head in row]
            for at, row in enumerate(rows)
        ]

    queries = heads("q", spec.key_size, config.num_heads, True)
    keys = heads("k", spec.key_size, spec.kv_heads, True)
    values = heads("v", spec.value_size, spec.kv_heads, False)
    outputs = []
    for at in range(len(x)):
        row = []
        for head in range(config.num_heads):
            scores = [queries[at][head] @ keys[s][head // shared] for s in range(at + 1)]
            weights = np.exp(np.array(scores) * spec.key_size**-0.5)
            parts = [values[s][head // shared] for s in range(at + 1)]
            row.append((weights / weights.sum()) @ np.array(parts))
        outputs.append(np.concatenate(row) @ w["out.kernel"])
    return np.array(outputs)


def expected_logits(w, config: ModelConfig, tokens):
    x, eps = w["embedding"][tokens], config.norm_eps
    for layer, spec in enumerate(config.layers):
        prefix = f"layers.{layer}."
        layer_weights = {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}
        attention = {k.removeprefix("attention."): v for k, v in layer_weights.items()}
        y = np.array([rms_norm(row, layer_weights["attention_norm.scale"], eps) for row in x])
        x = x + attention_layer(y, attention, spec, config)
        y = np.array([rms_norm(row, layer_weights["mlp_norm.scale"], eps) for row in x])
        gate, up = (y @ layer_weights["mlp.gate_up.kernel"][:, row] for row in (0, 1))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer_weights["mlp.down.kernel"]
    return np.array([rms_norm(row, w["norm.scale"], eps) for row in x]) @ w["head.kernel"]


class Predicting:
    """`causal`; ``cache`` also collects the queries that each layer predicts for the next one."""

    accepts_qk_rope = accepts_next_queries = True

    def __call__(self, layer, q, k, v, cache, *, qk_rope, next_queries=None):
        entries, predicted = cache
        out, entries = causal(layer, *qk_rope(q, k), v, entries)
        return out, (entries, [*predicted, None if next_queries is None else next_queries()])


def test_layers_may_differ_in_heads_sizes_and_rope():
    model = random_decoder(UNEQUAL)
    tokens = np.array([[3, 1, 12, 0, 7, 7, 5, 9, 2]], np.int32)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]

    @jax.jit
    def run(model, tokens, positions):
        angles = model.angles(positions, UNEQUAL.layers[1])
        second = model.layers[1].queries(model.embed(tokens), angles)
        return *model(tokens, positions, Predicting(), ([], [])), second

    hidden, (projections, predicted), second = run(model, tokens, positions)
    weights = {name: value.astype(np.float64) for name, value in parameters(model).items()}
    want = expected_logits(weights, UNEQUAL, tokens[0])
    np.testing.assert_allclose(model.logits(hidden)[0], want, atol=1e-4 * want.std(), rtol=0)
    # Of the second layer, which has a rope of its own, by the input of the first.
    np.testing.assert_array_equal(predicted[0], second)
    assert predicted[2] is None
    for spec, (q, k, v) in zip(UNEQUAL.layers, projections, strict=True):
        assert q.shape == (1, 9, 4, spec.key_size)
        assert k.shape == (1, 9, spec.kv_heads, spec.key_size)
        assert v.shape == (1, 9, spec.kv_heads, spec.value_size)


def test_equal_ropes_are_computed_once():
    """As many cosines as there are kinds of rotation, not of layers."""
    counts = []
    for config in (TINY, UNEQUAL):
        tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
        traced = jax.make_jaxpr(lambda m, t: m(t, t, causal, [])[0])(
            abstract_decoder(config), tokens
        )
        counts.append(str(traced).count(" cos "))
    assert counts == [1, 3]


def test_a_layer_has_four_products():
    def attend(layer, q, k, v, cache):
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), cache

    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    model = abstract_decoder(dataclasses.replace(UNEQUAL, qkv_bias=True, mlp_bias=True))
    traced = jax.make_jaxpr(lambda m, t: m(t, t, attend, None)[0])(model, tokens)
    assert str(traced).count("dot_general") == 4 * len(UNEQUAL.layers)


def test_a_seed_gives_the_weights_that_separate_projections_had():
    """Drawn one after another; a row of the joined kernel is a KV head's."""
    rngs = nnx.Rngs(3)

    def draw(*shape):
        return jax.random.normal(rngs.params(), shape) / np.sqrt(shape[0], dtype=np.float32)

    draw(41, 32)  # the embedding
    outputs = {"q": 64, "k": 32, "v": 32}
    arrays = {f"attention.{name}.kernel": draw(32, size) for name, size in outputs.items()}
    arrays["attention.out.kernel"] = draw(64, 32)
    arrays |= {f"mlp.{name}.kernel": draw(32, 48) for name in ("gate", "up")}
    initial = parameters(Decoder(TINY, rngs=nnx.Rngs(3)))
    for name, want in together(jax.device_get(arrays), 2).items():
        np.testing.assert_allclose(initial[f"layers.0.{name}"], want, rtol=1e-6, atol=0)


def test_values_in_keys_are_refused():
    latent = dataclasses.replace(TINY.layers[0], values_in_keys=True)
    config = dataclasses.replace(TINY, layers=(TINY.layers[0], latent))
    with pytest.raises(ValueError, match=r"layers\[1\] has values_in_keys=True, which Decoder"):
        Decoder(config, rngs=nnx.Rngs(0))
