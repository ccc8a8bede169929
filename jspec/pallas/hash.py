"""Hamming scores of hash codes on Mosaic GPU, bound by memory bandwidth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.hash import hamming_sizes
from jspec.pallas.codes import Codes, padded_slots, refuses_codes
from jspec.pallas.inline import GPU, TILE, Inline, slot_layout
from jspec.pallas.mosaic import floor_power, refuses_pallas
from jspec.sharding import opaque
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class ScoreBlocks:
    """Block sizes of scoring: ``slots`` per program, a power of 2 and at least `TILE`."""

    slots: int


def blocks_for(sizes: Mapping[str, int], slots: int) -> ScoreBlocks:
    """Block sizes for codes of these sizes, in rows of ``slots``, at least `TILE`."""
    block = tuned.block("hamming_scores", "pallas", sizes)["slots"]
    return ScoreBlocks(max(min(block, floor_power(slots)), TILE))


def hamming_pallas(
    q_codes: Array,
    k_codes: Array,
    lengths: Array,
    norms: Array | None,
    *,
    blocks: ScoreBlocks | None = None,
    inline: Inline = GPU,
) -> Array:
    """The Pallas backend of `jspec.ops.hash.hamming_scores`; ``lengths``: int32 ``[B]``.

    ``inline``: `jspec.pallas.inline.INTERPRETED` for the interpreter.
    """
    sizes, slots = hamming_sizes(q_codes, k_codes), k_codes.shape[1]
    if padded := padded_slots(slots) - slots:
        pad = [(0, 0), (0, padded), (0, 0)]
        k_codes = jnp.pad(k_codes, [*pad, (0, 0)])
        norms = None if norms is None else jnp.pad(norms, pad)
    codes = Codes.of(q_codes, k_codes)
    per_program = (blocks or blocks_for(sizes, codes.slots)).slots
    tiles = per_program // TILE

    chunks = -(-codes.slots // per_program)

    # All tiles of a program are on their way before the first is scored; other programs of the
    # multiprocessor score meanwhile.
    def hamming_scores(q, k, lengths, *refs):
        *norm_refs, out, memory, arrived = refs
        # Heads of the same slots are adjacent in memory: programs that run together read them.
        program = lax.axis_index("program")
        part, chunk = lax.rem(program, codes.parts), lax.div(program, codes.parts)
        batch, chunk = lax.div(chunk, chunks), lax.rem(chunk, chunks)
        # The last chunk ends with the row: slots in two chunks are written twice and alike.
        first = jnp.minimum(chunk * per_program, codes.slots - per_program)
        length = lengths[batch]

        def at(tile: int, head: int):
            return batch, part * codes.heads + head, pl.ds(first + tile * TILE, TILE)

        @pl.when(first < length)
        def _():
            rows, columns = pl.ds(first, per_program), pl.ds(part * codes.columns, codes.columns)
            codes.copy(k.at[batch, rows, columns], memory, arrived, tiles)
            for tile in range(tiles):
                keys = codes.load(memory, arrived, tile)
                slot = first + tile * TILE + slot_in_tile()
                for head, shared in enumerate(codes.scores(keys, q, batch, part, inline)):
                    to = at(tile, head)
                    if not norm_refs:
                        out[to] = jnp.where(slot < length, shared, -1)
                        continue
                    norm = norm_refs[0].at[batch, to[2], to[1]]
                    norm = plgpu.load(norm, layout=slot_layout(), optimized=False)  # pyright: ignore[reportCallIssue]
                    scaled = (2 * shared - codes.highest).astype(jnp.float32) / (32 * codes.words)
                    out[to] = jnp.where(slot < length, norm * scaled, -jnp.inf)

        @pl.when(first >= length)
        def _():
            nothing = jnp.full((TILE,), -jnp.inf if norm_refs else -1, dtype)
            nothing = plgpu.layout_cast(nothing, slot_layout())
            for tile in range(tiles):
                for head in range(codes.heads):
                    out[at(tile, head)] = nothing

    def slot_in_tile() -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=slot_layout())

    dtype = jnp.int32 if norms is None else jnp.float32
    call = plgpu.kernel(
        hamming_scores,
        out_type=jax.ShapeDtypeStruct((codes.batch, codes.kv_heads, codes.slots), dtype),
        grid=(codes.batch * chunks * codes.parts,),
        grid_names=("program",),
        scratch_types=[
            codes.memory(tiles),
            plgpu.Barrier(num_arrivals=1, num_barriers=tiles),
        ],
        # No memory is both read and written, but by copies that barriers wait for.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    flat = k_codes.reshape(codes.batch, codes.slots, codes.kv_heads * codes.words)
    queries = q_codes.reshape(codes.batch, codes.tokens * q_codes.shape[2], codes.words)
    arguments = queries, flat, lengths, *([] if norms is None else [norms])
    return opaque(call, *arguments)[:, :, :slots]


def _supports(q_codes: Array, k_codes: Array, *rest: Array | None) -> str | None:
    return refuses_codes(q_codes, k_codes) or refuses_pallas()


HAMMING_SCORES = Backend("pallas", hamming_pallas, _supports)
