"""Models with random weights, and the bytes and operations of their passes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench.decode.catalogue import IN_MXFP4, MODELS
from bench.policies import scored_bytes
from jspec.config import ModelConfig
from jspec.models.decoder import Decoder
from jspec.models.experts import MixtureOfExperts
from jspec.ops.quantized import BLOCK, MXFP4
from jspec.policies import Dense, Policy
from jspec.policies.budgeted import Budgeted
from jspec.policies.dense import DENSE

# Scales of the experts' outputs and of the routers' logits. Rounding decides between the last
# chosen expert of a token and the next one. That must change the output little, although attention
# over many random keys leaves a small residual. With these scales, logits in bfloat16 differ from
# those in float32 by at most 5 % at 30K keys, and by 40 % with wrong experts; at 2K keys by 2 % and
# 18 %.
EXPERT_SCALE = 0.06
ROUTER_SCALE = 2.0
# Standard deviation of the E2M1 numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
E2M1_DEVIATION = math.sqrt(68.5 / 8)


_DRAWN: dict[tuple[str, int], Decoder] = {}


def drawn(name: str, layers: int = 0) -> Decoder:
    """A model of the catalogue with random weights; kept until another one is drawn.

    Args:
        name: of the model.
        layers: how many of its first layers; 0 for all.
    """
    if (name, layers) not in _DRAWN:
        _DRAWN.clear()  # its memory is needed
        config = MODELS[name]
        config = first_layers(config, layers or config.num_layers)
        _DRAWN[name, layers] = random_model(config, mxfp4=name in IN_MXFP4)
    return _DRAWN[name, layers]


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The configuration with only its first ``layers`` layers."""
    return dataclasses.replace(config, layers=config.layers[:layers])


@partial(jax.jit, static_argnames=("shape", "dtype", "parts"))
def noise(seed: Any, scale: Any, shape: tuple[int, ...], dtype: Any, parts: int) -> jax.Array:
    """Normal numbers of standard deviation ``scale``, drawn in ``parts`` of equal size.

    Only one part is in memory in float32 at a time.
    """
    size = math.prod(shape) // parts

    def part(index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
        return (scale * jax.random.normal(key, (size,), jnp.float32)).astype(dtype)

    return jax.lax.map(part, jnp.arange(parts)).reshape(shape)


def random_mxfp4(seeds: Iterator[int], scale: float, shape: tuple[int, ...]) -> MXFP4:
    """A kernel ``shape [E, in, *out]`` of random E2M1 numbers, of standard deviation ``scale``.

    The scales are the two nearest powers of two, mixed at random to give that deviation.
    """
    count, inputs, *outputs = shape
    codes = random_bits(next(seeds), (count, *outputs, inputs // 2), jnp.uint8)
    power = math.log2(scale / E2M1_DEVIATION)
    least = math.floor(power)
    # With a share s at twice the scale, the variance is 1 + 3 s times as large.
    larger = round((4 ** (power - least) - 1) / 3 * 256)
    drawn = random_bits(next(seeds), (count, *outputs, inputs // BLOCK), jnp.uint8)
    scales = jnp.where(drawn < larger, least + 128, least + 127).astype(jnp.uint8)
    return MXFP4(codes, scales, leading=1)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_bits(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Integers of random bits."""
    return jax.random.bits(jax.random.key(seed, impl="rbg"), shape, dtype)


def random_model(
    config: ModelConfig, dtype: Any = jnp.bfloat16, sharding: Any = None, mxfp4: bool = False
) -> Decoder:
    """A decoder with random weights; norms scale by 1, biases, sinks and corrections are 0.

    Drawn leaf by leaf, since one program that draws all of them compiles for minutes. ``sharding``:
    of each leaf, as `jspec.load_model` takes it; one device has one whole leaf at a time.
    ``mxfp4``: kernels of experts are in MXFP4, on the default device.
    """
    seeds = itertools.count()

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array | MXFP4:
        weights = drawn(path, leaf)
        if sharding is None:
            return weights
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return jax.device_put(weights, sharding(name, leaf.shape))

    def drawn(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array | MXFP4:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if any(part in name for part in ("scale", "bias", "sinks", "correction")):
            one = "scale" in name and not config.centered_norms
            return jnp.full(leaf.shape, one, leaf.dtype)
        # A kernel is [in, ...], that of experts [E, in, ...].
        inputs = leaf.shape[len(leaf.shape) > 1 and "experts" in name]
        scale = 0.02 if "embedding" in name else inputs**-0.5
        scale *= EXPERT_SCALE if "experts.down" in name else 1
        scale *= ROUTER_SCALE if "router" in name else 1
        if mxfp4 and "experts" in name:
            return random_mxfp4(seeds, scale, leaf.shape)
        return noise(next(seeds), jnp.float32(scale), leaf.shape, dtype, parts=16)

    return jax.tree_util.tree_map_with_path(placed, Decoder(config, dtype=dtype, rngs=None))


def part_of(model: Decoder, layers: slice) -> Decoder:
    """A model of some of the layers, which shares the arrays."""
    part = jax.tree.map(lambda x: x, model)
    part.config = dataclasses.replace(model.config, layers=model.config.layers[layers])
    part.layers = nnx.List(list(model.layers)[layers])
    return part


def weight_bytes(model: Any) -> int:
    """Bytes of all weights of a model, or of a part of one."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def read_weight_bytes(model: Decoder, tokens: int = 1) -> int:
    """Bytes of the weights that a pass over ``tokens`` tokens, of all rows, reads.

    An embedding table that is only used for lookups is left out. Of E routed experts, the expected
    number is counted if each token chooses k at random: E (1 - (1 - k / E) ** tokens).
    """
    return _read(model, tokens, weight_bytes)


def _read(model: Decoder, tokens: int, count: Callable[[Any], int]) -> int:
    """``count`` of the weights that a pass over ``tokens`` tokens reads."""
    total = count(model) - (0 if model.head is None else count(model.embedding))
    return total - _missed(model, tokens, count)


def _missed(model: Decoder, tokens: int, count: Callable[[Any], int]) -> int:
    """The expected ``count`` of the routed experts that none of ``tokens`` tokens chooses."""
    experts = model.config.experts
    if experts is None:
        return 0
    mixtures = [x.mlp.experts for x in model.layers if isinstance(x.mlp, MixtureOfExperts)]
    return round(count(mixtures) * (1 - experts.chosen / experts.routed) ** tokens)


def numbers(tree: Any) -> int:
    """The number of weights, of any number of bits."""
    return sum(leaf.size for _, leaf in _weights(tree))


def _weights(tree: Any) -> list[tuple[Any, Any]]:
    """All arrays and MXFP4 matrices, with their paths."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, MXFP4))


def product_flops(model: Decoder, tokens: int) -> int:
    """Multiplications and additions of ``tokens`` tokens with the weights that each one uses."""
    return 2 * _read(model, 1, numbers) * tokens


def read_cache_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: Any,
    policy: Policy = DENSE,
    count: int = 0,
) -> int:
    """Bytes of the cache that a step reads at ``context`` tokens a row.

    In layers in which ``policy`` selects: what it scores, and keys and values of ``count`` tokens
    and the new one; in the others all keys and values inside their window.
    """
    total = scored_cache_bytes(config, batch, context, dtype, policy)
    for spec, selects in zip(config.layers, _selecting(config, policy), strict=True):
        positions = count + 1 if selects else min(context, spec.window or context)
        size = spec.kv_heads * (spec.key_size + spec.value_size)
        total += batch * positions * size * jnp.dtype(dtype).itemsize
    return total


def scored_cache_bytes(
    config: ModelConfig, batch: int, context: int, dtype: Any, policy: Policy
) -> int:
    """Bytes of the cache that ``policy`` scores in a step, in the layers in which it selects."""
    pairs = zip(config.layers, _selecting(config, policy), strict=True)
    scored = (context * scored_bytes(policy, spec, dtype) for spec, selects in pairs if selects)
    return int(batch * sum(scored))


def _selecting(config: ModelConfig, policy: Policy) -> list[bool]:
    """Whether ``policy`` selects, for each layer."""
    first = policy.dense_layers if isinstance(policy, Budgeted) else 0
    selects = not isinstance(policy, Dense)
    pairs = enumerate(config.layers)
    return [selects and layer >= first and spec.window is None for layer, spec in pairs]
