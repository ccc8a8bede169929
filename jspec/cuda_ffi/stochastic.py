"""Drawing and verifying by random numbers in CUDA kernels, in one pass over the logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.distribution import Settings
from jspec.ops.sample import Role
from jspec.ops.sampling_limits import refuses_arguments
from jspec.ops.verify import verified_like
from jspec.ops.vocabulary import TILE, Axes
from jspec.typing import Array

MAX_TOKENS = 2**24  # of the vocabulary


def supports_sample(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    axis_name: Axes | None,
    **attributes: Any,
) -> str | None:
    """Why the kernel cannot draw from these logits, or None."""
    reason = refuses_arguments((logits,), (positions,), settings, axis_name, max_tokens=MAX_TOKENS)
    return reason or library.refusal("sample")


def supports_verify(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    *,
    axis_name: Axes | None,
    **attributes: Any,
) -> str | None:
    """Why the kernel cannot verify these tokens, or None."""
    reason = refuses_arguments(
        (target_logits, draft_logits),
        (draft_tokens, stop_tokens, positions),
        settings,
        axis_name,
        max_tokens=MAX_TOKENS,
    )
    return reason or library.refusal("sample")


def _workspace(batch: int, targets: int, drafted: int, vocabulary: int) -> jax.ShapeDtypeStruct:
    """What the kernels keep between launches: about 16 bytes for each tile.

    In words as `Workspace::words` counts them; the handler refuses another size.
    """
    positions = targets + drafted
    words = positions * (4 * -(-vocabulary // TILE) + 5) + 6 + 9 * targets
    return jax.ShapeDtypeStruct((batch, words), jnp.uint32)


def _sample(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    role: Role,
    filtered: bool,
    axis_name: Axes | None,
) -> Array:
    batch, count, vocabulary = logits.shape
    tokens = jax.ShapeDtypeStruct(positions.shape, jnp.int32)
    return library.call(
        "sample",
        (tokens, _workspace(batch, count, 0, vocabulary)),
        logits,
        *settings,
        positions,
        vmap_method="broadcast_all",
        filtered=np.bool_(filtered),
        role=np.uint32(role),
    )[0]


def _verify(
    draft_tokens: Array,
    target_logits: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    settings: Settings,
    positions: Array,
    draft_logits: Array | None,
    *,
    rule: str,
    filtered: bool,
    axis_name: Axes | None,
) -> tuple[Array, ...]:
    batch, count, vocabulary = target_logits.shape
    drafts = [] if draft_logits is None or count == 1 else [draft_logits]
    workspace = _workspace(batch, count, (count - 1) * len(drafts), vocabulary)
    return library.call(
        "verify_stochastic",
        (*verified_like(draft_tokens), workspace),
        draft_tokens,
        target_logits,
        draft_lengths,
        stop_tokens,
        *settings,
        positions,
        *drafts,
        vmap_method="broadcast_all",
        block=np.bool_(rule == "block"),
        filtered=np.bool_(filtered),
    )[:-1]


SAMPLE = Backend("cuda", _sample, supports_sample)
VERIFY = Backend("cuda", _verify, supports_verify)
