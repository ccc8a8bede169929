"""The loop of a draft that ends where another pass would not pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jspec.decode.ending import level_of
from jspec.decode.state import DecodeState
from jspec.ops.vocabulary import Axes
from jspec.typing import Array


def while_it_pays(
    state: DecodeState,
    gamma: int,
    room: Array,
    draw: Callable[[Any, Array], tuple[Any, Array]],
    carried: Any,
    axis_name: Axes | None,
) -> tuple[Array, Array, Any, Array | None]:
    """``draw(carried, step)``, which gives the next ``carried`` and logits, as often as it pays.

    At most ``gamma`` times, and once in any case. ``room [B]``: tokens that each row may draft.
    Whether token i is drawn follows from what is known before: the tokens in front of it and the
    logits that drew them. Returns how often it drew; how certain it was each time, int32 ``[B,
    gamma]``; what is carried; and the logits ``[B, gamma, V]``, None where rows are greedy.
    """
    ending, live = state.ending, ~state.done
    rates = ending.rates
    temperature = None if state.mode == "greedy" else state.sampling.temperature
    index = jnp.arange(gamma, dtype=jnp.int32)[None]

    def certainty(logits: Array, reached: Array) -> tuple[Array, Array]:
        level = level_of(logits, temperature, axis_name)[:, None]
        return level, reached * jnp.take_along_axis(rates, level, axis=1)[:, 0]

    def pays(loop: Any) -> Array:
        step, reached, *_ = loop
        return (step < gamma) & ending.pays(reached, step < room, live)

    def another(loop: Any) -> Any:
        step, reached, levels, carried, all_logits = loop
        carried, logits = draw(carried, step)
        level, reached = certainty(logits, reached)
        levels = jnp.where(index == step, level, levels)
        if all_logits is not None:
            all_logits = lax.dynamic_update_index_in_dim(all_logits, logits, step, axis=0)
        return step + 1, reached, levels, carried, all_logits

    carried, logits = draw(carried, jnp.int32(0))
    level, reached = certainty(logits, jnp.ones(len(live), jnp.float32))
    levels = jnp.broadcast_to(level, (len(live), gamma))
    all_logits = None
    if state.mode != "greedy":
        all_logits = jnp.broadcast_to(logits[None], (gamma, *logits.shape))
    loop = jnp.int32(1), reached, levels, carried, all_logits
    if gamma > 1:
        loop = lax.while_loop(pays, another, loop)
    count, _, levels, carried, all_logits = loop
    all_logits = None if all_logits is None else jnp.swapaxes(all_logits, 0, 1)
    return count, levels, carried, all_logits
