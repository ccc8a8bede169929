"""Keyed random numbers, and drawing tokens with them.

Every random number belongs to a request, a position and a role, so that a request's tokens do not
depend on its row, its neighbours or how the work was cut into chunks.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.distribution import Settings, cleaned, distribution, draw
from jspec.ops.uint64 import in_64_bits, widen
from jspec.ops.vocabulary import NO_TOKEN, Axes, Vocabulary
from jspec.typing import Array

LOG2_E = int(np.float32(np.log2(np.e)) * 2**23)  # the mantissa of log2(e) as float32


class Role(enum.IntEnum):
    """What a random number is for; numbers of different roles are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of each row; meanings as in `jspec.SamplingParams`.

    Attributes:
        temperature: float32 ``[B]``.
        top_k: int32 ``[B]``.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``.
        seeds: uint32 ``[B]``, or ``[B, 2]`` for upper and lower words.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array

    def in_block(self, starts: Array) -> Sampling:
        """The same settings with seeds for the blocks that begin at ``starts [B]``.

        The random numbers of a block are independent of those without one, also at the same
        positions: see `docs/sampling.md`. Raises `ValueError` where the seeds are already those of
        a block.
        """
        if self.seeds.ndim != 1:
            raise ValueError(
                f"seeds {self.seeds.shape} are those of a block; inside a block verify "
                "with rule='token'"
            )
        words = jnp.stack([starts.astype(jnp.uint32), self.seeds], axis=-1)
        return dataclasses.replace(self, seeds=words)


@in_64_bits
def number(seeds: Array, positions: Array, role: Role) -> Array:
    """64 random bits, uint64, for each of ``positions [B, ...]`` of the rows' ``seeds``.

    ``seeds`` as in `Sampling`. The bits are ``jax.random.bits(key, dtype=uint64)`` of partitionable
    Threefry, whatever JAX's settings are, where key is
    ``fold_in(fold_in(jax.random.key(seed), position), role)``.
    """

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        # 64 random bits are the block that a key makes of 0, and so is the key folded with 0.
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, role), 0))

    for _ in range(positions.ndim - 1):
        one = jax.vmap(one, in_axes=(None, 0))
    words = jax.vmap(one)(_words(seeds), positions)
    return widen(words[..., 0]) << 32 | widen(words[..., 1])


def _words(seeds: Array) -> Array:
    """Upper and lower words of ``seeds``, uint32 ``[B, 2]``."""
    return seeds if seeds.ndim == 2 else jnp.stack([jnp.zeros_like(seeds), seeds], axis=-1)


def settings_of(sampling: Sampling) -> Settings:
    """``sampling`` as backends get it.

    A rate has 16 significant bits, so that a kernel can multiply it with a logit exactly. So a
    temperature counts as one that differs from it by at most 2**-16 of itself; one below 1.4e-6
    counts as that.
    """
    # By its bits: XLA may take the smallest of all numbers for 0.
    is_sampled = lax.bitcast_convert_type(sampling.temperature, jnp.int32) > 0
    rate = jnp.clip(_log2_e_over(sampling.temperature), 2.0**-100, 2.0**20)
    rate = jnp.where(is_sampled, lax.reduce_precision(rate, 8, 15), 0)
    return Settings(rate, sampling.top_k, sampling.top_p, sampling.min_p, _words(sampling.seeds))


@in_64_bits
def _log2_e_over(temperature: Array) -> Array:
    """``float32(log2(e)) / temperature``, correctly rounded, for temperatures in 1e-6..2**101.

    Others count as the nearest of these. In whole numbers: XLA's division of float32 on a GPU is
    off by a last place now and then, which would make the law another on each device.
    """
    clipped = jnp.clip(temperature, np.float32(1e-6), np.float32(2.0**101))
    bits = lax.bitcast_convert_type(clipped, jnp.uint32)
    divisor, exponent = widen(bits & 0x7FFFFF | 2**23), bits >> 23
    # Both mantissas are in 2**23..2**24; one bit more than the 24 of the quotient says how to
    # round. A quotient of float32 never lies halfway.
    below_one = divisor > LOG2_E
    doubled = (jnp.uint64(LOG2_E) << jnp.where(below_one, jnp.uint64(25), 24)) // divisor
    mantissa = (doubled + 1 >> 1).astype(jnp.uint32)
    rate = (254 - exponent - below_one.astype(jnp.uint32) << 23) + (mantissa - 2**23)
    return lax.bitcast_convert_type(rate, jnp.float32)


def sample(
    logits: Array,
    sampling: Sampling,
    positions: Array,
    role: Role,
    *,
    filtered: bool,
    axis_name: Axes | None = None,
    implementation: str | None = None,
) -> Array:
    """Draw the tokens at ``positions`` from ``logits``.

    Args:
        logits: ``[B, T, V]``.
        sampling: the settings of each row.
        positions: int32 ``[B, T]``, absolute, which key the random numbers.
        role: what the random numbers are for.
        filtered: False promises that no row uses top-k, top-p or min-p.
        axis_name: the axis, or axes, of an enclosing `jax.shard_map` over which V is sharded; all
            else is replicated.
        implementation: the backend by name; None is the best one.

    Returns:
        Token ids, int32 ``[B, T]``.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    batch = sampling.seeds.shape[0]
    if logits.ndim != 3 or positions.shape != logits.shape[:2] or logits.shape[0] != batch:
        raise ValueError(
            f"logits {logits.shape} and positions {positions.shape} must be [B, T, V] and [B, T] "
            f"with B={batch}, as the settings are"
        )
    return SAMPLE(
        logits,
        settings_of(sampling),
        positions,
        role=role,
        filtered=filtered,
        axis_name=axis_name,
        implementation=implementation,
    )


def sample_xla(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    role: Role,
    filtered: bool,
    axis_name: Axes | None,
) -> Array:
    """The reference of `sample`."""
    vocabulary = Vocabulary(logits.shape[-1], axis_name)
    rows = distribution(logits, settings, vocabulary, filtered=filtered)
    return draw(rows.weights, rows.shift, number(settings.seeds, positions, role), vocabulary)


def greedy(logits: Array, axis_name: Axes | None = None) -> Array:
    """The token that temperature 0 takes from ``logits [..., V]``; int32 ``[...]``.

    The first of the largest. NaN counts as minus infinity, plus infinity as the largest float32; 0
    where no logit is finite. Every backend and sampling mode takes the same token. ``axis_name`` as
    in `sample`.
    """
    logits = cleaned(logits)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if axis_name is None:
        return first
    largest = logits.max(axis=-1)
    first = first + lax.axis_index(axis_name) * logits.shape[-1]
    is_largest = largest == lax.pmax(largest, axis_name)
    return lax.pmin(jnp.where(is_largest, first, NO_TOKEN), axis_name)


def _sizes(logits: Array, *rest: Array, **static: object) -> dict[str, int]:
    """The sizes that backends are ordered by."""
    batch, tokens, vocabulary = logits.shape
    return {"batch": batch, "tokens": tokens, "vocabulary": vocabulary}


def unfiltered(batch: int) -> Settings:
    """Settings of rows at temperature 1 without a filter, for cases."""
    ones, zeros = jnp.ones(batch), jnp.zeros(batch, jnp.int32)
    return settings_of(Sampling(ones, zeros, ones, jnp.zeros(batch), zeros.astype(jnp.uint32)))


def _cases() -> list[Case]:
    """Logits that leave no choice, so that every random number draws the same token."""

    def certain() -> tuple[np.ndarray, Settings, np.ndarray]:
        tokens = np.arange(30, dtype=np.int32).reshape(2, 15)
        logits = 40 * np.eye(30, dtype=np.float32)[tokens]
        return logits, unfiltered(2), tokens

    static = {"role": Role.DRAFT, "filtered": False, "axis_name": None}
    return [Case("certain", certain, static, small=True)]


SAMPLE = Operation(
    "sample",
    {
        "xla": Backend("xla", sample_xla, always),
        "cuda": "jspec.cuda_ffi.stochastic:SAMPLE",
        "pallas": "jspec.pallas.sample:SAMPLE",
        "triton": "jspec.triton.sample:SAMPLE",
    },
    _sizes,
    _cases,
)
