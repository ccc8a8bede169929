"""The Triton body of gathered attention."""

import triton
import triton.language as tl

from jspec.triton.attention_kernel import fold, read_queries, read_tile, write_rows


@triton.jit
def slots_at(index, end, selected, tail, TAIL: tl.constexpr, AHEAD: tl.constexpr):
    """The slots at these indices of the selection, below 0 those of the tail; -1 for none."""
    slot = tl.load(selected + index, mask=(index >= 0) & (index < end), other=-1)
    if TAIL > 0:
        later = index + AHEAD
        there = (index < 0) & (later < TAIL)
        slot = tl.maximum(slot, tl.load(tail + later, mask=there, other=-1))
    return slot


@triton.jit
def gathered_kernel(
    q,
    k,
    v,
    positions,
    selected,
    counts,
    tail,
    until,
    out,
    lse,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
    TAIL: tl.constexpr,
    SHARED: tl.constexpr,
    COUNTED: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A program attends the query rows of HEADS KV heads to CHUNK of the selected slots.

    HEADS * TOKENS * GROUP rows, ROWS of them a tile. A tile of keys holds those of HEADS heads at
    KEYS / HEADS slots: what a slot has of them is one run of memory. Each row sees its own head
    alone. The first chunk reads the tail too, at indices below 0. SHARED: the heads share their
    selection, and otherwise HEADS is 1.
    """
    MINE: tl.constexpr = TOKENS * GROUP
    STEP: tl.constexpr = KEYS // HEADS
    AHEAD: tl.constexpr = (TAIL + STEP - 1) // STEP * STEP
    head = tl.program_id(0) % (KV_HEADS // HEADS) * HEADS
    rest = tl.program_id(0) // (KV_HEADS // HEADS)
    chunk = rest // TILES % CHUNKS
    batch_row = (rest // (TILES * CHUNKS)).to(tl.int64)
    number = rest % TILES * ROWS + tl.arange(0, ROWS)
    live = number < HEADS * MINE
    own, row = number // MINE, number % MINE
    position = tl.load(positions + batch_row * TOKENS + row // GROUP, mask=live, other=-1)
    newest = tl.max(position)
    list_of = batch_row if SHARED else batch_row * KV_HEADS + head
    count = tl.minimum(tl.load(counts + list_of), SELECTED) if COUNTED else SELECTED
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, count)
    if TAIL > 0:
        begin = tl.where(chunk == 0, -AHEAD, begin)
        end = tl.where(chunk == 0, tl.maximum(end, 0), end)

    at_query = (batch_row * TOKENS + row // GROUP) * (KV_HEADS * GROUP) + row % GROUP
    at_query += (head + own) * GROUP
    WIDE: tl.constexpr = q.dtype.element_ty != k.dtype.element_ty
    tile = read_queries(q, at_query, live, begin < end, SIZE, WIDTH, WIDE)
    behind = tl.load(until + batch_row)
    selected += list_of * SELECTED
    tail += batch_row * TAIL
    base = batch_row * SLOTS
    key = tl.arange(0, KEYS)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    index = begin + key // HEADS
    slot = slots_at(index, end, selected, tail, TAIL, AHEAD)
    for start in range(begin, end, STEP):
        at = tl.where(index < 0, behind + index + AHEAD, 0)
        read = (slot >= 0) & (at <= newest)
        seen = read[None, :] & (at[None, :] <= position[:, None])
        if HEADS > 1:
            seen &= (key % HEADS)[None, :] == own[:, None]
        here = (base + slot) * KV_HEADS + head + key % HEADS
        # The next slots are on their way before this tile is multiplied.
        index = start + STEP + key // HEADS
        slot = slots_at(index, end, selected, tail, TAIL, AHEAD)
        keys = read_tile(k, here * SIZE, read, SIZE, WIDTH)
        values = keys
        if not VALUES_IN_KEYS:
            values = read_tile(v, here * VALUE, read, VALUE, VALUE_WIDTH)
        acc, total, top = fold((acc, total, top), tile, keys, values, seen, SCALE, SOFTCAP)

    if CHUNKS == 1:
        write_rows(out, lse, at_query, (acc, total, top), live, True, VALUE, VALUE_WIDTH)
    else:
        part = ((batch_row * KV_HEADS + head + own) * CHUNKS + chunk) * MINE + row
        write_rows(out, lse, part, (acc, total, top), live, begin < end, VALUE, VALUE_WIDTH)
