"""Stochastic verification in Triton: one pass over the logits, then launches that read few tiles.

The residual of a draft with logits reads both tiles of the rejected position again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jspec.dispatch import Backend
from jspec.ops.distribution import Settings
from jspec.ops.sampling_limits import refuses_one_pass
from jspec.ops.verify import verified_like
from jspec.ops.vocabulary import TILE, Axes
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.triton.sample import Blocks, blocks_for, sum_tiles, tile_sizes
from jspec.triton.verify import MAX_STOPS
from jspec.typing import Array


def verify_triton(
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
    blocks: Blocks | None = None,
) -> tuple[Array, ...]:
    """The Triton backend of `jspec.ops.stochastic.verify_stochastic`: the fields of `Verified`."""
    from jspec.triton.stochastic_kernel import finish_kernel, judge_kernel, residual_kernel

    batch, count, vocabulary = target_logits.shape
    gamma, tiles = count - 1, -(-vocabulary // TILE)
    blocks = blocks or blocks_for(target_logits)
    constants: dict[str, Any] = {"GAMMA": gamma, "VOCABULARY": vocabulary, **tile_sizes(vocabulary)}
    span = next_power(gamma + 1)
    rate, seeds = settings.rate, settings.seeds

    cells = sum_tiles(target_logits, rate, draft_lengths, 1, blocks)
    # Kernels take the target's arrays where the draft has none, and do not read them.
    draft, draft_cells, has_logits = target_logits, cells, False
    if draft_logits is not None and gamma > 0:
        draft, has_logits = draft_logits, True
        draft_cells = sum_tiles(draft_logits, rate, draft_lengths, 0, blocks)
    accepts, scales, draft_scales = triton_call(
        judge_kernel,
        *(draft_tokens, target_logits, draft_lengths, rate, seeds, positions, *cells),
        *(draft, *draft_cells),
        out=(
            jax.ShapeDtypeStruct((batch, max(gamma, 1)), jnp.int32),
            jax.ShapeDtypeStruct((batch, count, 4), jnp.int32),
            jax.ShapeDtypeStruct((batch, gamma if has_logits else 1, 4), jnp.int32),
        ),
        programs=batch * count,
        warps=blocks.last_warps,
        HAS_LOGITS=has_logits,
        **constants,
    )
    residuals = cells.sums
    if has_logits:
        (residuals,) = triton_call(
            residual_kernel,
            *(target_logits, draft_lengths, rate, cells.exponents),
            *(draft, draft_cells.exponents, accepts, scales, draft_scales),
            out=(jax.ShapeDtypeStruct((batch, tiles, 2), jnp.uint32),),
            programs=batch * tiles,
            warps=blocks.last_warps,
            SPAN=span,
            **{name: x for name, x in constants.items() if name != "WIDTH"},
        )
    return triton_call(
        finish_kernel,
        *(draft_tokens, target_logits, draft_lengths, stop_tokens, rate, seeds, positions),
        *(*cells, draft, draft_cells.exponents, accepts, scales, draft_scales, residuals),
        out=verified_like(draft_tokens),
        programs=batch,
        warps=blocks.last_warps,
        STOPS=stop_tokens.shape[1],
        SPAN=span,
        HAS_LOGITS=has_logits,
        **constants,
    )


def supports(
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
) -> str | None:
    """Why the kernels cannot verify these tokens, or None."""
    stops = stop_tokens.shape[1]
    reason = refuses_one_pass(
        (target_logits, draft_logits),
        (draft_tokens, stop_tokens, positions),
        settings,
        axis_name,
        filtered=filtered,
        rule=rule,
    )
    if reason is None and stops > MAX_STOPS:
        reason = f"{stops} stop tokens a row are over {MAX_STOPS}"
    return reason or refuses_triton()


VERIFY = Backend("triton", verify_triton, supports)
