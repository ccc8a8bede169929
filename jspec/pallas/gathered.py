"""Gathered attention on Mosaic GPU: selected slots are copied to shared memory one by one.

A tile of queries holds those of 8 KV heads where the heads share a list and have few rows each: it
is multiplied with the keys of all of them, and each query sees its own head's alone; a tile with
fewer rows would cost the same. Otherwise it holds those of one head. A list is cut into chunks,
each of which gives an output with its log-sum-exp, and `Merge` joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.attention.gathered import gathered_sizes
from jspec.ops.attention.softmax import grouped
from jspec.pallas.attention import lowered_once
from jspec.pallas.attention_cut import EVERYTHING, PART, SHARED, Chunks
from jspec.pallas.attention_merge import Merge
from jspec.pallas.gathered_compute import COLUMNS, Compute
from jspec.pallas.gathered_copy import HEADS, Buffers, Cut, RowCopier, SlotCopier, Sources
from jspec.pallas.matmul import TILE, swizzled
from jspec.pallas.mosaic import refuses_pallas
from jspec.sharding import opaque
from jspec.typing import Array

LEAST_BLOCKS = 4  # of a chunk, where there are several


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    They follow from the sizes of a batch row, never from the batch or counts: a row's arithmetic
    must not depend on its neighbours.

    Attributes:
        keys: of a block where 8 heads are read together, a multiple of 64.
        single_keys: of a block of one head, a multiple of 64.
        buffers: for blocks of keys and of values together, at most; 6 or more keep several blocks
            in flight.
        chunks: of a list, at most.
    """

    keys: int
    single_keys: int
    buffers: int
    chunks: int


def blocks_for(sizes: Mapping[str, int]) -> Blocks:
    """Block sizes for a selection of these sizes."""
    return Blocks(**tuned.block("gathered_attention", "pallas", sizes))


def cut_for(q: Array, k: Array, selected: Array, listed: int, blocks: Blocks) -> Cut:
    """How to cut lists of ``listed`` slots."""
    kv_heads, size = k.shape[2:]
    rows = q.shape[1] * q.shape[2] // kv_heads
    is_shared = selected.ndim == 2 and kv_heads % HEADS == 0
    together = HEADS if is_shared and rows * HEADS <= TILE else 1
    keys = blocks.keys if together > 1 else blocks.single_keys
    queries, staged = 2 * TILE * size * k.dtype.itemsize, 2 * TILE * COLUMNS * 4
    buffers = (SHARED - queries - staged) // (keys * (size * k.dtype.itemsize + 4))
    buffers = min(buffers, blocks.buffers)
    stages = ((buffers + 1) // 2, buffers // 2) if together > 1 else (buffers // 2, buffers // 2)
    slots = keys // together
    chunks = max(1, min(blocks.chunks, -(-listed // slots) // LEAST_BLOCKS))
    return Cut(together, slots, stages, chunks)


def gathered_pallas(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    counts: Array | None,
    log_weights: Array | None = None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
    blocks: Blocks | None = None,
) -> tuple[Array, Array]:
    """The Pallas backend of `jspec.ops.gathered_attention`."""
    assert log_weights is None  # `refuses`
    assert v is not None
    blocks = blocks or blocks_for(gathered_sizes(q, k, v, positions, selected))
    cut = cut_for(q, k, selected, selected.shape[-1] + tail.shape[1], blocks)
    groups = k.shape[2] // cut.together
    heads = q.shape[2] // groups
    lists = _listed(positions, selected, tail, context_len, counts, cut)
    kernel = _Partials(heads, scale, softcap, cut)
    last = jnp.repeat(positions, heads, axis=1)
    attend = functools.partial(lowered_once, kernel)
    out, lse = opaque(attend, grouped(q, groups), last, k, v, *lists)
    merge = Merge(q.shape, q.dtype, groups, Chunks(((cut.chunks, 1),)))
    bounds = jnp.broadcast_to(jnp.array([0, 0, cut.chunks], jnp.int32), (len(q), 1, 3))
    return opaque(functools.partial(lowered_once, merge), out, lse, bounds)


def _listed(
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    counts: Array | None,
    cut: Cut,
) -> tuple[Array, Array, Array]:
    """The slots of each list, those of the tail first; there is one where the heads share it.

    Returns int32 ``[B, lists, L]``, L a multiple of a block: the slots, and in place of one that no
    query reads one that is read, as what it holds is multiplied with 0; int32 ``[B, lists, L *
    together]``, for each head of a slot, the position from which on it is read; and int32 ``[B,
    lists]``, how many of the slots are to be looked at.
    """
    batch, count = len(selected), selected.shape[-1]
    selected = selected.reshape(batch, -1, count)
    is_selected = selected >= 0
    if counts is not None:
        index = jnp.arange(count, dtype=jnp.int32)
        is_selected &= index[None, None] < counts.reshape(batch, -1)[..., None]
    after = context_len[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    after = jnp.where(tail >= 0, after, EVERYTHING)
    of_each = (*selected.shape[:2], tail.shape[1])
    tail, after = (jnp.broadcast_to(x[:, None], of_each) for x in (tail, after))
    slots = jnp.concatenate([tail, selected], axis=2)
    begins = jnp.concatenate([after, jnp.where(is_selected, 0, EVERYTHING)], axis=2)
    is_read = begins <= positions.max(axis=1)[:, None, None]
    slots = jnp.where(is_read, slots, jnp.where(is_read, slots, 0).max(axis=2, keepdims=True))
    index = jnp.arange(1, slots.shape[2] + 1, dtype=jnp.int32)[None, None]
    counts = jnp.where(is_read, index, 0).max(axis=2)
    spare = ((0, 0), (0, 0), (0, -slots.shape[2] % cut.slots))
    slots = jnp.pad(slots, spare, mode="edge")
    begins = jnp.pad(jnp.where(is_read, begins, EVERYTHING), spare, constant_values=EVERYTHING)
    return slots, jnp.repeat(begins, cut.together, axis=2), counts


@dataclasses.dataclass(frozen=True)
class _Partials:
    """Attention over each chunk of a row's list separately."""

    heads: int  # query heads of a group of KV heads
    scale: float
    softcap: float | None
    cut: Cut

    def __call__(
        self, q: Array, last: Array, k: Array, v: Array, slots: Array, begins: Array, counts: Array
    ) -> tuple[Array, Array]:
        """``q [B, groups, T * heads, H]``, ``last [B, T * heads]`` the positions of its rows, and
        what `_listed` gives.

        Returns float32 outputs ``[B, 1, groups, chunks, rows, H]`` and the log-sum-exp of the
        scores, base 2, float32 ``[B, 1, groups, chunks, rows]``.
        """
        batch, groups, count, size = q.shape
        rows = -(-count // 8) * 8
        q = jnp.pad(q, ((0, 0), (0, 0), (0, TILE - count), (0, 0)))
        last = jnp.pad(last, ((0, 0), (0, TILE - count)), constant_values=-1)
        (key_stages, value_stages), keys = self.cut.stages, self.cut.keys
        items = batch * groups * self.cut.chunks
        parts = (batch, 1, groups, self.cut.chunks, rows)

        def gathered_chunks(*refs):
            pl.run_scoped(
                lambda *scratch: self._kernel(refs, scratch, groups, items),
                (swizzled((2, TILE, size), k.dtype), plgpu.SMEM((2, TILE), jnp.int32)),
                swizzled((key_stages, keys, size), k.dtype),
                plgpu.SMEM((key_stages, keys), jnp.int32),
                swizzled((value_stages, keys, size), k.dtype),
                (plgpu.SMEM((2, TILE, COLUMNS), jnp.float32), plgpu.SMEM((TILE,), jnp.float32)),
                # Of queries, keys and values: filled by so many copies, and read.
                [
                    plgpu.Barrier(num_arrivals=n, num_barriers=m)
                    for n, m in zip((2, *self.cut.arrivals), (2, *self.cut.stages), strict=True)
                ],
                [plgpu.Barrier(num_barriers=n) for n in (2, *self.cut.stages)],
                collective_axes="group",
            )

        call = plgpu.kernel(
            gathered_chunks,
            out_type=(
                jax.ShapeDtypeStruct((*parts, size), jnp.float32),
                jax.ShapeDtypeStruct(parts, jnp.float32),
            ),
            grid=(min(multiprocessors(), items),),
            grid_names=("program",),
            num_threads=2,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return call(q, last, k, v, slots, begins, counts)

    def _kernel(self, refs, scratch, groups, items):
        """A warpgroup that computes, and one that copies; both take the same items in order."""
        *sources, counts, out, lse = refs
        *smem, staged, full, free = scratch
        program = lax.axis_index("program")
        programs = min(multiprocessors(), items)
        steps = lax.div(items - program + programs - 1, programs)

        def each_item(body, start):
            """Run ``body(step, place, first, count, carry)`` for each item: where it lies, the
            first of its blocks, and how many there are."""

            def step(i, carry):
                item = program + i * programs
                group, rest = lax.rem(item, groups), lax.div(item, groups)
                chunk, row = lax.rem(rest, self.cut.chunks), lax.div(rest, self.cut.chunks)
                listed = counts[row, group if counts.shape[1] > 1 else 0]
                blocks = lax.div(listed + self.cut.slots - 1, self.cut.slots)
                first = lax.div(chunk * blocks, self.cut.chunks)
                count = lax.div((chunk + 1) * blocks, self.cut.chunks) - first
                return body(i, (row, group, chunk), first, count, carry)

            return lax.fori_loop(0, steps, step, start)

        @pl.when(lax.axis_index("group") == 0)
        def _():
            compute = Compute(self.cut, self.heads, lse.shape[4], self.scale, self.softcap)
            each_item(compute(smem, staged, (out, lse), full, free), jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("group") == 1)
        def _():
            copier = SlotCopier if self.cut.together > 1 else RowCopier
            copier = copier(self.cut, Sources(*sources), Buffers(*smem), full, free)
            copier.finish(steps, each_item(copier.item, copier.start()))


def refuses(
    q: Array, k: Array, v: Array | None, selected: Array, log_weights: Array | None
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    rows, size = q.shape[1] * q.shape[2] // k.shape[2], k.shape[3]
    if v is None:
        return "the values are in the keys"
    if len(k) != len(q):
        return f"k {k.shape} has slots that all rows of q {q.shape} read"
    if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q of {q.dtype}, k and v of {k.dtype} are not all bfloat16 or float16"
    if log_weights is not None:
        return "log_weights are given; it adds none"
    if rows > TILE:
        return f"T * G = {rows} query rows of a KV head are over {TILE}"
    if size % 16 or size > PART or v.shape[3] != size:
        return f"H={size} and H'={v.shape[3]} are not one multiple of 16 up to {PART}"
    if k.size // len(k) >= 2**31:
        return f"k {k.shape} has more elements a batch row than int32 counts"
    if 0 in selected.shape or q.size == 0:
        return f"selected {selected.shape} leaves nothing to gather"
    return None


def _supports(q, k, v, positions, selected, *args, log_weights=None, **kwargs) -> str | None:
    return refuses(q, k, v, selected, log_weights) or refuses_pallas()


GATHERED = Backend("pallas", gathered_pallas, _supports)
