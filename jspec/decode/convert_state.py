"""Conversion of a state for steps of another config: one prefill serves several policies."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.layout import check_rings
from jspec.decode.checks import check_started
from jspec.decode.on_mesh import placing_of
from jspec.decode.prefill_pass import default_chunk, init_drafter_state, prefill_chunk
from jspec.decode.settings import StepConfig, check_arrays
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import sync_drafter
from jspec.dispatch import Backends, use_backends
from jspec.policies import Policy
from jspec.policies.policy import columns_of, create_cache, with_pages
from jspec.sharding import Placing, place, with_auto_axes
from jspec.typing import Array, Model

TOKENS = ("keys", "values")  # the model's columns, as opposed to those of policies


def convert_state(
    models: Model | Models, state: DecodeState, config: StepConfig, *, sharding: Placing = None
) -> DecodeState:
    """A copy of ``state`` for steps of ``config``, whose policy and drafter may be others.

    What the policy keeps is made from the cached keys and values, and the drafter is prefilled with
    the tokens, as in a prefill of its own. Costs a copy of the cache, and for a guided drafter a
    pass over the last cached token, whose query selects.

    Args:
        models: As `jspec.start_decoding` takes them.
        state: The state to copy. It is not donated, so that it can be converted again.
        config: The config of the steps to come.
        sharding: As in `jspec.start_decoding`.

    Returns:
        The converted copy.

    Raises:
        ValueError: For a policy without its parameters; for a gamma for which a layer with a
            sliding window has no room; and for a level of ``exact`` with which the prompts were
            not prefilled.
    """
    models = Models.of(models)
    check_arrays(models, config)
    source = state.cache
    check_rings(source.specs, source.layouts, config.gamma)
    if config.exact:
        check_started(state.exact, config.exact)
    sharding = placing_of(models) if sharding is None else sharding
    sizes = (source.specs, source.layouts, len(source.lengths), source.keys(0).dtype, sharding)
    empty = place({"cache": create_cache(config.cache_policy, *sizes)}, sharding)["cache"]
    others = dataclasses.replace(state, cache=None, draft=None)
    copied = jax.tree.map(jnp.copy, others)
    cache = _filled(models, empty, source, policy=config.cache_policy, backends=config.backends)
    batch, capacity = state.tokens.shape
    drafter_state = init_drafter_state(models, config=config, batch=batch, capacity=capacity)
    converted = dataclasses.replace(copied, cache=cache, draft=drafter_state, exact=config.exact)
    converted = place(converted, sharding)
    # All positions, so that prompts of any length share a program; a model takes them in pieces.
    piece = min(default_chunk(batch), capacity) if config.draft.traits.needs_model else capacity
    for _ in range(0, capacity, piece):
        converted = sync_drafter(models, converted, config, piece)
    if config.selects_in_prefill:
        # The last token again, whose query is in no cache.
        begin = jnp.maximum(converted.cache.lengths - 1, 0)
        cache, drafter_state, _ = prefill_chunk(
            *(models, converted.cache, converted.draft, converted.tokens, begin),
            config=config,
            size=1,
            selects=True,
        )
        if config.exact == "tokens":  # the keys of a longer pass, from which others decode too
            cache = _restored(cache, source, begin)
        converted = dataclasses.replace(converted, cache=cache, draft=drafter_state)
    return place(converted, sharding)


@jax.jit(donate_argnames="cache")
def _restored(cache: Cache, source: Cache, positions: Array) -> Cache:
    """``cache`` with the keys and values of ``source`` at ``positions [B]``."""
    for layer, columns in enumerate(source.columns):
        slots = source.slots(layer, positions[:, None])
        entries = {
            name: jnp.take_along_axis(columns[name], slots[..., None, None], axis=1)
            for name in TOKENS
            if name in columns
        }
        cache = cache.written(layer, slots, **entries)
    return cache


@jax.jit(static_argnames=("policy", "backends"), donate_argnames="empty")
def _filled(
    models: Models, empty: Cache, source: Cache, policy: Policy, backends: Backends
) -> Cache:
    """``empty`` with the keys and values of ``source``, and what the policy makes of them.

    Drafters whose policies keep the same columns share a program.
    """
    policy_params = models.policy

    def fill(policy_params, empty: Cache, source: Cache) -> Cache:
        cache = empty.with_lengths(source.lengths)
        for layer, spec in enumerate(source.specs):
            columns = {n: x for n, x in source.columns[layer].items() if n in TOKENS}
            if columns_of(policy, layer, spec):
                encode = policy.encoder(policy_params, layer)
                columns |= encode(columns["keys"], columns.get("values"))
            kinds = empty.columns[layer]
            cache = cache.replaced(
                layer, **{n: x.astype(kinds[n].dtype) for n, x in columns.items()}
            )
        capacity = max(layout.size for layout in source.layouts)
        return with_pages(
            policy, policy_params, cache, jnp.zeros_like(source.lengths), source.lengths, capacity
        )

    with use_backends(backends):
        return with_auto_axes(fill, policy_params, empty, source, like=empty)
