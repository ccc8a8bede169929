"""What the kernels of `sample` and `verify_stochastic` take, as one text for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from jspec.ops.distribution import Settings
from jspec.ops.vocabulary import TILE, Axes
from jspec.typing import Array

MAX_POSITIONS = 2**10
MAX_TILES_OF_POSITION = 2**10  # of a kernel that holds all of them
MAX_TILES = 2**31 - 1  # of all positions, which kernels count in int32
DTYPES = Settings(jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)


def refuses_arguments(
    logits: Iterable[Array | None],
    tokens: Iterable[Array],
    settings: Settings,
    axis_name: Axes | None,
    *,
    max_tokens: int,
) -> str | None:
    """Why a kernel cannot take these arguments, or None.

    Args:
        logits: ``[B, T, V]`` of the target, then those of the draft, if any.
        tokens: the integer arguments.
        settings: of the rows.
        axis_name: over which V is sharded.
        max_tokens: of the vocabulary.
    """
    target, *drafts = logits
    assert target is not None
    for x in (target, *drafts):
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"logits are {x.dtype}; it reads float32 and bfloat16"
    for x in tokens:
        if x.dtype != jnp.int32:
            return f"tokens are {x.dtype}; it takes int32"
    for name, x, dtype in zip(Settings._fields, settings, DTYPES, strict=True):
        if x.dtype != dtype:
            return f"{name} is {x.dtype}; it takes {jnp.dtype(dtype).name}"
    _, positions, vocabulary = target.shape
    if not 1 <= vocabulary <= max_tokens:
        return f"V={vocabulary} must be in 1..{max_tokens}"
    if positions > MAX_POSITIONS:
        return f"{positions} positions a row are over {MAX_POSITIONS}"
    if axis_name is not None:
        return f"the vocabulary is sharded over {axis_name!r}; it takes a whole one"
    return None


def refuses_one_pass(
    logits: Iterable[Array | None],
    tokens: Iterable[Array],
    settings: Settings,
    axis_name: Axes | None,
    *,
    filtered: bool,
    rule: str = "token",
) -> str | None:
    """Why a kernel cannot serve that sums each tile once and holds those of a position, or None.

    Arguments as those of `refuses_arguments`, and the operation's own.
    """
    logits = list(logits)
    if reason := refuses_arguments(
        logits, tokens, settings, axis_name, max_tokens=MAX_TILES_OF_POSITION * TILE
    ):
        return reason
    if filtered:
        return "filtered=True: it has no search for thresholds, which cuda and xla have"
    if rule == "block":
        return "rule='block': it sums one residual a row, where cuda and xla sum all"
    target = logits[0]
    assert target is not None
    batch, positions, vocabulary = target.shape
    if 0 in target.shape:
        return f"logits {target.shape} leave nothing to launch"
    if batch * positions * -(-vocabulary // TILE) > MAX_TILES:
        return f"logits {target.shape} have more than {MAX_TILES} tiles of {TILE} tokens"
    return None
