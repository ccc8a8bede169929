"""jspec's own verifiers, by the token and the block rule."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.conformance.verifier import Floats, Verifier
from jspec.ops.sample import Role, Sampling, sample
from jspec.ops.stochastic import Rule, verify_stochastic
from jspec.typing import Array


def _of_rule(rule: Rule) -> Verifier:
    """jspec's own verification by ``rule``."""

    def verifier(
        draft_logits: Floats,
        target_logits: Floats,
        *,
        temperature: float,
        top_p: float,
        seeds: NDArray[np.uint32],
        positions: NDArray[np.int32],
    ) -> ArrayLike:
        count = len(seeds)
        sampling = Sampling(
            jnp.full((count,), temperature, jnp.float32),
            jnp.zeros((count,), jnp.int32),
            jnp.full((count,), top_p, jnp.float32),
            jnp.zeros((count,), jnp.float32),
            jnp.asarray(seeds),
        )
        logits = jnp.asarray(draft_logits), jnp.asarray(target_logits)
        where = jnp.asarray(positions)
        return np.asarray(_block(*logits, sampling, where, rule=rule, filtered=top_p < 1))

    return verifier


@functools.partial(jax.jit, static_argnames=("rule", "filtered"))
def _block(
    draft_logits: Array,
    target_logits: Array,
    sampling: Sampling,
    positions: Array,
    *,
    rule: Rule,
    filtered: bool,
) -> Array:
    count, gamma, _ = draft_logits.shape
    where = positions[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
    drawing = sampling.in_block(positions) if rule == "block" else sampling
    tokens = jnp.zeros((count, 0), jnp.int32)
    if gamma:
        tokens = sample(draft_logits, drawing, where, Role.DRAFT, filtered=filtered)
    verified = verify_stochastic(
        tokens,
        target_logits,
        jnp.full((count,), gamma, jnp.int32),
        jnp.full((count, 1), -1, jnp.int32),
        sampling,
        positions,
        draft_logits=draft_logits,
        rule=rule,
        filtered=filtered,
    )
    return verified.tokens


token_rule = _of_rule("token")
block_rule = _of_rule("block")
