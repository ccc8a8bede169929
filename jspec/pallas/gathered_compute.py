"""The computing warpgroup of gathered attention on Mosaic GPU: softmax and sum of values."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention_merge import LOG2E, LOWEST
from jspec.pallas.gathered_copy import Cut
from jspec.pallas.matmul import TILE, add_matmul, matmul

COLUMNS = 16  # channels of a result that are on their way to global memory at a time


@dataclasses.dataclass(frozen=True)
class Compute:
    """Attention of an item's query rows over its blocks of keys, as they arrive.

    Attributes:
        cut: how lists of slots are cut.
        heads: query heads of an item.
        rows: that are written of a result, a multiple of 8.
        scale: of the scores.
        softcap: of the scores, or None.
    """

    cut: Cut
    heads: int
    rows: int
    scale: float
    softcap: float | None

    def __call__(self, smem, staged, results, full, free):
        """The body of a loop that computes an item.

        ``smem``, ``staged``: buffers of what is read, and of results on their way to ``results``.
        ``full``: barriers that say that a buffer was filled; ``free``: that it was read. The carry:
        blocks computed so far.
        """
        cut, scale, softcap, rows = self.cut, self.scale, self.softcap, self.rows
        (q_smem, last_smem), k_smem, begin_smem, v_smem = smem
        out_smem, lse_smem = staged
        keys, channels = cut.keys, v_smem.shape[2]
        by_row, by_column = plgpu.Layout.WGMMA.reduce((1,)), plgpu.Layout.WGMMA.reduce((0,))
        # Scores are in the base of the exponential function that the GPU has.
        unit = 1.0 if softcap is not None else scale * LOG2E

        def fetch(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def vector(value):
            return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

        def over_columns(x, columns=keys):
            return lax.broadcast_in_dim(x, (TILE, columns), [0])

        def index(dimension):
            shape = (TILE, keys)
            return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)

        def attend(step, place, first, count, done):
            side = lax.rem(step, 2)
            plgpu.barrier_wait(full[0].at[side])
            position = fetch(last_smem.at[side], by_row)

            def is_own_head():
                # Rows are by token, then by head; columns by slot, then by head.
                head = lax.div(lax.rem(index(0), self.heads), self.heads // cut.together)
                return head == lax.rem(index(1), cut.together)

            def block(i, carry):
                acc, top, total = carry
                stage = lax.rem(done + i, k_smem.shape[0])
                plgpu.barrier_wait(full[1].at[stage])
                scores = matmul(q_smem.at[side], k_smem.at[stage].transpose((1, 0)))
                begins = lax.broadcast_in_dim(
                    fetch(begin_smem.at[stage], by_column), (TILE, keys), [1]
                )
                plgpu.barrier_arrive(free[1].at[stage])
                if softcap is not None:
                    scores = jnp.tanh(scores * (scale / softcap)) * softcap * LOG2E
                visible = begins <= over_columns(position)
                if cut.together > 1:
                    visible = visible & is_own_head()
                scores = jnp.where(visible, scores, -jnp.inf)
                higher = jnp.maximum(top, scores.max(axis=1) * unit)
                decay = jnp.exp2(top - higher)
                weights = jnp.exp2(scores * unit - over_columns(higher))
                total = total * decay + weights.sum(axis=1)
                stage = lax.rem(done + i, v_smem.shape[0])
                plgpu.barrier_wait(full[2].at[stage])
                acc = acc * over_columns(decay, channels)
                acc = add_matmul(acc, weights.astype(v_smem.dtype), v_smem.at[stage])
                plgpu.barrier_arrive(free[2].at[stage])
                return acc, higher, total

            zero = jnp.zeros((TILE, channels), jnp.float32)
            carry = plgpu.layout_cast(zero, plgpu.Layout.WGMMA), vector(LOWEST), vector(0)
            acc, top, total = lax.fori_loop(0, count, block, carry)
            plgpu.barrier_arrive(free[0].at[side])
            saw = total > 0
            safe = jnp.where(saw, total, 1)
            acc = acc * over_columns(1 / safe, channels)
            row, group, chunk = place
            out, lse = (x.at[row, 0, group, chunk] for x in results)
            for i, at in enumerate(range(0, channels, COLUMNS)):
                # The other buffer is still being read.
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                out_smem[i % 2] = acc[:, at : at + COLUMNS]
                if i == 0:
                    lse_smem[...] = jnp.where(saw, top + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                target = out.at[:, pl.ds(at, COLUMNS)]
                plgpu.copy_smem_to_gmem(out_smem.at[i % 2, pl.ds(0, rows)], target)
                if i == 0:
                    plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(0, rows)], lse)
            return done + count

        return attend
