"""The Triton bodies that score keys, and pages of keys, for the queries of a KV head."""

import triton
import triton.language as tl


@triton.jit
def place(HEADS: tl.constexpr, CHUNKS: tl.constexpr):
    """The KV head, the chunk of slots and the batch row of a program."""
    program = tl.program_id(0)
    return program % HEADS, program // HEADS % CHUNKS, (program // (HEADS * CHUNKS)).to(tl.int64)


@triton.jit
def query(
    q,
    batch,
    head,
    one,
    channel,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Query ``one`` of all tokens' QUERIES that read a KV head, float32."""
    token = batch * TOKENS + one // QUERIES
    row = q + ((token * HEADS + head) * QUERIES + one % QUERIES) * SIZE
    return tl.load(row + channel, mask=channel < SIZE, other=0).to(tl.float32)


@triton.jit
def rows(
    keys,
    batch,
    head,
    slot,
    channel,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The keys of some slots of a KV head, float32 ``[slots, channels]``."""
    row = ((batch * SLOTS + slot) * HEADS + head)[:, None] * CHANNELS
    read = (slot < SLOTS)[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(keys + (row + channel[None, :]), mask=read, other=0).to(tl.float32)


@triton.jit
def dot_score_kernel(
    q,
    keys,
    projection,
    scores,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    PROJECTED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """q.k of CHUNK slots of one KV head, TILE of them at a time, summed over its queries.

    QUERIES: query heads of a KV head. CHANNELS, at most PADDED, are those of a key; SIZE, at most
    SIZE_PADDED, those of a query, which PROJECTED ones differ from.
    """
    head, chunk, batch = place(HEADS, CHUNKS)
    size = tl.arange(0, SIZE_PADDED)
    channel = tl.arange(0, PADDED)
    pooled = tl.zeros([SIZE_PADDED], tl.float32)
    for one in range(TOKENS * QUERIES):
        pooled += query(q, batch, head, one, size, TOKENS, HEADS, QUERIES, SIZE)
    if PROJECTED:
        read = (size < SIZE)[:, None] & (channel < CHANNELS)[None, :]
        at = (head * SIZE + size)[:, None] * CHANNELS + channel[None, :]
        pooled = tl.sum(tl.load(projection + at, mask=read, other=0) * pooled[:, None], axis=0)
    first = chunk * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, SLOTS), TILE):
        slot = start + tl.arange(0, TILE)
        key = rows(keys, batch, head, slot, channel, SLOTS, HEADS, CHANNELS)
        score = tl.sum(key * pooled[None, :], axis=1)
        tl.store(scores + (batch * HEADS + head) * SLOTS + slot, score, mask=slot < SLOTS)


@triton.jit
def page_score_kernel(
    q,
    low,
    high,
    scores,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Upper bounds of q.k of CHUNK pages of one KV head, TILE of them at a time.

    A positive channel of a query meets the largest key of a page, a negative one the smallest.
    """
    head, chunk, batch = place(HEADS, CHUNKS)
    channel = tl.arange(0, SIZE_PADDED)
    above = tl.zeros([SIZE_PADDED], tl.float32)
    below = tl.zeros([SIZE_PADDED], tl.float32)
    for one in range(TOKENS * QUERIES):
        x = query(q, batch, head, one, channel, TOKENS, HEADS, QUERIES, SIZE)
        # NaN stays NaN: no page then has a bound.
        above += tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        below += tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    first = chunk * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, SLOTS), TILE):
        slot = start + tl.arange(0, TILE)
        least = rows(low, batch, head, slot, channel, SLOTS, HEADS, SIZE)
        largest = rows(high, batch, head, slot, channel, SLOTS, HEADS, SIZE)
        score = tl.sum(largest * above[None, :] + least * below[None, :], axis=1)
        tl.store(scores + (batch * HEADS + head) * SLOTS + slot, score, mask=slot < SLOTS)
