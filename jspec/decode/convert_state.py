"""Converting a state for steps of another config: one prefill serves several policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.cache.layout import check_rings
from jspec.config import shown
from jspec.decode.exact import check_started
from jspec.decode.settings import StepConfig, check_arrays, preferring_of_models
from jspec.decode.state import DecodeState, Models
from jspec.dispatch import Backends
from jspec.policies import Policy
from jspec.policies.policy import columns_of, create_cache, encoded, with_pages
from jspec.sharding import Placing, explicit_mesh_sharding, place, with_auto_axes
from jspec.typing import Array, Model

TOKENS = ("keys", "values")  # columns of the model's own, whatever a policy keeps beside them


def convert_state(
    models: Model | Models, state: DecodeState, config: StepConfig, *, sharding: Placing = None
) -> DecodeState:
    """A copy of ``state`` for steps of ``config``, whose policy may be another one.

    What that policy keeps is made from the cached keys, and the drafter hears the tokens, as in a
    prefill of its own; ``state`` stays as it is and can be converted again. Costs a copy of the
    cache. ``sharding`` as in `jspec.start_decoding`. Raises `ValueError` for a drafter with a model
    of its own, for a policy without its arrays, for a gamma for which a layer with a sliding window
    has no room, and for ``exact=True`` where the prompts were taken up without it.
    """
    models = Models.of(models)
    check_arrays(models, config)
    held = state.cache
    check_rings(held.specs, held.layouts, config.gamma)
    if config.exact:
        check_started(state.exact, True)
    if config.draft.needs_model:
        raise ValueError(
            f"draft={shown(config.draft)} takes up prompts with a model of its own; pass its "
            "config to start_decoding instead"
        )
    sharding = explicit_mesh_sharding(models) if sharding is None else sharding
    sizes = (held.specs, held.layouts, len(held.lengths), held.keys(0).dtype, sharding)
    empty = place({"cache": create_cache(config.cache_policy, *sizes)}, sharding)["cache"]
    others = dataclasses.replace(state, cache=None, draft=None)
    copied = jax.tree.map(jnp.copy, others)
    cache = _filled(models, empty, held, policy=config.cache_policy, backends=config.backends)
    own = _drafter_state(models, held.lengths, state.tokens, config=config)
    return place(dataclasses.replace(copied, cache=cache, draft=own, exact=config.exact), sharding)


@jax.jit(static_argnames="config")
def _drafter_state(models: Models, lengths: Array, tokens: Array, config: StepConfig) -> Any:
    """What the drafter keeps after prompts of ``lengths [B]``, the first of ``tokens [B, S]``.

    Of all positions, so that prompts of any length share a program.
    """
    capacity = tokens.shape[1]
    at = jnp.arange(capacity, dtype=jnp.int32)[None]
    positions = jnp.where(at < lengths[:, None], at, -1)
    with config.of_models():
        own = config.draft.init(models, lengths, capacity, config.gamma)
        return config.draft.prefill(models, own, tokens, positions, config)


@jax.jit(static_argnames=("policy", "backends"), donate_argnames="empty")
def _filled(models: Models, empty: Cache, held: Cache, policy: Policy, backends: Backends) -> Cache:
    """``empty`` with the keys and values that are ``held``, and what the policy makes of them.

    Drafters whose policies store the same columns share a program.
    """
    policy_params = models.policy

    def fill(policy_params, empty: Cache, held: Cache) -> Cache:
        cache = empty.with_lengths(held.lengths)
        for layer, spec in enumerate(held.specs):
            columns = {n: x for n, x in held.columns[layer].items() if n in TOKENS}
            if columns_of(policy, layer, spec):
                columns |= encoded(
                    policy, policy_params, layer, columns["keys"], columns.get("values")
                )
            kinds = empty.columns[layer]
            cache = cache.replaced(
                layer, **{n: x.astype(kinds[n].dtype) for n, x in columns.items()}
            )
        most = max(layout.size for layout in held.layouts)
        return with_pages(
            policy, policy_params, cache, jnp.zeros_like(held.lengths), held.lengths, most
        )

    with preferring_of_models(backends):
        return with_auto_axes(fill, policy_params, empty, held, like=empty)
