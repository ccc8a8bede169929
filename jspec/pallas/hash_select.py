"""Selection by hash codes on Mosaic GPU: scores as small integers, then a search for the threshold.

Mosaic has no atomics, so that no histogram is counted. The first launch scores and writes a *key*
for each slot: its score + 1, or 0 for a slot that takes no part. Keys of 8 or 16 bits lie in words,
in the order of the slots. In the second launch a program per row bisects for the threshold, the
highest key that as many slots reach as are to be selected: with up to 128 bits in 8 passes over
words in registers, 4 keys a word. Where a row is longer than a program's registers, the passes read
it from the L2 cache. Then each thread has successive slots: the place of a selected one is the
number of those selected before, in earlier threads and in its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.hash import max_score
from jspec.ops.hash_selection import hash_select_sizes
from jspec.pallas.codes import (
    TILE,
    Codes,
    CountBits,
    StoreAt,
    code_layout,
    count_bits,
    refuses_codes,
    slot_layout,
    store_at,
)
from jspec.pallas.mosaic import WARPS, Spread, floor_power, iota, load, refuses_pallas, starts
from jspec.sharding import opaque
from jspec.typing import Array

MAX_SCORE = 2**16 - 2  # a key has 16 bits
MAX_SLOTS = 2**30  # of a row, and of a selection
MAX_WORDS = 64  # of a thread: a half of a word counts the keys of all threads
_STEP = 16  # words of a thread that it selects from at once


@dataclasses.dataclass(frozen=True)
class SelectBlocks:
    """Block sizes of selection.

    Attributes:
        slots: that a program scores, a power of 2 and at least 4 `TILE`.
        words: of keys that a thread holds, a power of 2 in 16..64.
    """

    slots: int
    words: int


@dataclasses.dataclass(frozen=True)
class Keys:
    """How the keys of a row lie in words.

    Attributes:
        highest: the highest key.
        slots: of a row.
        thread_words: words of a thread at a time.
    """

    highest: int
    slots: int
    thread_words: int

    @property
    def per_word(self) -> int:
        """Keys of a word: slots next to each other, the first in the lowest bits."""
        return 4 if self.highest < 2**8 else 2

    @property
    def bits(self) -> int:
        """Of a key."""
        return 32 // self.per_word

    @property
    def words(self) -> int:
        """Of a row."""
        return self.slots // self.per_word

    @property
    def piece(self) -> int:
        """Words of a row that a program has at a time."""
        return TILE * self.thread_words

    @property
    def pieces(self) -> int:
        """Of a row."""
        return -(-self.words // self.piece)

    def reached(self, words: Array, key: Array) -> Array:
        """How many keys of each word are at least ``key`` in 1..highest + 1, in two sums.

        uint32: the lower 16 bits are a sum, and the upper ones another. Two keys at a time are in
        fields of twice their size: adding 2**bits - key carries into a field's upper half where the
        key is reached.
        """
        bits = self.bits
        if self.per_word == 2:
            carry = jnp.uint32(2**bits) - key.astype(jnp.uint32)
            low, high = words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)
            return ((low + carry) >> jnp.uint32(16)) + ((high + carry) >> jnp.uint32(16))
        mask, ones = jnp.uint32(0x00FF00FF), jnp.uint32(0x00010001)
        carry = (jnp.uint32(2**bits) - key.astype(jnp.uint32)) * ones
        even, odd = words & mask, (words >> jnp.uint32(8)) & mask
        return (((even + carry) >> jnp.uint32(8)) & ones) + (
            ((odd + carry) >> jnp.uint32(8)) & ones
        )


def both(sums: Array) -> Array:
    """The sum of both halves of words that `Keys.reached` gave, int32."""
    return ((sums & jnp.uint32(0xFFFF)) + (sums >> jnp.uint32(16))).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a row selects: its ``first`` slots, ``need`` of low..high - 1, and its ``last`` ones."""

    low: Array
    high: Array
    first: Array
    need: Array
    last: Array

    @classmethod
    def of(cls, count: Array, length: Array, n: int, k: int, sinks: int, recent: int) -> Budget:
        """Of a row with a budget ``count`` and ``length`` slots, int32 scalars."""
        length = jnp.clip(length, 0, n)
        count = jnp.minimum(jnp.clip(count, 0, k), length)
        low = jnp.minimum(sinks, length)
        high = jnp.maximum(length - recent, low)
        first = jnp.minimum(low, count)
        last = jnp.minimum(length - high, count - first)
        return cls(low, high, first, count - first - last, last)


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
    count: CountBits = count_bits,
    store: StoreAt = store_at,
) -> Array:
    """The Pallas backend of `jspec.ops.hash_selection.hash_select`: two launches.

    ``counts``, ``lengths``: int32 ``[B, K]``. ``count``, ``store``: inline code, or what the
    interpreter runs in its place.
    """
    sizes, slots = hash_select_sizes(q_codes, k_codes, k=k), k_codes.shape[1]
    blocks = blocks or SelectBlocks(**tuned.block("hash_select", "pallas", sizes))
    highest = max_score(q_codes, k_codes) + 1
    per_word = Keys(highest, slots, 0).per_word
    # Whole words, and a tile at least: only small or odd capacities are copied.
    padded = max(-(-slots // per_word) * per_word, per_word * TILE)
    if padded > slots:
        k_codes = jnp.pad(k_codes, [(0, 0), (0, padded - slots), (0, 0), (0, 0)])
    codes = Codes.of(q_codes, k_codes)
    thread_words = floor_power(max(codes.slots // per_word // TILE, 1))
    keys = Keys(highest, codes.slots, max(min(thread_words, blocks.words, MAX_WORDS), _STEP))

    def budget_of(counts, lengths, batch, head) -> Budget:
        return Budget.of(counts[batch, head], lengths[batch, head], slots, k, sinks, recent)

    words = opaque(
        _score(codes, keys, blocks.slots, budget_of, count), q_codes, k_codes, counts, lengths
    )
    return opaque(_select(codes, keys, k, budget_of, store), words, counts, lengths)


def _score(codes: Codes, keys: Keys, slots: int, budget_of, count: CountBits):
    """The launch that writes keys, uint32 ``[B, K, pieces * piece]``; not past those of the row."""
    per_word, words = keys.per_word, keys.words
    tiles = max(min(slots // per_word, floor_power(words)) // TILE, 1)
    per_program = tiles * TILE  # words
    chunks = -(-words // per_program)

    # The keys of a word are of slots that lie one after the other, and a thread scores them in
    # tiles of their own: tile j has slot j of each word.
    def hash_scores(q, k, counts, lengths, out, memory, arrived):
        program = lax.axis_index("program")
        part, chunk = lax.rem(program, codes.parts), lax.div(program, codes.parts)
        batch, chunk = lax.div(chunk, chunks), lax.rem(chunk, chunks)
        # The last chunk ends with the row: words in two chunks are written twice and alike.
        first = jnp.minimum(chunk * per_program, words - per_program)
        columns = pl.ds(part * codes.columns, codes.columns)
        for tile in range(tiles):
            for place in range(per_word):
                rows = pl.ds(first + tile * TILE, TILE)
                index = tile * per_word + place
                plgpu.copy_gmem_to_smem(
                    k.at[batch, rows, place, columns], memory.at[index], arrived.at[index]
                )
        lane = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=slot_layout())
        heads = [part * codes.heads + head for head in range(codes.heads)]
        budgets = [budget_of(counts, lengths, batch, head) for head in heads]
        for tile in range(tiles):
            word = first + tile * TILE
            packed = [jnp.uint32(0)] * codes.heads
            for place in range(per_word):
                codes_of_tile = codes.load(memory, arrived, tile * per_word + place)
                scores = codes.scores(codes_of_tile, q, batch, part, count)
                slot = (word + lane) * per_word + place
                for head, (score, row) in enumerate(zip(scores, budgets, strict=True)):
                    key = jnp.where((slot >= row.low) & (slot < row.high), score + 1, 0)
                    shift = jnp.uint32(place * keys.bits)
                    packed[head] = packed[head] | (key.astype(jnp.uint32) << shift)
            for head, value in zip(heads, packed, strict=True):
                out[batch, head, pl.ds(word, TILE)] = value

    call = plgpu.kernel(
        hash_scores,
        out_type=jax.ShapeDtypeStruct(
            (codes.batch, codes.kv_heads, keys.pieces * keys.piece), jnp.uint32
        ),
        grid=(codes.batch * chunks * codes.parts,),
        grid_names=("program",),
        scratch_types=[
            codes.memory(tiles * per_word),
            plgpu.Barrier(num_arrivals=1, num_barriers=tiles * per_word),
        ],
        # No memory is both read and written, but by copies that barriers wait for.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )

    def run(q_codes, k_codes, counts, lengths):
        by_word = codes.batch, words, per_word, codes.kv_heads * codes.words
        queries = q_codes.reshape(codes.batch, -1, codes.words)
        return call(queries, k_codes.reshape(by_word), counts, lengths)

    return run


def _select(codes: Codes, keys: Keys, k: int, budget_of, store: StoreAt):
    """The launch that selects by keys: int32 ``[B, K, k]``."""
    spread = Spread(keys.piece, vector=4, warps=WARPS)
    layout, filled = code_layout(4), Spread(floor_power(min(k, 512)))

    def hash_select(words, by_thread, counts, lengths, out, thread_counts):
        program = lax.axis_index("program")
        batch, head = lax.div(program, codes.kv_heads), lax.rem(program, codes.kv_heads)
        row = budget_of(counts, lengths, batch, head)
        selected_end = row.first + row.need
        # Slots at both ends, and -1 after them. What is between them is written last.
        for start in starts(k, filled.size):
            place = start + iota(filled)
            last = jnp.where(place < selected_end + row.last, row.high + place - selected_end, -1)
            value = jnp.where(place < row.first, place, last)
            where = pl.ds(start, filled.size) if filled.size > 1 else start
            out[batch, head, where] = value

        def piece_words(piece) -> Array:
            start = piece * keys.piece
            loaded = load(words.at[batch, head, pl.ds(start, keys.piece)], spread)
            if keys.words % keys.piece == 0:
                return loaded
            return jnp.where(start + iota(spread) < keys.words, loaded, jnp.uint32(0))

        in_registers = piece_words(0) if keys.pieces == 1 else None

        def reach(key: Array) -> Array:
            """How many slots have at least ``key``."""
            if in_registers is not None:
                return total(keys.reached(in_registers, key))
            return lax.fori_loop(
                0,
                keys.pieces,
                lambda piece, sum: sum + total(keys.reached(piece_words(piece), key)),
                jnp.int32(0),
            )

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) >> 1
            enough = reach(middle) >= row.need
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        bounds = jnp.int32(1), jnp.int32(keys.highest + 1)
        threshold, _ = lax.fori_loop(0, (keys.highest - 1).bit_length(), halve, bounds)
        ties = row.need - reach(threshold + 1)  # slots at the threshold that are selected

        lane = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=slot_layout())
        column = plgpu.broadcasted_iota(jnp.int32, (TILE, 4), 1, layout=layout)

        def step_words(piece, step) -> Array:
            """The next words of each thread, ``[TILE, _STEP]``; 0 past the row."""
            index = piece * TILE * keys.thread_words + step * _STEP
            source = by_thread.at[batch, head, piece, :, pl.ds(step * _STEP, _STEP)]
            loaded = plgpu.load(source, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            if keys.words % keys.piece == 0:
                return loaded
            rows = plgpu.broadcasted_iota(jnp.int32, (TILE, _STEP), 0, layout=layout)
            columns = plgpu.broadcasted_iota(jnp.int32, (TILE, _STEP), 1, layout=layout)
            place = index + rows * keys.thread_words + columns
            return jnp.where(place < keys.words, loaded, jnp.uint32(0))

        steps = keys.thread_words // _STEP
        nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.int32), slot_layout())

        def select_piece(piece, before):
            above_before, ties_before = before

            def count_step(step, carry):
                above, reached = carry
                step_keys = step_words(piece, step)
                sums = [
                    both(keys.reached(step_keys, key)).sum(axis=1)
                    for key in (threshold + 1, threshold)
                ]
                return above + sums[0], reached + sums[1]

            above, reached = lax.fori_loop(0, steps, count_step, (nothing, nothing))
            tied = reached - above
            # Of a piece each is at most 2**15.
            thread_counts[...] = above | (tied << 16)
            earlier = _before(thread_counts, layout)
            above_before += earlier & 0xFFFF
            tied_before = ties_before + (earlier >> 16)

            def select_step(step, carry):
                above, tied = carry
                step_keys = step_words(piece, step)
                first_word = (piece * TILE + lane) * keys.thread_words + step * _STEP
                for index in range(_STEP):
                    four = step_keys[:, index // 4 * 4 : index // 4 * 4 + 4]
                    word = jnp.where(column == index % 4, four, jnp.uint32(0))
                    word = word.astype(jnp.int32).sum(axis=1)
                    for place in range(keys.per_word):
                        key = (word >> (place * keys.bits)) & (2**keys.bits - 1)
                        is_tie = key == threshold
                        selected = (key > threshold) | (is_tie & (tied < ties))
                        at = row.first + above + jnp.minimum(tied, ties)
                        slot = (first_word + index) * keys.per_word + place
                        store(out.at[batch, head], jnp.where(selected, at, -1), slot)
                        above += (key > threshold).astype(jnp.int32)
                        tied += is_tie.astype(jnp.int32)
                return above, tied

            lax.fori_loop(0, steps, select_step, (above_before, tied_before))
            return before[0] + above.sum(), before[1] + tied.sum()

        lax.fori_loop(0, keys.pieces, select_piece, (jnp.int32(0), jnp.int32(0)))

    call = plgpu.kernel(
        hash_select,
        out_type=jax.ShapeDtypeStruct((codes.batch, codes.kv_heads, k), jnp.int32),
        grid=(codes.batch * codes.kv_heads,),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM((TILE,), jnp.int32)],
    )

    def run(words, counts, lengths):
        by_thread = (*words.shape[:2], keys.pieces, TILE, keys.thread_words)
        return call(words, words.reshape(by_thread), counts, lengths)

    return run


def total(sums: Array) -> Array:
    """The sum of what `Keys.reached` gave for the words of a piece, an int32 scalar."""
    return both(sums.astype(jnp.int32).sum().astype(jnp.uint32))


def _before(counts, layout) -> Array:
    """Of each thread the sum of ``counts [TILE]`` of the threads before it."""
    shape = (TILE, TILE)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=layout) for i in (0, 1))
    all_counts = plgpu.load(counts, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
    all_counts = lax.broadcast_in_dim(all_counts, shape, [1])
    return jnp.where(column < row, all_counts, 0).sum(axis=1)


def _supports(
    q_codes: Array, k_codes: Array, counts: Array, lengths: Array, *, k: int, **rest: int
) -> str | None:
    return refuses(q_codes, k_codes, k) or refuses_pallas()


def refuses(q_codes: Array, k_codes: Array, k: int) -> str | None:
    """Why the kernels cannot select by these codes, or None."""
    if (highest := max_score(q_codes, k_codes)) > MAX_SCORE:
        return f"scores to G T R = {highest} are over {MAX_SCORE}"
    if max(k_codes.shape[1], k) > MAX_SLOTS:
        return f"S={k_codes.shape[1]} and k={k} must be at most {MAX_SLOTS}"
    return refuses_codes(q_codes, k_codes)


HASH_SELECT = Backend("pallas", hash_select_pallas, _supports)
