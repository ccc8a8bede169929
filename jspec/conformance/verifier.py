"""The interface of a verifier, which drafts and verifies one block a row, and jspec's own."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.ops.sample import Role, Sampling, sample
from jspec.ops.stochastic import Rule, verify_stochastic
from jspec.typing import Array

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Verifier(Protocol):
    def __call__(
        self,
        draft_logits: Floats,
        target_logits: Floats,
        *,
        temperature: float,
        top_p: float,
        seeds: NDArray[np.uint32],
        positions: NDArray[np.int32],
    ) -> ArrayLike:
        """Draw draft tokens, verify them, and return the committed tokens of one block a row.

        Args:
            draft_logits: float32 ``[N, gamma, V]``; gamma may be 0.
            target_logits: float32 ``[N, gamma + 1, V]``.
            temperature: of draft and target; 0 is greedy.
            top_p: of draft and target; 1 is off.
            seeds: uint32 ``[N]``, seeds of the requests. A verifier with its own random numbers
                may ignore them and ``positions``.
            positions: int32 ``[N]``, positions of the first tokens of the blocks.

        Returns:
            Integers ``[N, gamma + 1]``, -1 after the end of a row's block.
        """
        ...


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


def load(name: str) -> Verifier:
    """Import the verifier ``module:function``; raises `ValueError` if there is none."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"--verifier {name!r} must be module:function, as in my.package:verify")
    try:
        verifier = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(
            f"--verifier {name!r}: {error}; run it where the module can be found"
        ) from None
    if not callable(verifier):
        raise ValueError(f"--verifier {name!r}: {module} has no function {function!r}")
    _check_signature(name, verifier)
    return cast(Verifier, verifier)


def _check_signature(name: str, verifier: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(verifier)
    except ValueError:
        return  # of a callable that says nothing
    settings = dict.fromkeys(("temperature", "top_p", "seeds", "positions"))
    try:
        signature.bind(None, None, **settings)
    except TypeError as error:
        raise ValueError(f"--verifier {name!r}: {error}; see docs/conformance.md") from None
