"""Drawing tokens in Triton: one pass over the logits, then one tile of each position again."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.distribution import Settings
from jspec.ops.sample import Role
from jspec.ops.sampling_limits import refuses_one_pass
from jspec.ops.vocabulary import TILE, Axes, Vocabulary
from jspec.triton.call import next_power, refuses_triton, triton_call
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernels.

    Attributes:
        tiles: of a position, summed by a program.
        warps: of a program that sums tiles.
        last_warps: of a program that searches a position's tiles and one tile's tokens.
    """

    tiles: int
    warps: int
    last_warps: int


class Cells(NamedTuple):
    """The tiles of positions, summed.

    Attributes:
        sums: ``[B, T, tiles, 2]``, the lower and upper words of sums of weights.
        tops: float32 ``[B, T, tiles]``, the largest logits.
        exponents: int32 ``[B, T, tiles]``.
    """

    sums: Array
    tops: Array
    exponents: Array


def blocks_for(logits: Array) -> Blocks:
    """Block sizes for logits of this shape, searched with `verify_stochastic`."""
    batch, positions, vocabulary = logits.shape
    sizes = {"batch": batch, "gamma": positions - 1, "vocabulary": vocabulary}
    return Blocks(**tuned.block("verify_stochastic", "triton", sizes))


def tile_sizes(vocabulary: int) -> dict[str, Any]:
    """The constants of kernels that read the tiles of a position."""
    tiles = -(-vocabulary // TILE)
    guard = Vocabulary(vocabulary).guard_bits
    return {"TILES": tiles, "WIDTH": max(next_power(tiles), 16), "GUARD": guard}


def sum_tiles(
    logits: Array, rates: Array, lengths: Array, bonus_positions: int, blocks: Blocks
) -> Cells:
    """The tiles of the first ``lengths [B] + bonus_positions`` positions of each row."""
    from jspec.triton.distribution_kernel import tiles_kernel

    batch, positions, vocabulary = logits.shape
    tiles = -(-vocabulary // TILE)
    shape = (batch, positions, tiles)
    return Cells(
        *triton_call(
            tiles_kernel,
            *(logits, rates, lengths),
            out=(
                jax.ShapeDtypeStruct((*shape, 2), jnp.uint32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.int32),
            ),
            programs=batch * positions * -(-tiles // blocks.tiles),
            warps=blocks.warps,
            VOCABULARY=vocabulary,
            POSITIONS=positions,
            BONUS_POSITIONS=bonus_positions,
            TILES=tiles,
            EACH=blocks.tiles,
        )
    )


def sample_triton(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    role: Role,
    filtered: bool,
    axis_name: Axes | None,
    blocks: Blocks | None = None,
) -> Array:
    """The Triton backend of `jspec.ops.sample.sample`."""
    from jspec.triton.sample_kernel import draw_kernel

    batch, count, vocabulary = logits.shape
    blocks = blocks or blocks_for(logits)
    none = jnp.zeros(batch, jnp.int32)
    cells = sum_tiles(logits, settings.rate, none, count, blocks)
    (tokens,) = triton_call(
        draw_kernel,
        *(logits, settings.rate, settings.seeds, positions, *cells),
        out=(jax.ShapeDtypeStruct((batch, count), jnp.int32),),
        programs=batch * count,
        warps=blocks.last_warps,
        VOCABULARY=vocabulary,
        POSITIONS=count,
        ROLE=int(role),
        **tile_sizes(vocabulary),
    )
    return tokens


def supports(
    logits: Array,
    settings: Settings,
    positions: Array,
    *,
    filtered: bool,
    axis_name: Axes | None,
    **attributes: Any,
) -> str | None:
    """Why the kernels cannot draw from these logits, or None."""
    reason = refuses_one_pass((logits,), (positions,), settings, axis_name, filtered=filtered)
    return reason or refuses_triton()


SAMPLE = Backend("triton", sample_triton, supports)
