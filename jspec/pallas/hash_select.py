"""Selection by hash codes on Mosaic GPU: scores with their histograms, then the slots.

The first launch scores, and writes a *key* for each slot: its score + 1, or 0 for a slot that is
not selected by its score. Keys of 8 or 16 bits lie in words, in the order of the slots. It also
counts the keys of each chunk of a row; adding at computed places, and storing there, is inline
code. In the second launch programs share the rows. Each adds a row's counts, and bisects for the
threshold: the highest key that as many slots reach as are to be selected. Then each thread has
successive slots: the place of a selected one is the number of those selected before it, in earlier
chunks, in earlier threads and in its own.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.gpu import multiprocessors
from jspec.ops.hash import max_score
from jspec.ops.hash_selection import hash_select_sizes
from jspec.pallas.codes import Codes, padded_slots, refuses_codes
from jspec.pallas.inline import GPU, TILE, Inline, code_layout, slot_layout
from jspec.pallas.keys import MAX_CHUNK, Budget, Keys
from jspec.pallas.mosaic import WARPS, Spread, floor_power, iota, load, refuses_pallas, store
from jspec.sharding import opaque
from jspec.typing import Array

MAX_SCORE = 4094  # of the histograms
MAX_SLOTS = 2**30  # of a row, and of a selection
_SHARED_BYTES = 227 * 1024  # shared memory of a program
_PROGRAMS = 4  # of the second launch, for each multiprocessor
_STEP = 16  # words of a thread that it selects from at once, at most


@dataclasses.dataclass(frozen=True)
class SelectBlocks:
    """Block sizes of selection: slots of a ``chunk`` of a row at most, a power of 2."""

    chunk: int


def hash_select_pallas(
    q_codes: Array,
    k_codes: Array,
    counts: Array,
    lengths: Array,
    *,
    k: int,
    sinks: int,
    recent: int,
    blocks: SelectBlocks | None = None,
    inline: Inline = GPU,
) -> Array:
    """The Pallas backend of `jspec.ops.hash_selection.hash_select`: two launches.

    ``counts``, ``lengths``: int32 ``[B, K]``. ``inline``: `jspec.pallas.inline.INTERPRETED` for the
    interpreter.
    """
    sizes, slots = hash_select_sizes(q_codes, k_codes, k=k), k_codes.shape[1]
    blocks = blocks or SelectBlocks(**tuned.block("hash_select", "pallas", sizes))
    highest = max_score(q_codes, k_codes) + 1
    per_word = Keys(highest, slots, TILE, 4).per_word
    padded = padded_slots(slots, per_word)
    if padded > slots:
        k_codes = jnp.pad(k_codes, [(0, 0), (0, padded - slots), (0, 0), (0, 0)])
    codes = Codes.of(q_codes, k_codes)
    words, rows = padded // per_word, codes.batch * codes.kv_heads
    chunk = max(min(blocks.chunk, MAX_CHUNK, floor_power(padded)) // per_word, TILE)
    # Shorter chunks where there are few rows, so that all multiprocessors score.
    while chunk > TILE and codes.batch * codes.parts * -(-words // chunk) < multiprocessors():
        chunk //= 2
    parts = max(_PROGRAMS * multiprocessors() // rows, 1)
    thread_words = min(floor_power(max(words // parts // TILE, 4)), MAX_CHUNK // 4 // TILE)
    keys = Keys(highest, padded, chunk, max(thread_words, chunk // TILE))

    def budget_of(counts, lengths, batch, head) -> Budget:
        return Budget.of(counts[batch, head], lengths[batch, head], slots, k, sinks, recent)

    score = _score(codes, keys, budget_of, inline)
    key_words, records = opaque(score, q_codes, k_codes, counts, lengths)
    select = _select(codes, keys, k, budget_of, inline)
    return opaque(select, key_words, records, counts, lengths)


def _score(codes: Codes, keys: Keys, budget_of, inline: Inline):
    """The launch that writes keys, uint32 ``[B, K, pieces * piece]``, and counts them, int32
    ``[B, K, chunks, bins]``. Words past the last slot that a row selects from are not written."""
    per_word, words, bins = keys.per_word, keys.words, Spread(keys.bins, warps=WARPS)
    steps = keys.chunk // TILE

    # The keys of a word are of slots that lie one after the other, and a thread scores them in
    # tiles of their own: tile j has slot j of each word. A tile is copied again as soon as it is in
    # registers, so that the next word's slots arrive while these are scored.
    def hash_scores(q, k, counts, lengths, out, records, memory, histograms, arrived):
        program = lax.axis_index("program")
        part, chunk = lax.rem(program, codes.parts), lax.div(program, codes.parts)
        batch, chunk = lax.div(chunk, keys.chunks), lax.rem(chunk, keys.chunks)
        # The last chunk ends with the row: words in two chunks are written alike by both, and
        # counted by the first.
        uncounted = chunk * keys.chunk
        first = jnp.minimum(uncounted, words - keys.chunk)
        heads = [part * codes.heads + head for head in range(codes.heads)]
        budgets = [budget_of(counts, lengths, batch, head) for head in heads]
        end = functools.reduce(jnp.maximum, [row.high for row in budgets])
        step_slots = TILE * per_word
        active = jnp.clip(lax.div(end - first * per_word + step_slots - 1, step_slots), 0, steps)
        lane = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=slot_layout())

        def copy(step, place: int) -> None:
            rows, columns = (
                pl.ds(first + step * TILE, TILE),
                pl.ds(part * codes.columns, codes.columns),
            )
            source = k.at[batch, rows, place, columns]
            plgpu.copy_gmem_to_smem(source, memory.at[place], arrived.at[place])

        @pl.when(active > 0)
        def _():
            for place in range(per_word):
                copy(0, place)

        for head in range(codes.heads):
            store(histograms.at[head], zero(bins))
        inline.sync()

        def score_step(step, carry):
            word = first + step * TILE
            packed = [jnp.uint32(0)] * codes.heads
            for place in range(per_word):
                tile = codes.load(memory, arrived, place)
                inline.sync()  # all threads have read the tile
                pl.when(step + 1 < active)(functools.partial(copy, step + 1, place))
                slot = (word + lane) * per_word + place
                scores = codes.scores(tile, q, batch, part, inline)
                for head, (score, row) in enumerate(zip(scores, budgets, strict=True)):
                    scored = (slot >= row.low) & (slot < row.high)
                    key = jnp.where(scored, score + 1, 0)
                    counted = scored & (word + lane >= uncounted)
                    inline.count_at(histograms.at[head], jnp.where(counted, key, -1))
                    packed[head] |= key.astype(jnp.uint32) << jnp.uint32(place * keys.bits)
            for head, value in zip(heads, packed, strict=True):
                out[batch, head, pl.ds(word, TILE)] = value
            return carry

        lax.fori_loop(0, active, score_step, 0)
        inline.sync()
        for index, head in enumerate(heads):
            store(records.at[batch, head, chunk], load(histograms.at[index], bins))

    rows = codes.batch, codes.kv_heads
    call = plgpu.kernel(
        hash_scores,
        out_type=(
            jax.ShapeDtypeStruct((*rows, keys.pieces * keys.piece), jnp.uint32),
            jax.ShapeDtypeStruct((*rows, keys.chunks, keys.bins), jnp.int32),
        ),
        grid=(codes.batch * keys.chunks * codes.parts,),
        grid_names=("program",),
        scratch_types=[
            codes.memory(per_word),
            plgpu.SMEM((codes.heads, keys.bins), jnp.int32),
            plgpu.Barrier(num_arrivals=1, num_barriers=per_word),
        ],
        # Threads wait for each other where the kernel says so.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )

    def run(q_codes, k_codes, counts, lengths):
        by_word = codes.batch, words, per_word, codes.kv_heads * codes.words
        queries = q_codes.reshape(codes.batch, -1, codes.words)
        return call(queries, k_codes.reshape(by_word), counts, lengths)

    return run


def _select(codes: Codes, keys: Keys, k: int, budget_of, inline: Inline):
    """The launch that selects by keys: int32 ``[B, K, k]``."""
    rows = codes.batch * codes.kv_heads
    parts = min(max(_PROGRAMS * multiprocessors() // rows, 1), keys.pieces)
    each = -(-keys.pieces // parts)  # pieces of a program
    bins, layout = Spread(keys.bins, warps=WARPS), code_layout(4)
    step_words = min(keys.thread_words, _STEP)

    def hash_select(words, records, counts, lengths, out, thread_counts):
        program = lax.axis_index("program")
        part, row_index = lax.rem(program, parts), lax.div(program, parts)
        batch, head = lax.div(row_index, codes.kv_heads), lax.rem(row_index, codes.kv_heads)
        row, slots = budget_of(counts, lengths, batch, head), out.at[batch, head]
        lane = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=slot_layout())

        @pl.when(part == 0)
        def _():
            # Slots at both ends, and -1 after them.
            @pl.loop(0, -(-k // TILE))
            def _(step):
                place = step * TILE + lane
                after = place - row.first - row.need
                slot = jnp.where(after < row.last, row.high + after, -1)
                slot = jnp.where(place < row.first, place, slot)
                by_key = (place >= row.first) & (after < 0)
                inline.store_at(slots, jnp.where(by_key | (place >= k), -1, place), slot)

        first_chunk = part * each * (keys.piece // keys.chunk)

        def add_record(chunk, carry):
            total, earlier = carry
            record = load(records.at[batch, head, chunk], bins)
            return total + record, earlier + record * (chunk < first_chunk).astype(jnp.int32)

        total, earlier = lax.fori_loop(0, keys.chunks, add_record, (zero(bins), zero(bins)))
        key = iota(bins)

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) >> 1
            enough = jnp.where(key >= middle, total, 0).sum() >= row.need
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        # Of 1..highest; without a need no slot reaches the threshold and is selected.
        bounds = jnp.int32(1), jnp.int32(keys.highest + 1)
        threshold, _ = lax.fori_loop(0, (keys.highest - 1).bit_length(), halve, bounds)
        # How many slots at the threshold are selected.
        ties = row.need - jnp.where(key > threshold, total, 0).sum()
        above_before = jnp.where(key > threshold, earlier, 0).sum()
        tied_before = jnp.where(key == threshold, earlier, 0).sum()

        used_words = lax.div(row.high + keys.per_word - 1, keys.per_word)
        shape = TILE, step_words
        thread, column = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1)
        )
        of_four = plgpu.broadcasted_iota(jnp.int32, (TILE, 4), 1, layout=layout)

        def load_words(piece, step) -> Array:
            """The next words of each thread; 0 past those that were written."""
            columns = pl.ds(step * step_words, step_words)
            source = words.at[batch, head, piece, :, columns]
            loaded = plgpu.load(source, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            index = (piece * TILE + thread) * keys.thread_words + step * step_words + column
            return jnp.where(index < used_words, loaded, jnp.uint32(0))

        steps = keys.thread_words // step_words
        nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.int32), slot_layout())

        def select_piece(index, before):
            piece = part * each + index

            def count_step(step, carry):
                step_keys = load_words(piece, step)
                sums = (
                    keys.reached(step_keys, key).sum(axis=1) for key in (threshold + 1, threshold)
                )
                return tuple(sum + more for sum, more in zip(carry, sums, strict=True))

            above, reached = lax.fori_loop(0, steps, count_step, (nothing, nothing))
            tied = reached - above
            # Each is at most 2**15 in a piece, and below it before its last thread.
            thread_counts[...] = above | (tied << 16)
            earlier = _before(thread_counts, layout)

            def select_step(step, carry):
                above, tied = carry
                step_keys = load_words(piece, step)
                first_word = (piece * TILE + lane) * keys.thread_words + step * step_words
                for index in range(step_words):
                    four = step_keys[:, index // 4 * 4 : index // 4 * 4 + 4]
                    word = jnp.where(of_four == index % 4, four, jnp.uint32(0))
                    word = word.astype(jnp.int32).sum(axis=1)
                    for place in range(keys.per_word):
                        key = (word >> (place * keys.bits)) & (2**keys.bits - 1)
                        is_above, is_tie = key > threshold, key == threshold
                        selected = is_above | (is_tie & (tied < ties))
                        at = row.first + above + jnp.minimum(tied, ties)
                        slot = (first_word + index) * keys.per_word + place
                        inline.store_at(slots, jnp.where(selected, at, -1), slot)
                        above += is_above.astype(jnp.int32)
                        tied += is_tie.astype(jnp.int32)
                return above, tied

            above_before, tied_before = before
            carry = above_before + (earlier & 0xFFFF), tied_before + (earlier >> 16)
            lax.fori_loop(0, steps, select_step, carry)
            return above_before + above.sum(), tied_before + tied.sum()

        pieces = jnp.clip(lax.div(used_words + keys.piece - 1, keys.piece) - part * each, 0, each)
        lax.fori_loop(0, pieces, select_piece, (above_before, tied_before))

    call = plgpu.kernel(
        hash_select,
        out_type=jax.ShapeDtypeStruct((codes.batch, codes.kv_heads, k), jnp.int32),
        grid=(rows * parts,),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM((TILE,), jnp.int32)],
    )

    def run(words, records, counts, lengths):
        by_thread = (*words.shape[:2], keys.pieces, TILE, keys.thread_words)
        return call(words.reshape(by_thread), records, counts, lengths)

    return run


def zero(spread: Spread) -> Array:
    """Zeros, int32."""
    return plgpu.layout_cast(jnp.zeros(spread.size, jnp.int32), spread.layout())


def _before(counts, layout) -> Array:
    """Of each thread the sum of ``counts [TILE]`` of the threads before it."""
    shape = (TILE, TILE)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=layout) for i in (0, 1))
    all_counts = plgpu.load(counts, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
    all_counts = lax.broadcast_in_dim(all_counts, shape, [1])
    return jnp.where(column < row, all_counts, 0).sum(axis=1)


def refuses(q_codes: Array, k_codes: Array, k: int) -> str | None:
    """Why the kernels cannot select by these codes, or None."""
    if (highest := max_score(q_codes, k_codes)) > MAX_SCORE:
        return f"scores to G T R = {highest} are over {MAX_SCORE}"
    if max(k_codes.shape[1], k) > MAX_SLOTS:
        return f"S={k_codes.shape[1]} and k={k} must be at most {MAX_SLOTS}"
    if reason := refuses_codes(q_codes, k_codes):
        return reason
    codes, keys = Codes.of(q_codes, k_codes), Keys(highest + 1, k_codes.shape[1], TILE, 4)
    needed = 4 * (codes.heads * keys.bins + keys.per_word * TILE * codes.columns)
    if needed > _SHARED_BYTES - 1024:
        return f"tiles and histograms of {needed} bytes do not fit into shared memory"
    return None


def _supports(
    q_codes: Array, k_codes: Array, counts: Array, lengths: Array, *, k: int, **rest: int
) -> str | None:
    return refuses(q_codes, k_codes, k) or refuses_pallas()


HASH_SELECT = Backend("pallas", hash_select_pallas, _supports)
