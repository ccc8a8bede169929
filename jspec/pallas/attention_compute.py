"""The computing warpgroups of attention on Mosaic GPU: softmax and weighted sum of values."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention_cut import Blocks, Items, Schedule, Shape
from jspec.pallas.attention_merge import LOG2E, LOWEST
from jspec.pallas.matmul import TILE, add_matmul, matmul, overlapped_matmuls, swizzled_channels

NARROW = 64  # channels up to which overlapping two matmuls takes longer than one after the other


@dataclasses.dataclass(frozen=True)
class Compute:
    """Attention of a tile of query rows over the blocks of an item, as they arrive."""

    shape: Shape
    scale: float
    window: int | None
    softcap: float | None
    blocks: Blocks

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.blocks, self.shape.slots)

    def __call__(self, group, items: Items, smem, results, full, free, clean):
        """The body of a loop that computes an item, for the warpgroup number ``group``.

        ``smem``: buffers of queries, their last positions, keys, values, and of results on their
        way to ``results`` in global memory. ``full``: barriers that say that a buffer was filled;
        ``free``: that it was read; ``clean``: that values past the end were set to 0. The carry:
        blocks computed and items read so far, and the item.
        """
        q_smem, last_smem, k_smem, v_smem, out_smem, row_smem = smem
        shape, keys, (key_stages, value_stages) = self.shape, self.blocks.keys, self.blocks.stages
        channels, part, piece = shape.channels, shape.part, swizzled_channels(shape.channels)
        stack, half = lax.div(group, shape.halves), lax.rem(group, shape.halves)
        stack_rows, staged = pl.ds(stack * TILE, TILE), pl.ds(group * TILE, TILE)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        # Scores are kept in the base of the exponential function that the GPU has.
        unit = 1.0 if self.softcap is not None else self.scale * LOG2E

        def vector(value):
            return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

        def over_columns(x, columns):
            return lax.broadcast_in_dim(x, (TILE, columns), [0])

        def index(shape, dimension):
            return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)

        def fetch(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def clear_past_end(slot, at, end):
            # Slots past the length may hold anything, and 0 * NaN is NaN.
            @pl.when(stack == 0)
            def _():
                for channel in range(0, channels, piece):  # in pieces, to use few registers
                    piece_ref = v_smem.at[slot, half, :, pl.ds(channel, piece)]
                    values = fetch(piece_ref, plgpu.Layout.WGMMA)
                    piece_ref[...] = jnp.where(index((keys, piece), 0) + at < end, values, 0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(clean.at[slot])

            plgpu.barrier_wait(clean.at[slot])

        def compute(step, carry):
            (done, read), item = carry
            after = self.schedule.item(items, step + 1)
            count, end, side = item.blocks, item.end, lax.rem(read, self.blocks.sides)
            plgpu.barrier_wait(full[0].at[side])
            limit = fetch(last_smem.at[side, stack_rows], by_row)

            def masked(scores, i):
                begins, at = self.schedule.at(item, i)
                position = index((TILE, keys), 1) + at
                visible = (position >= begins) & (position <= over_columns(limit, keys))
                if self.window is not None:
                    visible = visible & (position > over_columns(limit - self.window, keys))
                return jnp.where(visible, scores, -jnp.inf)

            def weigh(scores, i, top, total, mask):
                """The weights of block ``i``, and the factor by which earlier sums decay."""
                if self.softcap is not None:
                    scores = jnp.tanh(scores * (self.scale / self.softcap)) * self.softcap * LOG2E
                if mask:
                    scores = masked(scores, i)
                higher = jnp.maximum(top, scores.max(axis=1) * unit)
                decay = jnp.exp2(top - higher)
                weights = jnp.exp2(scores * unit - over_columns(higher, keys))
                total = total * decay + weights.sum(axis=1)
                return higher, total, decay, weights

            def query_and_keys(slot):
                return q_smem.at[side, stack_rows], k_smem.at[slot].transpose((1, 0))

            def scores_of(i):
                slot = lax.rem(done + i, key_stages)
                plgpu.barrier_wait(full[1].at[slot])
                scores = matmul(*query_and_keys(slot))
                plgpu.barrier_arrive(free[1].at[slot])
                return scores

            def block(i, carry, mask):
                acc, top, total = carry
                top, total, decay, weights = weigh(scores_of(i), i, top, total, mask)
                slot = lax.rem(done + i, value_stages)
                plgpu.barrier_wait(full[2].at[slot])
                weights = weights.astype(v_smem.dtype)
                acc = add_matmul(
                    acc * over_columns(decay, channels), weights, v_smem.at[slot, half]
                )
                plgpu.barrier_arrive(free[2].at[slot])
                return acc, top, total

            def overlapped_block(i, carry, mask):
                """The scores of block ``i``, overlapped with the value sum of the block before."""
                acc, top, total, weights = carry
                slot, before = lax.rem(done + i, key_stages), lax.rem(done + i - 1, value_stages)
                plgpu.barrier_wait(full[1].at[slot])

                def between(scores):
                    plgpu.barrier_arrive(free[1].at[slot])
                    higher, sums, *rest = weigh(scores, i, top, total, mask)
                    # The compiler may move the wait before arithmetic, but not before a store:
                    # this store keeps the arithmetic overlapped with the second matmul.
                    row_smem[1, staged] = sums
                    return higher, sums, *rest

                (higher, sums, decay, weights), acc = overlapped_matmuls(
                    *query_and_keys(slot),
                    lambda: plgpu.barrier_wait(full[2].at[before]),
                    (acc, weights, v_smem.at[before, half]),
                    between,
                )
                plgpu.barrier_arrive(free[2].at[before])
                return (
                    acc * over_columns(decay, channels),
                    higher,
                    sums,
                    weights.astype(v_smem.dtype),
                )

            def through(begin, end, block, carry):
                plain = jnp.clip(item.plain, begin, jnp.maximum(end, begin))
                carry = lax.fori_loop(begin, plain, lambda i, c: block(i, c, False), carry)
                return lax.fori_loop(plain, end, lambda i, c: block(i, c, True), carry)

            acc = plgpu.layout_cast(jnp.zeros((TILE, channels), jnp.float32), plgpu.Layout.WGMMA)
            top, total = vector(LOWEST), vector(0)
            if channels > NARROW:
                top, total, _decay, weights = weigh(scores_of(0), 0, top, total, True)
                carry = acc, top, total, weights.astype(v_smem.dtype)
                acc, top, total, weights = through(1, count, overlapped_block, carry)
            else:
                acc, top, total = through(0, count - 1, block, (acc, top, total))
                scores = scores_of(count - 1)
                top, total, decay, weights = weigh(scores, count - 1, top, total, True)
                acc, weights = acc * over_columns(decay, channels), weights.astype(v_smem.dtype)
            final = lax.rem(done + count - 1, value_stages)
            plgpu.barrier_arrive(free[0].at[side])
            plgpu.barrier_wait(full[2].at[final])
            _, at = self.schedule.at(item, count - 1)
            pl.when(at + keys > end)(lambda: clear_past_end(final, at, end))
            acc = add_matmul(acc, weights, v_smem.at[final, half])
            plgpu.barrier_arrive(free[2].at[final])

            # Blocks without a mask are read by all queries, but not by padding.
            saw = (total > 0) & (limit >= 0)
            safe = jnp.where(saw, total, 1)
            place = item.row, item.tile, item.head, item.chunk
            out, lse = (x.at[*place] for x in results)
            acc = jnp.where(over_columns(saw, channels), acc * over_columns(1 / safe, channels), 0)
            for i, at in enumerate(range(0, channels, part)):
                # The other buffer is still being read.
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                out_smem[i % 2, staged] = acc[:, at : at + part].astype(out_smem.dtype)
                if i == 0:
                    row_smem[0, staged] = jnp.where(saw, top + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                for j, row_count in enumerate(shape.stored_rows):

                    @pl.when(stack == j)
                    def _(i=i, at=at, j=j, row_count=row_count):
                        source = out_smem.at[i % 2, pl.ds(group * TILE, row_count)]
                        columns = pl.ds(half * channels + at, part)
                        plgpu.copy_smem_to_gmem(source, out.at[pl.ds(j * TILE, row_count), columns])

                if i == 0:
                    pl.when(half == 0)(
                        lambda: plgpu.copy_smem_to_gmem(row_smem.at[0, staged], lse.at[stack_rows])
                    )

            return (done + count, read + 1), after

        return compute
