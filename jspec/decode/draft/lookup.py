"""Lookup in the text so far: where it agrees with its own end, and what followed there."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.typing import Array


def agreement(text: Array, begins: Array, ends: Array, most: int) -> Array:
    """How many tokens up to each position are the last ones of ``text [B, S]`` before ``ends [B]``.

    Compared back to front, one by one, down to ``begins [B]`` and ``most`` tokens at most; int32
    ``[B, S]``. 0 from the last token on, which would agree with itself.
    """
    batch, capacity = text.shape
    position = jnp.arange(capacity, dtype=jnp.int32)[None]
    agreed = jnp.zeros((batch, capacity), jnp.int32)
    running = position < ends[:, None] - 1
    for back in range(most):
        at = ends - 1 - back
        last = jnp.take_along_axis(text, jnp.maximum(at, 0)[:, None], 1)[:, 0]
        wanted = jnp.where(at >= begins, last, -2)
        shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
        running = running & (shifted == wanted[:, None])
        agreed = agreed + running.astype(jnp.int32)
    return agreed


def continuation(text: Array, ends: Array, agreed: Array, gamma: int) -> tuple[Array, Array]:
    """What followed the longest earlier match of the end of ``text``, the latest of equals.

    ``agreed [B, S]`` as `agreement` gives it for ``ends [B]``. Tokens int32 ``[B, gamma]``, and the
    length of the match ``[B]``; where that is 0, the tokens mean nothing.
    """
    latest = jnp.argmax(jnp.flip(agreed, axis=1), axis=1).astype(jnp.int32)
    end = text.shape[1] - 1 - latest
    # What follows may reach the end of the text before gamma tokens: it then goes on in a circle,
    # as a text that repeats itself does.
    period = jnp.maximum(ends - 1 - end, 1)[:, None]
    index = end[:, None] + 1 + jnp.arange(gamma, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(text, index, axis=1), agreed.max(axis=1)
