"""The Triton bodies of selection by hash codes: scores with their histograms, then the slots."""

import triton
import triton.language as tl

from jspec.triton.hash_kernel import ones_in


@triton.jit
def budget_of(
    counts,
    lengths,
    row,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    mask,
):
    """What rows select: their first slots, some of low..high - 1, and their last slots.

    Returns low, high, and the numbers of slots of the three kinds.
    """
    length = tl.load(lengths + row, mask=mask, other=0)
    length = tl.minimum(tl.maximum(length, 0), SLOTS)
    count = tl.load(counts + row, mask=mask, other=0)
    count = tl.minimum(tl.minimum(tl.maximum(count, 0), K), length)
    low = tl.minimum(length, SINKS)
    high = tl.maximum(length - RECENT, low)
    first = tl.minimum(low, count)
    last = tl.minimum(length - high, count - first)
    return low, high, first, count - first - last, last


@triton.jit
def score_and_count_kernel(
    q_codes,
    k_codes,
    counts,
    lengths,
    keys,
    records,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    K: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Keys of CHUNK slots of TILE KV heads of a batch row, STEP slots at a time, and their counts.

    A key is a score + 1, or 0 for a slot that is not among those selected by score. ``keys [B,
    HEADS, SLOTS]``; ``records [B, HEADS, CHUNKS, BINS]``: how many slots of a chunk have each key.
    """
    PARTS: tl.constexpr = (HEADS + TILE - 1) // TILE
    # Heads of the same slots are adjacent in memory: programs that run together read them.
    part = tl.program_id(0) % PARTS
    chunk = tl.program_id(0) // PARTS % CHUNKS
    batch = (tl.program_id(0) // (PARTS * CHUNKS)).to(tl.int64)
    head = part * TILE + tl.arange(0, TILE)
    low, high, _, _, _ = budget_of(
        counts, lengths, batch * HEADS + head, SLOTS, K, SINKS, RECENT, head < HEADS
    )
    column = part * (TILE * WORDS) + tl.arange(0, TILE * WORDS)
    of_slot = column < HEADS * WORDS
    max_score: tl.constexpr = TOKENS * GROUP * WORDS * 32
    end = tl.minimum(tl.max(high, axis=0), (chunk + 1) * CHUNK)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, STEP):
        slot = start + tl.arange(0, STEP)
        inside = slot < SLOTS
        at = (batch * SLOTS + slot[:, None]) * (HEADS * WORDS) + column[None, :]
        code = tl.load(k_codes + at, mask=(slot < end)[:, None] & of_slot[None, :], other=0)
        distance = tl.zeros([STEP, TILE * WORDS], tl.int32)
        for one in range(TOKENS * GROUP):
            row = (batch * TOKENS + one // GROUP) * HEADS + column // WORDS
            query_at = (row * GROUP + one % GROUP) * WORDS + column % WORDS
            query = tl.load(q_codes + query_at, mask=of_slot, other=0)
            distance += ones_in(code ^ query[None, :])
        score = max_score - tl.sum(tl.reshape(distance, [STEP, TILE, WORDS]), axis=2)
        scored = (slot[:, None] >= low[None, :]) & (slot[:, None] < high[None, :])
        key = tl.where(scored, score + 1, 0).to(keys.dtype.element_ty)
        to = keys + (batch * HEADS + head[None, :]) * SLOTS + slot[:, None]
        tl.store(to, key, mask=inside[:, None] & (head < HEADS)[None, :])
    # The keys of a head lie in a line in memory: threads count those that others wrote.
    tl.debug_barrier()
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    for index in range(TILE):
        one_head = part * TILE + index
        if one_head < HEADS:
            row = batch * HEADS + one_head
            key = tl.load(keys + row * SLOTS + slot, mask=slot < SLOTS, other=0).to(tl.int32)
            count = tl.histogram(key, BINS).to(records.dtype.element_ty)
            tl.store(records + (row * CHUNKS + chunk) * BINS + tl.arange(0, BINS), count)


@triton.jit
def select_kernel(
    keys,
    records,
    counts,
    lengths,
    slots,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    FILLED: tl.constexpr,
):
    """The selected slots among some chunks of a row; ``slots [rows, K]``.

    PARTS: programs of a row; ALL_CHUNKS: a power of 2, at least CHUNKS; FILLED: places that the
    first program fills at a time with the slots at both ends of the row, and with -1.
    """
    EACH: tl.constexpr = (CHUNKS + PARTS - 1) // PARTS
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    low, high, first, need, last = budget_of(counts, lengths, row, SLOTS, K, SINKS, RECENT, True)
    out = slots + row * K
    if part == 0:
        for start in range(0, K, FILLED):
            place = start + tl.arange(0, FILLED)
            after = place - first - need
            slot = tl.where(place < first, place, tl.where(after < last, high + after, -1))
            by_key = (place >= first) & (after < 0)
            tl.store(out + place, slot, mask=(place < K) & (by_key == 0))

    bin = tl.arange(0, BINS)
    chunk = tl.arange(0, ALL_CHUNKS)
    at = (row * CHUNKS + chunk[:, None]) * BINS + bin[None, :]
    record = tl.load(records + at, mask=(chunk < CHUNKS)[:, None], other=0).to(tl.int32)
    total = tl.sum(record, axis=0)
    # How many slots have at least a key: it falls with the key.
    reach = tl.sum(total, axis=0) - tl.cumsum(total, axis=0) + total
    threshold = tl.sum((reach >= need).to(tl.int32), axis=0) - 1
    ties = need - tl.sum(tl.where(bin > threshold, total, 0), axis=0)
    earlier = tl.sum(tl.where((chunk < part * EACH)[:, None], record, 0), axis=0)
    above_before = tl.sum(tl.where(bin > threshold, earlier, 0), axis=0)
    tied_before = tl.sum(tl.where(bin == threshold, earlier, 0), axis=0)
    for index in range(EACH):
        slot = (part * EACH + index) * CHUNK + tl.arange(0, CHUNK)
        key = tl.load(keys + row * SLOTS + slot, mask=slot < SLOTS, other=0).to(tl.int32)
        above = (key > threshold).to(tl.int32)
        tied = ((key == threshold) & (slot >= low) & (slot < high)).to(tl.int32)
        # Both counts in one scan: each is at most CHUNK, below 2**15.
        both = above + (tied << 16)
        before = tl.cumsum(both, axis=0) - both
        tie = tied_before + (before >> 16)
        place = first + above_before + (before & 0xFFFF) + tl.minimum(tie, ties)
        selected = (above != 0) | ((tied != 0) & (tie < ties))
        tl.store(out + place, slot, mask=selected)
        above_before += tl.sum(above, axis=0)
        tied_before += tl.sum(tied, axis=0)
