"""The Triton bodies of gathered attention."""

import triton
import triton.language as tl

from jspec.triton.attention_kernel import LOG2E, fold, read_queries, read_tile, write_rows


@triton.jit
def slots_at(index, end, selected, tail, TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr):
    """The slots at these indices of the selection, up to ``end``; -1 for none.

    Indices below 0 are those of the tail, of TAIL slots: it begins at -TAIL_PADDED.
    """
    there = (index >= 0) & (index < end)
    where = selected + index
    if TAIL > 0:
        later = index + TAIL_PADDED
        there |= (index < 0) & (later < TAIL)
        where = tl.where(index < 0, tail + later, where)
    return tl.load(where, mask=there, other=-1)


@triton.jit
def weights_at(log_weights, at_query, live, index, end, slot, SELECTED: tl.constexpr):
    """Log-weights ``[ROWS, KEYS]`` of queries for the slots at these indices; 0 for the tail's."""
    there = (index >= 0) & (index < end) & (slot >= 0)
    where = log_weights + at_query[:, None] * SELECTED + index[None, :]
    return tl.load(where, mask=live[:, None] & there[None, :], other=0.0)


@triton.jit
def attend_tile(
    sums,
    q,
    k,
    v,
    slot_index,
    read,
    visible,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    weights=None,
    more_q=None,
):
    """`fold` the keys and values number ``slot_index``, where ``read``, into the sums."""
    keys = read_tile(k, slot_index * SIZE, read, SIZE, WIDTH)
    more_keys = None
    if REST > 0:
        more_keys = read_tile(k, slot_index * SIZE, read, SIZE, REST, WIDTH)
    values = keys
    if not VALUES_IN_KEYS:
        values = read_tile(v, slot_index * VALUE, read, VALUE, VALUE_WIDTH)
    return fold(sums, q, keys, values, visible, SCALE, SOFTCAP, weights, more_q, more_keys)


@triton.jit
def gathered_kernel(
    q,
    k,
    v,
    positions,
    selected,
    counts,
    tail,
    context_len,
    log_weights,
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
    REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
    TAIL: tl.constexpr,
    SHARED: tl.constexpr,
    COUNTED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    TAIL_STEPS: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A program attends the query rows of HEADS KV heads to a chunk of the selected slots.

    HEADS * TOKENS * GROUP rows, ROWS of them a tile. A tile of keys holds those of HEADS heads at
    KEYS / HEADS slots: what a slot has of them is one run of memory. Each row sees its own head
    alone. SLOTS: of a batch row; 0 where all rows read the same slots. The tail is at indices below
    0. It has the first TAIL_STEPS of the STEPS that CHUNKS share evenly, the selection has the
    others; COUNTED: those that ``counts`` leaves. SHARED: the heads share their selection, and
    otherwise HEADS is 1. WEIGHTED: ``log_weights`` are added to the scores of the selection.
    LISTED: how many slots a program reads at once and keeps, a power of 2, or 0 for one that reads
    them tile by tile. The channels of a key past WIDTH, where there are any, are a tile REST wide.
    """
    ROWS_PER_HEAD: tl.constexpr = TOKENS * GROUP
    STEP: tl.constexpr = KEYS // HEADS
    TAIL_PADDED: tl.constexpr = TAIL_STEPS * STEP
    head = tl.program_id(0) % (KV_HEADS // HEADS) * HEADS
    rest = tl.program_id(0) // (KV_HEADS // HEADS)
    chunk = rest // TILES % CHUNKS
    batch_row = (rest // (TILES * CHUNKS)).to(tl.int64)
    list_of = batch_row if SHARED else batch_row * KV_HEADS + head
    selected += list_of * SELECTED
    tail += batch_row * TAIL
    last, steps = SELECTED, STEPS
    if COUNTED:
        last = tl.minimum(tl.maximum(tl.load(counts + list_of), 0), SELECTED)
        steps = TAIL_STEPS + (last + STEP - 1) // STEP
    begin = (chunk * steps // CHUNKS - TAIL_STEPS) * STEP
    end = tl.minimum(((chunk + 1) * steps // CHUNKS - TAIL_STEPS) * STEP, last)
    if LISTED > 0:
        slots = slots_at(begin + tl.arange(0, LISTED), end, selected, tail, TAIL, TAIL_PADDED)

    number = rest % TILES * ROWS + tl.arange(0, ROWS)
    live = number < HEADS * ROWS_PER_HEAD
    head_offset, row = number // ROWS_PER_HEAD, number % ROWS_PER_HEAD
    position = tl.load(positions + batch_row * TOKENS + row // GROUP, mask=live, other=-1)
    newest = tl.max(position)
    tail_position = tl.load(context_len + batch_row) + TAIL_PADDED
    at_query = (batch_row * TOKENS + row // GROUP) * (KV_HEADS * GROUP) + row % GROUP
    at_query += (head + head_offset) * GROUP
    CACHED: tl.constexpr = k.dtype.element_ty
    TO_FLOAT32: tl.constexpr = q.dtype.element_ty != CACHED and CACHED.primitive_bitwidth > 8
    tile = read_queries(q, at_query, live, begin < end, SIZE, WIDTH, TO_FLOAT32)
    more_tile = None
    if REST > 0:
        more_tile = read_queries(q, at_query, live, begin < end, SIZE, REST, TO_FLOAT32, WIDTH)
    base = batch_row * (SLOTS * KV_HEADS) + head
    key = tl.arange(0, KEYS)
    mine = head_offset[:, None] == (key % HEADS)[None, :]
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    sums = acc, total, top
    # A query sees some of the tail and all that was selected; without others, both in one loop.
    masked_end = tl.minimum(end, 0) if TOKENS > 1 else end
    for start in range(begin, masked_end, STEP):
        index = start + key // HEADS
        if LISTED > 0:
            # The compiler looks ahead past the end, and must not leave the list.
            slot = tl.gather(slots, tl.minimum(index - begin, LISTED - 1), 0)
        else:
            slot = slots_at(index, end, selected, tail, TAIL, TAIL_PADDED)
        at = tl.where(index < 0, tail_position + index, 0)
        read = (slot >= 0) & (at <= newest)
        visible = read[None, :] & mine if HEADS > 1 else read[None, :]
        if TOKENS > 1:
            visible &= at[None, :] <= position[:, None]
        slot_index = base + slot.to(tl.int64) * KV_HEADS + key % HEADS
        weights = None
        if WEIGHTED:
            weights = weights_at(log_weights, at_query, live, index, end, slot, SELECTED)
        sums = attend_tile(
            *(sums, tile, k, v, slot_index, read, visible),
            *(SIZE, VALUE, WIDTH, REST, VALUE_WIDTH, VALUES_IN_KEYS, SCALE, SOFTCAP),
            weights=weights,
            more_q=more_tile,
        )
    if TOKENS > 1:
        for start in range(tl.maximum(begin, 0), end, STEP):
            index = start + key // HEADS
            if LISTED > 0:
                slot = tl.gather(slots, tl.minimum(index - begin, LISTED - 1), 0)
            else:
                slot = slots_at(index, end, selected, tail, 0, 0)
            read = slot >= 0
            visible = read[None, :] & mine if HEADS > 1 else read[None, :]
            slot_index = base + slot.to(tl.int64) * KV_HEADS + key % HEADS
            weights = None
            if WEIGHTED:
                weights = weights_at(log_weights, at_query, live, index, end, slot, SELECTED)
            sums = attend_tile(
                *(sums, tile, k, v, slot_index, read, visible),
                *(SIZE, VALUE, WIDTH, REST, VALUE_WIDTH, VALUES_IN_KEYS, SCALE, SOFTCAP),
                weights=weights,
                more_q=more_tile,
            )
        # Padding saw the selection with the others.
        acc, total, top = sums
        sums = tl.where((position < 0)[:, None], 0.0, acc), tl.where(position < 0, 0.0, total), top

    if CHUNKS == 1:
        write_rows(out, lse, at_query, sums, live, True, VALUE, VALUE_WIDTH)
    else:
        part = ((batch_row * KV_HEADS + head + head_offset) * CHUNKS + chunk) * ROWS_PER_HEAD + row
        write_rows(out, lse, part, sums, live, begin < end, VALUE, VALUE_WIDTH)


@triton.jit
def gathered_merge_kernel(
    part_out,
    part_lse,
    out,
    lse,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    CHANNELS_AT_ONCE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
):
    """Merge the parts of a gathered attention, one of each chunk of slots, float32.

    ``part_out [B, KV_HEADS, CHUNKS, TOKENS * GROUP, VALUE]`` and ``part_lse``, of the same shape
    without VALUE: what `gathered_kernel` left. A part with a log-sum-exp of -inf was not written:
    it is read all the same, so that no read waits for another, and left out. ``out [B, TOKENS, N,
    VALUE]`` and ``lse [B, TOKENS, N]``: the result. A program merges CHANNELS_AT_ONCE channels for
    one query row, PARTS_AT_ONCE parts in a round; PROGRAMS_PER_ROW programs share a row.
    """
    query = (tl.program_id(0) // PROGRAMS_PER_ROW).to(tl.int64)
    start_channel = tl.program_id(0) % PROGRAMS_PER_ROW * CHANNELS_AT_ONCE
    channel = start_channel + tl.arange(0, CHANNELS_AT_ONCE)
    inside = channel < VALUE
    n = query % (KV_HEADS * GROUP)
    token = query // (KV_HEADS * GROUP)
    row = token % TOKENS * GROUP + n % GROUP
    first = (token // TOKENS * KV_HEADS + n // GROUP) * CHUNKS * (TOKENS * GROUP) + row
    acc = tl.zeros([CHANNELS_AT_ONCE], tl.float32)
    total = 0.0
    top = float("-inf")
    for start in range(0, CHUNKS, PARTS_AT_ONCE):
        chunk = start + tl.arange(0, PARTS_AT_ONCE)
        at = first + chunk * (TOKENS * GROUP)
        exponent = tl.load(part_lse + at, mask=chunk < CHUNKS, other=float("-inf"))
        mask = (chunk < CHUNKS)[:, None] & inside[None, :]
        part = tl.load(part_out + at[:, None] * VALUE + channel[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(exponent))
        center = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2((top - center) * LOG2E)
        weight = tl.exp2((exponent - center) * LOG2E)
        part = tl.where((exponent == float("-inf"))[:, None], 0.0, part)
        total = total * decay + tl.sum(weight)
        acc = acc * decay + tl.sum(weight[:, None] * part, axis=0)
        top = higher
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(out + query * VALUE + channel, (acc / whole).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) % PROGRAMS_PER_ROW == 0:
        tl.store(lse + query, tl.where(total == 0.0, float("-inf"), top + tl.log2(whole) / LOG2E))
