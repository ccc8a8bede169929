"""The Triton bodies of hash codes: encoding, and scoring."""

import triton
import triton.language as tl


@triton.jit
def encode_kernel(
    q,
    k,
    w,
    q_codes,
    k_codes,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WITH_KEYS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Hash codes of TILE vectors of one KV head: of each token its queries, then its key.

    TOKENS: of all batch rows; HEADS: KV heads; GROUP: query heads of each; SIZE: channels of a
    head, STEP of them at a time; BITS: of a code. WITH_KEYS: 1, or 0 for queries alone.
    """
    VECTORS_PER_TOKEN: tl.constexpr = GROUP + WITH_KEYS
    head = tl.program_id(0) % HEADS
    vector = tl.program_id(0) // HEADS * TILE + tl.arange(0, TILE)
    token = (vector // VECTORS_PER_TOKEN).to(tl.int64)
    index_in_token = vector % VECTORS_PER_TOKEN
    there = token < TOKENS
    is_query = there & (index_in_token < GROUP)
    is_key = there & (index_in_token == GROUP)
    query_at = (token * HEADS + head) * GROUP + index_in_token
    key_at = token * HEADS + head
    bit = tl.arange(0, BITS)
    sums = tl.zeros([TILE, BITS], tl.float32)
    for start in range(0, SIZE, STEP):
        index = start + tl.arange(0, STEP)
        inside = index < SIZE
        x = tl.load(
            q + query_at[:, None] * SIZE + index[None, :],
            mask=is_query[:, None] & inside[None, :],
            other=0.0,
        )
        if WITH_KEYS:
            x += tl.load(
                k + key_at[:, None] * SIZE + index[None, :],
                mask=is_key[:, None] & inside[None, :],
                other=0.0,
            )
        weights = tl.load(
            w + (head * SIZE + index[:, None]) * BITS + bit[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        # Each number is split into parts of 10 bits: products of 16-bit floats are exact.
        sums = tl.dot(x.to(tl.float32), weights.to(tl.float32), sums, input_precision="tf32x3")

    WORDS: tl.constexpr = BITS // 32
    ones = (sums > 0).to(tl.uint32) << (bit % 32).to(tl.uint32)[None, :]
    words = tl.sum(tl.reshape(ones, [TILE, WORDS, 32]), axis=2)
    word = tl.arange(0, WORDS)[None, :]
    tl.store(q_codes + query_at[:, None] * WORDS + word, words, mask=is_query[:, None])
    if WITH_KEYS:
        tl.store(k_codes + key_at[:, None] * WORDS + word, words, mask=is_key[:, None])


@triton.jit
def ones_in(x):
    """How many bits of each uint32 are 1: LLVM makes one instruction of it."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def score_kernel(
    q_codes,
    k_codes,
    lengths,
    norms,
    scores,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Hamming scores of CHUNK slots of TILE KV heads of a batch row, whose codes lie together.

    CHUNKS: chunks of a row; GROUP: query heads of a KV head; WORDS: uint32 words of a code. SCALED:
    scores are multiplied by the ``norms`` of the keys.
    """
    PARTS: tl.constexpr = (HEADS + TILE - 1) // TILE
    batch = (tl.program_id(0) // (CHUNKS * PARTS)).to(tl.int64)
    head = tl.program_id(0) // CHUNKS % PARTS * TILE + tl.arange(0, TILE)[None, :]
    slot = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)[:, None]
    length = tl.load(lengths + batch)
    inside = (slot < SLOTS) & (head < HEADS)
    read = inside & (slot < length)
    code = k_codes + ((batch * SLOTS + slot) * HEADS + head) * WORDS
    distance = tl.zeros([CHUNK, TILE], tl.int32)
    for word in tl.static_range(WORDS):
        key_word = tl.load(code + word, mask=read, other=0)
        for one in range(TOKENS * GROUP):
            at = ((batch * TOKENS + one // GROUP) * HEADS + head) * GROUP + one % GROUP
            query = tl.load(q_codes + at * WORDS + word, mask=head < HEADS, other=0)
            distance += ones_in(key_word ^ query)
    max_score: tl.constexpr = TOKENS * GROUP * WORDS * 32
    place = scores + (batch * HEADS + head) * SLOTS + slot
    if SCALED:
        norm = tl.load(norms + (batch * SLOTS + slot) * HEADS + head, mask=read, other=0.0)
        scaled = norm * ((max_score - 2 * distance).to(tl.float32) * (1.0 / (32 * WORDS)))
        tl.store(place, tl.where(read, scaled, -float("inf")), mask=inside)
    else:
        tl.store(place, tl.where(read, max_score - distance, -1), mask=inside)
