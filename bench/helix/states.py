"""Cases of whole steps on a mesh: models with random weights, states after a random context."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases import Case
from bench.decode.catalogue import MODELS
from bench.decode.check import NEW_KEY_SCALE
from bench.decode.running import CHUNKS, rewound
from bench.decode.shapes import first_layers, noise, random_model
from bench.drafters import BACKENDS, DEFAULT_BACKENDS, EXACT, preferring
from jspec.cache import StripedLayout
from jspec.config import ModelConfig, SamplingParams
from jspec.decode.draft.named import named_draft
from jspec.decode.prefill import rounded_capacity, start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState
from jspec.helix import HelixConfig, shard
from jspec.helix.sharded import decoder_sharding
from jspec.models.decoder import Decoder
from jspec.models.latent import LatentAttention
from jspec.typing import Array

DEFAULT: Case = {"shape": "llama-3.1-8b", "layers": 0, "B": 1, "S": 262144}
DEFAULT |= {"draft": "plain", "gamma": 5}
DEFAULT |= {"kvp": 1, "tpa": 1, "ep": 1, "overlap": 1, "strategy": "helix", "exchange": "xla"}
DEFAULT |= {"exact": "no", "backends": DEFAULT_BACKENDS}
CHOICES = {
    "shape": (
        *("llama-3.1-8b", "qwen3-8b", "qwen3-8b-2kv", "qwen3-8b-1kv"),
        *("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-r1", "tiny"),
    ),
    "draft": ("plain", "verify", "vegas"),
    "strategy": ("helix", "gather", "medha", "tp"),
    "exchange": ("xla", "pallas", "cuda"),
    "exact": ("no", "tokens"),
    "backends": BACKENDS,
}
LONGEST = 2**21  # positions of any shape: the trained context length does not change the time
DRAFTS = {"plain": "none", "verify": "none", "vegas": "vegas:budget=0.07"}
STEPS = 16  # of a chunk
MESH = ("kvp", "tpa", "ep", "overlap", "strategy", "exchange")
# Standard deviations of keys and values: attention is concentrated on few keys and its output
# outweighs the embedding, so that leaving out a key changes the logits.
SCALES = {"keys": 3.0, "values": 2.0}


def checked(case: Case) -> Case:
    """The case; raises `ValueError` for one that no mesh can have."""
    if case["S"] % 16:
        raise ValueError(f"S={case['S']} must be a multiple of 16")
    config = shape_of(case)
    if case["ep"] > 1 and config.experts is None:
        raise ValueError(f"ep={case['ep']} shares out experts, and {case['shape']} has none")
    for layer, spec in enumerate(config.layers):
        helix_of(case).check_layer(layer, config.num_heads, spec)
    return case


def helix_of(case: Case) -> HelixConfig:
    return HelixConfig(**{name: case[name] for name in MESH})


def shape_of(case: Case) -> ModelConfig:
    """The model, or its first ``layers``."""
    config = dataclasses.replace(MODELS[case["shape"]], max_context=LONGEST)
    return first_layers(config, case["layers"] or config.num_layers)


def alone(case: Case) -> Case:
    """The case on one device."""
    return case | {name: DEFAULT[name] for name in MESH}


def step_config(case: Case) -> StepConfig:
    """The step config of a case; ``verify``: no draft, but passes of gamma + 1 tokens."""
    gamma = 0 if case["draft"] == "plain" else case["gamma"]
    draft, backends = named_draft(DRAFTS[case["draft"]]), preferring(case["backends"])
    return StepConfig(gamma, draft, backends, exact=EXACT[case["exact"]])


def model_of(case: Case, layers: int | None = None) -> Any:
    """The model with random weights, in bfloat16: sharded on the mesh, or whole on one device.

    ``layers``: only the first ones, whose weights differ from those of the whole model.
    """
    helix, config = helix_of(case), shape_of(case)
    config = config if layers is None else first_layers(config, layers)
    if helix.devices == 1:
        return _with_scaled_keys(random_model(config))
    return shard(_with_scaled_keys(random_model(config, sharding=decoder_sharding(helix))), helix)


def _with_scaled_keys(model: Decoder) -> Decoder:
    """The model with keys scaled by `NEW_KEY_SCALE`, so that they matter among many random ones."""
    scale = jnp.asarray(NEW_KEY_SCALE, model.dtype)
    for block in model.layers:
        attention: Any = block.attention
        if isinstance(attention, LatentAttention):
            attention.kv_norm.scale[...] = attention.kv_norm.scale[...] * scale
            continue
        _, keys, _ = attention.qkv.parts
        kernel = attention.qkv.kernel[...]
        attention.qkv.kernel[...] = kernel.at[keys.index].multiply(scale)
    return model


def shapes_of(state: DecodeState) -> DecodeState:
    """The shapes of a state, with the shardings of arrays on several devices."""

    def of(x: Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if len(x.sharding.device_set) > 1 else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of, state)


def filled(model: Any, case: Case, config: StepConfig) -> DecodeState:
    """A state with S random positions in each row, and random tokens up to its capacity.

    The values do not depend on the devices; keys and values are rounded to bfloat16.
    """
    room = ((CHUNKS[1] + 1) * STEPS + 1) * (config.gamma + 1)
    capacity, batch = rounded_capacity(case["S"] + room), case["B"]
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    state = start_decoding(model, [[1]] * batch, params, config, capacity=capacity)
    seeds, columns = itertools.count(), [dict(column) for column in state.cache.columns]
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, columns=()))
    for column, layout in zip(columns, state.cache.layouts, strict=True):
        # Sorted, since columns on one device and on a mesh have different orders.
        for name in sorted(column):
            empty = column.pop(name)
            shape, where = (batch, case["S"], *empty.shape[2:]), empty.sharding
            size, dtype = empty.shape[1], empty.dtype
            del empty  # before the second one is allocated
            x = noise(next(seeds), jnp.float32(SCALES[name]), shape, jnp.bfloat16, parts=16)
            column[name] = jax.device_put(_in_slots(x, layout, size).astype(dtype), where)
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    tokens = rng.integers(0, vocabulary, (batch, capacity), np.int32)
    cache = dataclasses.replace(state.cache, columns=tuple(columns))
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=jax.device_put(tokens, state.tokens.sharding),
        limits=jax.device_put(np.full(batch, capacity, np.int32), state.limits.sharding),
    )
    return rewound(state, case["S"])


@functools.partial(jax.jit, static_argnames=("layout", "size"))
def _in_slots(x: Array, layout: Any, size: int) -> Array:
    """``x [B, S, ...]`` by position to ``[B, size, ...]`` by slot; 0 after S."""
    x = jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
    if not isinstance(layout, StripedLayout):
        return x
    return jnp.take(x, layout.slot_positions(jnp.full(1, size - 1, jnp.int32))[0], axis=1)
