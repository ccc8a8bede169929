"""Where a draft ends: by how certain it is, what was accepted of such drafts, and what costs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops.distribution import cleaned
from jspec.ops.vocabulary import Axes
from jspec.sharding import put
from jspec.typing import Array

LEVELS = 16  # of certainty: in level n the draft gives other tokens a mass of 2**-n to 2**-(n + 1)
MEMORY = 512.0  # steps of a row after which what was accepted counts half
SHARED = 8.0  # tokens of its own by which a row outweighs what was accepted of all rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ending:
    """What says where drafts end. Every leaf begins with the batch axis.

    ``tried``, ``taken`` float32 ``[B, LEVELS]``: how many draft tokens of each level of certainty
    were judged, and accepted, where older ones count less. ``price`` float32 ``[B]``: how many
    tokens a pass must bring a row, in the mean over rows, to be worth its time.
    """

    tried: Array
    taken: Array
    price: Array

    @classmethod
    def unknown(cls, batch: int) -> Ending:
        """Of rows of which nothing is known, at a price of 0: their drafts end at their limits."""
        of_levels, of_rows = (batch, LEVELS), (batch,)
        zeros: Any = functools.partial(np.zeros, dtype=np.float32)
        return cls(zeros(of_levels), zeros(of_levels), zeros(of_rows))

    def priced(self, price: float) -> Ending:
        """The same at another price, from the host."""
        prices = np.full(self.price.shape, price, np.float32)
        return dataclasses.replace(self, price=put(prices, self.price.sharding))

    @property
    def rates(self) -> Array:
        """How often tokens of each level are accepted, float32 ``[B, LEVELS]``.

        That of the row, beside that of all rows, beside what the draft itself says.
        """
        said = 1 - 0.5 ** (1 + jnp.arange(LEVELS, dtype=jnp.float32))
        of_all = (self.taken.sum(axis=0) + said) / (self.tried.sum(axis=0) + 1)
        return (self.taken + SHARED * of_all[None]) / (self.tried + SHARED)

    @property
    def mean_rate(self) -> Array:
        """How often a token of which nothing is known is accepted, float32 ``[B]``."""
        tried, taken = self.tried.sum(axis=1), self.taken.sum(axis=1)
        of_all = (taken.sum() + 1) / (tried.sum() + 1)
        return (taken + SHARED * of_all) / (tried + SHARED)

    def pays(self, reached: Array, goes_on: Array, live: Array) -> Array:
        """Whether another pass of the draft is worth its time, a bool.

        ``reached`` float32 ``[B]``: the chance that all of a row's draft is accepted. ``goes_on``
        bool ``[B]``: rows that may draft another token, among those that are ``live``.
        """
        gain = jnp.where(goes_on, reached * self.mean_rate, 0.0)
        return gain.sum() > jnp.where(live, self.price, 0.0).sum()

    def learned(self, levels: Array, lengths: Array, accepted: Array) -> Ending:
        """Take up a draft of ``lengths [B]`` tokens of ``levels [B, gamma]`` that was verified.

        A token counts if all before it were ``accepted [B]``. So what is learned depends on no
        token that was drawn behind the one that was rejected.
        """
        index = jnp.arange(levels.shape[1], dtype=jnp.int32)[None]
        tried = (index < lengths[:, None]) & (index <= accepted[:, None])
        taken = index < jnp.minimum(lengths, accepted)[:, None]
        at = levels[..., None] == jnp.arange(LEVELS, dtype=jnp.int32)[None, None]

        def added(before: Array, counts: Array) -> Array:
            fade = 0.5 ** (1 / MEMORY)
            return fade * before + (at & counts[..., None]).sum(axis=1, dtype=jnp.float32)

        return dataclasses.replace(
            self, tried=added(self.tried, tried), taken=added(self.taken, taken)
        )


def level_of(logits: Array, temperature: Array | None, axis_name: Axes | None = None) -> Array:
    """How certain drafts of ``logits [B, V]`` are: a level int32 ``[B]``, below `LEVELS`.

    ``temperature [B]``: None for rows that are greedy. ``axis_name`` as in
    `jspec.ops.sample.sample`.
    """
    logits = cleaned(logits)
    largest = logits.max(axis=-1, keepdims=True)
    if axis_name is not None:
        largest = lax.pmax(largest, axis_name)
    below = jnp.where(logits == largest, 0.0, logits - largest)
    if temperature is not None:
        below = below / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    mass = jnp.exp(below).sum(axis=-1)
    if axis_name is not None:
        mass = lax.psum(mass, axis_name)
    others = jnp.maximum(1 - 1 / mass, 0.5**LEVELS)
    return jnp.clip(-jnp.log2(others), 0, LEVELS - 1).astype(jnp.int32)
