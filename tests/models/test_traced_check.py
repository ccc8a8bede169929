"""A user's model is checked when it is traced: its calls of attend, and its results."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jspec
from jspec import helix
from jspec.models import traced_check
from jspec.models.traced_check import check_traced

PARAMS = jspec.SamplingParams(max_new_tokens=2)
SPEC = jspec.LayerSpec(kv_heads=2, key_size=4, value_size=4)


@dataclasses.dataclass(frozen=True)
class Config:
    layers: tuple[jspec.LayerSpec, ...]
    vocab_size: int = 8
    max_context: int = 64
    stop_tokens: tuple[int, ...] = ()


class TwoLayers(nnx.Module):
    """A model whose hooks tests replace."""

    dtype = jnp.float32

    def __init__(self, spec=SPEC):
        self.config = Config((spec, spec))

    def __call__(self, tokens, positions, attend, cache):
        x = jnp.broadcast_to(positions[..., None].astype(jnp.float32), (*tokens.shape, 16))
        for layer in (0, 1):
            x, cache = self.layer(layer, x, attend, cache)
        return self.result(x, cache)

    def layer(self, layer, x, attend, cache):
        q, k = x.reshape(*x.shape[:2], 4, 4), x.reshape(*x.shape[:2], 4, 4)[:, :, :2]
        out, cache = attend(layer, *self.projected(q, k, k), cache)
        return x + out.reshape(x.shape), cache

    def projected(self, q, k, v):
        return q, k, v

    def result(self, x, cache):
        return x, cache

    def logits(self, hidden):
        return hidden[..., :8]


class Scanned(TwoLayers):
    def __call__(self, tokens, positions, attend, cache):
        def body(carry, layer):
            return self.layer(layer, carry[0], attend, carry[1]), None

        x = jnp.zeros((*tokens.shape, 16))
        return jax.lax.scan(body, (x, cache), jnp.arange(2))[0]


class FirstCache(TwoLayers):
    def __call__(self, tokens, positions, attend, cache):
        return super().__call__(tokens, positions, attend, cache)[0], cache


def changed(**hooks):
    return type("Changed", (TwoLayers,), hooks)()


BAD = {
    "layer-twice": (
        changed(layer=lambda self, _, *rest: TwoLayers.layer(self, 0, *rest)),
        ValueError,
        r"attend was called for layer 0 with the cache that 1 layer\(s\) extended; call it once",
    ),
    "one-layer-skipped": (
        changed(layer=lambda self, n, x, a, c: TwoLayers.layer(self, n, x, a, c) if n else (x, c)),
        ValueError,
        r"attend was called for layer 1 with the cache that 0 layer\(s\) extended",
    ),
    "last-layer-skipped": (
        changed(layer=lambda self, n, x, a, c: (x, c) if n else TwoLayers.layer(self, n, x, a, c)),
        ValueError,
        r"was extended by 1 layer\(s\), and config.layers has 2",
    ),
    "first-cache": (FirstCache(), ValueError, r"was extended by 0 layer\(s\)"),
    "cache-of-layer": (
        changed(layer=lambda self, n, x, a, c: TwoLayers.layer(self, n, x, a, None)),
        TypeError,
        "attend of layer 0 got a NoneType for its cache",
    ),
    "scanned": (Scanned(), TypeError, r"got a traced int32\[\] for its layer.*lax.scan"),
    "hidden-alone": (
        changed(result=lambda self, x, cache: x),
        TypeError,
        r"it returns a traced float32\[2, 3, 16\]; it must return \(hidden, cache\)",
    ),
    "hidden-of-one-token": (
        changed(result=lambda self, x, cache: (x[:, -1], cache)),
        ValueError,
        r"hidden states are \(2, 16\) for tokens \(2, 3\)",
    ),
    "kv-heads": (
        changed(projected=lambda self, q, k, v: (q, k[:, :, :1], v)),
        ValueError,
        r"k of layer 0 is \(2, 3, 1, 4\); config.layers\[0\] says \(2, 3, 2, 4\)",
    ),
    "value-size": (
        changed(projected=lambda self, q, k, v: (q, k, v[..., :3])),
        ValueError,
        r"v of layer 0 is \(2, 3, 2, 3\)",
    ),
    "swapped-axes": (
        changed(projected=lambda self, q, k, v: (q, k.swapaxes(0, 1), v)),
        ValueError,
        r"k of layer 0 is \(3, 2, 2, 4\)",
    ),
    "query-heads": (
        changed(projected=lambda self, q, k, v: (q[:, :, :3], k, v)),
        ValueError,
        "q of layer 0 has 3 heads; it must be a multiple of kv_heads=2",
    ),
    "no-values": (
        changed(projected=lambda self, q, k, v: (q, k, None)),
        ValueError,
        "v of layer 0 is None",
    ),
    "dtype": (
        changed(projected=lambda self, q, k, v: (q, k.astype(jnp.bfloat16), v)),
        ValueError,
        "k of layer 0 is bfloat16; model.dtype is float32",
    ),
    "vocabulary": (
        changed(logits=lambda self, hidden: hidden),
        ValueError,
        r"logits are float32 \(2, 3, 16\); config.vocab_size says \(2, 3, 8\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_decodes_wrongly_is_refused(name):
    model, kind, message = BAD[name]
    with pytest.raises(kind, match=rf"model of type {type(model).__name__}: .*{message}"):
        check_traced("model", model)


def test_a_right_model_is_traced_once(monkeypatch):
    model, calls = TwoLayers(), []
    traced = traced_check._passed
    monkeypatch.setattr(traced_check, "_passed", lambda m: calls.append(m) or traced(m))
    check_traced("model", model)
    check_traced("model", model)
    assert len(calls) == 1


def test_every_way_to_decode_checks():
    model = BAD["layer-twice"][0]
    for run in (
        lambda: jspec.generate(model, [[1, 2]], PARAMS),
        lambda: jspec.Engine(model, slots=1, capacity=16),
        lambda: jspec.start_decoding(model, [[1, 2]], PARAMS, jspec.StepConfig(0, jspec.NoDraft())),
        lambda: jspec.score_tokens(model, [[1, 2]]),
    ):
        with pytest.raises(ValueError, match="call it once for each layer from 0 to 1"):
            run()


def test_a_model_of_the_user_is_no_decoder_to_shard():
    with pytest.raises(TypeError, match=r"TwoLayers is no jspec.Decoder.*helix.Sharded"):
        helix.shard(TwoLayers(), helix.HelixConfig(kvp=1, tpa=1))
