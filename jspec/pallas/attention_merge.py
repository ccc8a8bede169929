"""The merge of attention over chunks of keys, on Mosaic GPU."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention_cut import PART, Chunks
from jspec.pallas.mosaic import LANES, WARPS, floor_power, starts, store, tile_layout
from jspec.typing import Array

HEADS = 8  # heads that a program merges at most
LOADS = 64  # numbers that a thread loads at once at most
LOWEST = -1e30  # the maximum of no score; finite, so that a difference of two is no NaN
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Merge:
    """The merge of the results of chunks, for some heads of a query token at a time."""

    queries: tuple[int, ...]  # [B, T, N, H]
    dtype: jnp.dtype
    kv_heads: int
    chunks: Chunks

    def __call__(self, outs: Array, lses: Array, bounds: Array) -> tuple[Array, Array]:
        """Outputs ``[B, tiles, K, chunks, rows, H]`` and their log-sum-exp, base 2, as output
        ``[B, T, N, H]`` and natural ``[B, T, N]``; ``bounds`` as `reach` gives them."""
        batch, tokens, heads, size = self.queries
        group = heads // self.kv_heads
        rows, columns = floor_power(min(group, HEADS)), min(floor_power(size), PART)
        tile_rows = lses.shape[4]
        if outs.shape[1] > 1 and group != floor_power(group):
            rows = 1  # no part may lie in two tiles
        layout = tile_layout(rows, columns, max_vector=4)
        by_row = layout.reduce(1)
        parts, across = starts(group, rows), starts(size, columns)
        at_once = max(LOADS * WARPS * LANES // (rows * columns * len(across)), 1)
        at_once = min(at_once, 32, self.chunks.count)

        def over_columns(x):
            return lax.broadcast_in_dim(x, (rows, columns), [0])

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def fetch(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def attention_merge(outs, lses, bounds, out, lse):
            program = lax.axis_index("program")
            before, part = lax.div(program, len(parts)), lax.rem(program, len(parts))
            before, shared = lax.div(before, self.kv_heads), lax.rem(before, self.kv_heads)
            row, token = lax.div(before, tokens), lax.rem(before, tokens)
            # The last part ends with the group.
            head = jnp.minimum(part * rows, group - rows)
            query = token * group + head
            tile, tile_slice = lax.div(query, tile_rows), pl.ds(lax.rem(query, tile_rows), rows)
            to = pl.ds(shared * group + head, rows)
            begin, end = bounds[row, tile, 0], bounds[row, tile, 2]
            low = self.chunks.holding(begin)
            last = jnp.maximum(self.chunks.holding(end - 1), low)

            def join(first, carry):
                """Add the chunks from ``first`` on, ``at_once`` of them."""
                top, total, sums = carry
                index = [first + i for i in range(at_once)]
                clamped = [jnp.minimum(c, last) for c in index]
                tiles = [outs.at[row, tile, shared, c, tile_slice] for c in clamped]
                values = [
                    [fetch(x.at[:, pl.ds(at, columns)], layout) for x in tiles] for at in across
                ]
                past = [jnp.where(i <= last, 0, -jnp.inf) for i in index]
                scores = [
                    fetch(lses.at[row, tile, shared, c, tile_slice], by_row) + x
                    for c, x in zip(clamped, past, strict=True)
                ]
                higher = functools.reduce(jnp.maximum, scores, top)
                weights = [jnp.exp2(score - higher) for score in scores]
                decay = jnp.exp2(top - higher)
                sums = [
                    sum(
                        (over_columns(w) * x for w, x in zip(weights, of, strict=True)),
                        old * over_columns(decay),
                    )
                    for old, of in zip(sums, values, strict=True)
                ]
                return higher, sum(weights, start=total * decay), sums

            zero = full((rows, columns), 0, layout)
            carry = full((rows,), LOWEST, by_row), full((rows,), 0, by_row), [zero] * len(across)
            steps = jnp.where(end > begin, lax.div(last - low, at_once) + 1, 0)
            carry = lax.fori_loop(0, steps, lambda i, c: join(low + i * at_once, c), carry)
            top, total, sums = carry
            safe = jnp.where(total > 0, total, 1)
            natural = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
            store(lse.at[row, token, to], natural)
            for at, x in zip(across, sums, strict=True):
                target_ref = out.at[row, token, to, pl.ds(at, columns)]
                store(target_ref, (x / over_columns(safe)).astype(self.dtype))

        call = plgpu.kernel(
            attention_merge,
            out_type=(
                jax.ShapeDtypeStruct(self.queries, self.dtype),
                jax.ShapeDtypeStruct(self.queries[:3], jnp.float32),
            ),
            grid=(batch * tokens * self.kv_heads * len(parts),),
            grid_names=("program",),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(outs, lses, bounds)
