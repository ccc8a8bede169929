"""Models of a known shape with random weights, and what their passes read and compute."""

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

from bench.policies import scored_bytes
from jspec.config import ModelConfig
from jspec.models.decoder import Decoder
from jspec.models.experts import MixtureOfExperts
from jspec.ops.quantized import BLOCK, MXFP4
from jspec.policies import Dense, Policy
from jspec.policies.attend import DENSE
from jspec.policies.budgeted import Budgeted

# Times what experts and routers would give. Rounding decides between the last expert of a token and
# the next one: that must matter little beside a residual that is as small as behind attention over
# many random keys. At 30K keys logits in bfloat16 are then at most 5 % from those in float32, and
# of wrong experts they are 40 % off; at 2K keys 2 % and 18 %.
EXPERTS_GIVE = 0.06
ROUTERS_TELL = 2.0
E2M1_DEVIATION = math.sqrt(
    68.5 / 8
)  # of its numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their opposites


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


def random_mxfp4(seeds: Iterator[int], scale: float, shape: tuple[int, ...]) -> MXFP4:
    """A kernel ``shape [E, in, *out]`` of random E2M1 numbers, of standard deviation ``scale``.

    Scales are the two powers of two around what that takes, mixed by chance so that it comes out.
    """
    count, inputs, *outputs = shape
    codes = random_bits(next(seeds), (count, *outputs, inputs // 2), jnp.uint8)
    power = math.log2(scale / E2M1_DEVIATION)
    least = math.floor(power)
    # Of a share s at twice the scale the variance is 1 + 3 s times as large.
    larger = round((4 ** (power - least) - 1) / 3 * 256)
    drawn = random_bits(next(seeds), (count, *outputs, inputs // BLOCK), jnp.uint8)
    scales = jnp.where(drawn < larger, least + 128, least + 127).astype(jnp.uint8)
    return MXFP4(codes, scales, leading=1)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_bits(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Whole numbers of random bits."""
    return jax.random.bits(jax.random.key(seed, impl="rbg"), shape, dtype)


def random_model(
    config: ModelConfig, dtype: Any = jnp.bfloat16, sharding: Any = None, mxfp4: bool = False
) -> Decoder:
    """A decoder with random weights; norms scale by 1, biases and sinks are 0.

    Drawn leaf by leaf: one program that draws all of them compiles for minutes. ``sharding``: where
    each goes, as `jspec.load_model` takes it, so that one device has one whole leaf at a time.
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
        if "scale" in name or "bias" in name or "sinks" in name:
            one = "scale" in name and not config.centered_norms
            return jnp.full(leaf.shape, one, leaf.dtype)
        # A kernel is [in, ...], that of experts [E, in, ...].
        inputs = leaf.shape[len(leaf.shape) > 1 and "experts" in name]
        scale = 0.02 if "embedding" in name else inputs**-0.5
        scale *= EXPERTS_GIVE if "experts.down" in name else 1
        scale *= ROUTERS_TELL if "router" in name else 1
        if mxfp4 and "experts" in name:
            return random_mxfp4(seeds, scale, leaf.shape)
        return noise(next(seeds), jnp.float32(scale), leaf.shape, dtype, parts=16)

    return jax.tree_util.tree_map_with_path(placed, Decoder(config, dtype=dtype, rngs=None))


def part_of(model: Decoder, layers: slice) -> Decoder:
    """Some of a model's layers; the arrays are the same ones."""
    part = jax.tree.map(lambda x: x, model)
    part.config = dataclasses.replace(model.config, layers=model.config.layers[layers])
    part.layers = nnx.List(list(model.layers)[layers])
    return part


def weight_bytes(model: Any) -> int:
    """Bytes of all weights of a model, or of a part of one."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def read_weight_bytes(model: Decoder, tokens: int = 1) -> int:
    """Bytes of the weights that a pass over ``tokens`` tokens, of all rows, reads.

    An embedding that only looks tokens up is left out. Of E routed experts as many are read as
    tokens hit in the mean that choose k of them each, by chance: E (1 - (1 - k / E) ** tokens).
    """
    return _read(model, tokens, weight_bytes)


def _read(model: Decoder, tokens: int, count: Callable[[Any], int]) -> int:
    """The ``count`` of what a pass over ``tokens`` tokens reads."""
    total = count(model) - (0 if model.head is None else count(model.embedding))
    return total - _missed(model, tokens, count)


def _missed(model: Decoder, tokens: int, count: Callable[[Any], int]) -> int:
    """The ``count`` of the routed experts that none of ``tokens`` tokens chooses."""
    experts = model.config.experts
    if experts is None:
        return 0
    mixtures = [x.mlp.experts for x in model.layers if isinstance(x.mlp, MixtureOfExperts)]
    return round(count(mixtures) * (1 - experts.chosen / experts.routed) ** tokens)


def numbers(tree: Any) -> int:
    """How many weights there are, of however many bits."""
    return sum(leaf.size for _, leaf in _weights(tree))


def _weights(tree: Any) -> list[tuple[Any, Any]]:
    """Every array or matrix in MXFP4, and its path."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, MXFP4))


def product_flops(model: Decoder, tokens: int) -> int:
    """Multiplications and additions of ``tokens`` tokens with the weights, of those experts alone
    that a token chooses."""
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

    Of the layers in which ``policy`` selects: what it scores, keys and values of ``count`` tokens
    and the new one; of the others all keys and values that they see.
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
    config, arrays = model.config, _weights(model)
    kernels = sum(x.size for path, x in arrays if "kernel" in jax.tree_util.keystr(path))
    head = 0 if model.head is None else model.head.kernel[...].size
    missed = _missed(model, 1, numbers)
    flops = 2 * (kernels - head - missed) * tokens
    for spec in config.layers:
        window = min(tokens, spec.window or tokens)
        pairs = window * tokens - window * window // 2
        flops += 2 * config.num_heads * (spec.key_size + spec.value_size) * pairs
    return flops
