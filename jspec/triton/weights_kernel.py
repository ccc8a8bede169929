"""The Triton body of mean softmax weights."""

import triton
import triton.language as tl

from jspec.triton.attention_kernel import LOG2E, in_base_2, read_queries, read_tile


@triton.jit
def weights_kernel(
    q,
    k,
    lse,
    weights,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Mean softmax weights of KEYS slots of a KV head over its query rows.

    There are TOKENS * GROUP rows, ROWS of them a tile. TILES: tiles of KEYS slots; SIZE: channels
    of a key, of WIDTH in a tile. Programs of neighbouring heads follow each other, as their keys do
    in memory.
    """
    head = tl.program_id(0) % KV_HEADS
    rest = tl.program_id(0) // KV_HEADS
    start = rest % TILES * KEYS
    batch_row = (rest // TILES).to(tl.int64)
    key = tl.arange(0, KEYS)
    inside = start + key < SLOTS
    # The first slot in int64, the others in int32 from there: a cache may have 2**31 elements.
    first_slot = (batch_row * SLOTS + start) * KV_HEADS + head
    keys = read_tile(k + first_slot * SIZE, key * (KV_HEADS * SIZE), inside, SIZE, WIDTH)
    TO_FLOAT32: tl.constexpr = q.dtype.element_ty != k.dtype.element_ty
    sums = tl.zeros([KEYS], tl.float32)
    count = 0.0
    for first in tl.static_range(0, TOKENS * GROUP, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < TOKENS * GROUP
        query = batch_row * TOKENS + row // GROUP
        query = query * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        exponent = tl.load(lse + query, mask=live, other=float("-inf"))
        counts = exponent != float("-inf")
        tile = read_queries(q, query, live, counts, SIZE, WIDTH, TO_FLOAT32)
        products = tl.dot(tile, tl.trans(keys.to(tile.dtype)), input_precision="ieee")
        scores = in_base_2(products, SCALE, SOFTCAP)
        shifted = scores - tl.where(counts, exponent, 0.0)[:, None] * LOG2E
        sums += tl.sum(tl.where(counts[:, None], tl.exp2(shifted), 0.0), axis=0)
        count += tl.sum(counts.to(tl.float32))
    out = weights + (batch_row * KV_HEADS + head) * SLOTS + start + key
    tl.store(out, sums / tl.maximum(count, 1.0), mask=inside)
