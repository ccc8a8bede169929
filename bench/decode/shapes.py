"""The models of the suite: true shapes with random weights, and what their passes read and compute.

The shapes are those of the models' published configurations. gpt-oss-20b is there for its attention
alone: its four active experts of 2880 are one dense SwiGLU of as many bytes, in bfloat16, and it
has no sinks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench.policies import scored_bytes
from jspec.config import LayerSpec, ModelConfig, Rope, RopeScaling
from jspec.models.decoder import Decoder
from jspec.policies import Dense, Policy
from jspec.policies.attend import DENSE
from jspec.policies.budgeted import Budgeted

CONTEXT = 131072  # that every model here may have; Qwen3 reaches it by YaRN, which costs no time


def _qwen3(**settings: Any) -> ModelConfig:
    return ModelConfig.uniform(
        vocab_size=151936,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        rope_theta=1e6,
        qk_norm=True,
        family="qwen3",
        max_context=CONTEXT,
        **settings,
    )


def _gpt_oss() -> ModelConfig:
    windows = itertools.islice(itertools.cycle((128, None)), 24)
    specs = [LayerSpec(kv_heads=8, key_size=64, value_size=64, window=w) for w in windows]
    scaling = RopeScaling("yarn", 32.0, original_context=4096, truncate=False)
    return ModelConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=4 * 2880,
        num_heads=64,
        layers=tuple(specs),
        ropes=(Rope(150000.0, scaling),),
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        max_context=CONTEXT,
    )


MODELS: dict[str, ModelConfig] = {
    "qwen3-8b": _qwen3(hidden_size=4096, intermediate_size=12288),
    "qwen3-4b": _qwen3(hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
    "llama-3.1-8b": ModelConfig.uniform(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, original_context=8192),
        norm_eps=1e-5,
        max_context=CONTEXT,
    ),
    "llama-2-7b": ModelConfig.uniform(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_size=128,
        rope_theta=10000.0,
        norm_eps=1e-5,
        max_context=CONTEXT,
    ),
    "gpt-oss-20b-attention": _gpt_oss(),
}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a device can do: bytes ``read`` and ``matrix`` operations a second, None if unknown."""

    read: float
    matrix: float | None

    def floor_ns(self, weights: int, cached: int, flops: int) -> float:
        """The least time of a step that reads so many bytes of weights and of the cache.

        ``flops``: of its products with the weights, which run beside the reading of these.
        """
        products = weights / self.read
        if self.matrix is not None:
            products = max(products, flops / self.matrix)
        return (products + cached / self.read) * 1e9


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with its first ``layers`` layers alone."""
    return dataclasses.replace(config, layers=config.layers[:layers])


@partial(jax.jit, static_argnames=("shape", "dtype", "parts"))
def noise(seed: Any, scale: Any, shape: tuple[int, ...], dtype: Any, parts: int) -> jax.Array:
    """Normal numbers of standard deviation ``scale``, drawn in ``parts`` of equal size.

    So no more than a part of them is in memory in float32.
    """
    size = math.prod(shape) // parts

    def part(index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
        return (scale * jax.random.normal(key, (size,), jnp.float32)).astype(dtype)

    return jax.lax.map(part, jnp.arange(parts)).reshape(shape)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_bits(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Whole numbers of random bits."""
    return jax.random.bits(jax.random.key(seed, impl="rbg"), shape, dtype)


def random_model(config: ModelConfig, dtype: Any = jnp.bfloat16, sharding: Any = None) -> Decoder:
    """A decoder with random weights; norms scale by 1 and biases are 0.

    Drawn leaf by leaf: one program that draws all of them compiles for minutes. ``sharding``: where
    each goes, as `jspec.load_model` takes it, so that one device has one whole leaf at a time.
    """
    seeds = itertools.count()

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        found = drawn(path, leaf)
        if sharding is None:
            return found
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return jax.device_put(found, sharding(name, leaf.shape))

    def drawn(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            return jnp.full(leaf.shape, "scale" in name, dtype)
        # A kernel is [in, ...].
        scale = 0.02 if "embedding" in name else leaf.shape[0] ** -0.5
        return noise(next(seeds), jnp.float32(scale), leaf.shape, dtype, parts=16)

    return jax.tree_util.tree_map_with_path(placed, Decoder(config, dtype=dtype, rngs=None))


def part_of(model: Decoder, layers: slice) -> Decoder:
    """Some of a model's layers; the arrays are the same ones."""
    part = jax.tree.map(lambda x: x, model)
    part.config = dataclasses.replace(model.config, layers=model.config.layers[layers])
    part.layers = nnx.List(list(model.layers)[layers])
    return part


def weight_bytes(model: Decoder) -> int:
    """Bytes of all weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def read_weight_bytes(model: Decoder) -> int:
    """Bytes of the weights that a step reads: an embedding that only looks tokens up is left
    out."""
    return weight_bytes(model) - (0 if model.head is None else model.embedding[...].nbytes)


def read_cache_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: Any,
    policy: Policy = DENSE,
    count: int = 0,
) -> int:
    """Bytes of the cache that a step reads at ``context`` tokens a row.

    Of the layers in which ``policy`` selects: what it scores, keys and values of ``count`` tokens
    and the new one; of the others all keys and values that they see.
    """
    total = scored_cache_bytes(config, batch, context, dtype, policy)
    for spec, selects in zip(config.layers, _selecting(config, policy), strict=True):
        seen = count + 1 if selects else min(context, spec.window or context)
        size = spec.kv_heads * (spec.key_size + spec.value_size)
        total += batch * seen * size * jnp.dtype(dtype).itemsize
    return total


def scored_cache_bytes(
    config: ModelConfig, batch: int, context: int, dtype: Any, policy: Policy
) -> int:
    """Bytes of the cache that ``policy`` scores in a step, in the layers in which it selects."""
    pairs = zip(config.layers, _selecting(config, policy), strict=True)
    scored = (context * scored_bytes(policy, spec, dtype) for spec, selects in pairs if selects)
    return int(batch * sum(scored))


def _selecting(config: ModelConfig, policy: Policy) -> list[bool]:
    """In which layers ``policy`` selects."""
    first = policy.dense_layers if isinstance(policy, Budgeted) else 0
    selects = not isinstance(policy, Dense)
    pairs = enumerate(config.layers)
    return [selects and layer >= first and spec.window is None for layer, spec in pairs]


def prefill_flops(model: Decoder, tokens: int) -> int:
    """Multiplications and additions of a prefill of one row, without the head, which it leaves out.

    Products with weights: 2 x weights x tokens. Attention, causal: 2 x N x (key size + value size)
    for each pair of a query and a key that it sees; without a window these are tokens ** 2 / 2.
    """
    config, arrays = model.config, jax.tree_util.tree_leaves_with_path(model)
    kernels = sum(x.size for path, x in arrays if "kernel" in jax.tree_util.keystr(path))
    head = 0 if model.head is None else model.head.kernel[...].size
    flops = 2 * (kernels - head) * tokens
    for spec in config.layers:
        window = min(tokens, spec.window or tokens)
        pairs = window * tokens - window * window // 2
        flops += 2 * config.num_heads * (spec.key_size + spec.value_size) * pairs
    return flops
