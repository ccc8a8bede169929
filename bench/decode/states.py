"""States in the middle of decoding whose cache is filled with noise, and drafts of noise.

The time of a step does not depend on the values in the cache, so that no prompt is prefilled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.decode.shapes import noise, random_bits
from jspec import host
from jspec.cache import Cache
from jspec.cache.layout import layouts_of
from jspec.cache.storage import TOKEN_COLUMNS
from jspec.config import SamplingParams
from jspec.decode.draft import Drafted, NoDraft
from jspec.decode.prefill import rounded_capacity, start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Exact, Models
from jspec.models.decoder import Decoder
from jspec.policies import Policy
from jspec.policies.dense import DENSE
from jspec.policies.policy import create_cache

# Standard deviation of keys: large enough that leaving out a block of keys changes the output.
KEY_SCALE = 2.0
TOKEN_STRIDE = 7919  # a prime: neighbours in a pass are far apart in the vocabulary


@dataclasses.dataclass(frozen=True)
class NoisyPadding(NoDraft):
    """`NoDraft` with different padding tokens at all positions of rows of equal length.

    Equal tokens would all choose the same experts, and a pass would read too few of them.
    """

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        drafted, state = super().draft(models, state, gamma)
        batch = len(drafted.tokens)
        number = state.lengths[:, None] + jnp.arange(batch * gamma).reshape(batch, gamma)
        tokens = number * TOKEN_STRIDE % models.target.config.vocab_size
        return dataclasses.replace(drafted, tokens=tokens), state


@dataclasses.dataclass(frozen=True)
class NoisyDraft(NoisyPadding):
    """Drafts of noise, all of whose tokens are verified: a chain, or a tree.

    In a tree each token comes before two others, as far as there are any.
    """

    is_tree: bool = False

    def draft(self, models: Models, state: DecodeState, gamma: int) -> tuple[Drafted, DecodeState]:
        drafted, state = super().draft(models, state, gamma)
        parents = jnp.broadcast_to(jnp.arange(gamma, dtype=jnp.int32) // 2, drafted.tokens.shape)
        lengths = jnp.full_like(drafted.lengths, gamma)
        return Drafted(drafted.tokens, lengths, parents=parents if self.is_tree else None), state


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Makes states for a context of random tokens.

    ``small``: a state with as many rows and a cache of two slots; ``shapes``: the shapes of the
    whole state, for compiling before its memory is allocated.
    """

    small: DecodeState
    shapes: DecodeState

    @classmethod
    def of(
        cls,
        model: Decoder,
        batch: int,
        context: int,
        gamma: int,
        room: int,
        policy: Policy = DENSE,
        exact: Exact | None = None,
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> Blueprint:
        """A blueprint for passes of up to ``gamma + 1`` tokens, with ``room`` slots for decoding.

        ``policy``: whose columns and pages the cache has; ``exact``: as in `StepConfig`;
        ``sampling``: settings of `SamplingParams`.
        """
        capacity = rounded_capacity(context + room + gamma + 1)
        params = SamplingParams(max_new_tokens=1, ignore_eos=True, **sampling)
        config = StepConfig(gamma, NoDraft())
        small = start_decoding(model, [[1]] * batch, params, config, capacity=2)
        small = dataclasses.replace(small, exact=exact)
        specs = model.config.layers
        layouts = layouts_of(specs, capacity, gamma, rings=not exact)

        def whole(state: DecodeState) -> DecodeState:
            cache = create_cache(policy, specs, layouts, batch, model.dtype)
            tokens = jnp.zeros((batch, capacity), jnp.int32)
            return dataclasses.replace(state, cache=cache, tokens=tokens)

        shapes = jax.eval_shape(whole, small)
        cache = map_host_columns(shapes.cache, host_shape)
        return cls(small, dataclasses.replace(shapes, cache=cache))

    def filled(self, vocabulary: int) -> DecodeState:
        """A state with random tokens, keys, values and columns of the policy; to be `rewound`."""
        batch, capacity = self.shapes.tokens.shape
        seeds = itertools.count()

        def drawn(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.Array:
            seed = next(seeds)
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return random_bits(seed, x.shape, x.dtype)
            scale = KEY_SCALE if path[-1].key == "keys" else 1.0
            return noise(seed, jnp.float32(scale), x.shape, x.dtype, parts=16 * batch)

        columns, pages = jax.tree_util.tree_map_with_path(
            drawn, (self.shapes.cache.columns, self.shapes.cache.pages)
        )
        tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, capacity), np.int32)
        cache = dataclasses.replace(self.shapes.cache, columns=columns, pages=pages)
        return dataclasses.replace(
            self.small,
            cache=map_host_columns(cache, lambda x: host.place_in_host(x, None)),
            tokens=jnp.asarray(tokens),
            limits=jnp.full((batch,), capacity, jnp.int32),
        )


def map_host_columns(cache: Cache, change: Callable[[Any], Any]) -> Cache:
    """The cache with its keys and values in host memory replaced by ``change`` of each."""
    layers = () if cache.storage is None else cache.storage.layers(cache.specs)
    columns = tuple(
        {k: change(x) if layer in layers and k in TOKEN_COLUMNS else x for k, x in column.items()}
        for layer, column in enumerate(cache.columns)
    )
    return dataclasses.replace(cache, columns=columns)


def host_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array in host memory; only a sharding by a mesh says so in traced code."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("device",))
    place = NamedSharding(mesh, PartitionSpec(), memory_kind=host.KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
