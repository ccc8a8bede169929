"""The Triton body that scores keys by the hash buckets that they share with queries."""

import triton
import triton.language as tl

from jspec.triton.hash_kernel import ones_in


@triton.jit
def words_of(
    code, end, KEYS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr
):
    """The words of KEYS codes: of every LANES groups ``[KEYS, LANES]`` for each bit.

    0 from group ``end`` on. Two words are loaded at once, side by side along the last axis. So this
    axis goes to neighbouring threads, which read one key's groups; of axes with nothing side by
    side, versions of Triton choose different ones.
    """
    lane = tl.arange(0, 2 * LANES)[None, :]
    words = ()
    for first in tl.static_range(0, GROUPS, LANES):
        group = first + lane // 2
        for bit in tl.static_range(0, BITS, 2):
            one = bit + lane % 2
            both = tl.load(code + (group * BITS + one), mask=(group < end) & (one < BITS), other=0)
            low, high = tl.split(tl.reshape(both, [KEYS, LANES, 2]))
            words += (low,)
            if bit + 1 < BITS:
                words += (high,)
    return words


@triton.jit
def collision_score_kernel(
    q_codes,
    k_codes,
    lengths,
    scores,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TABLES: tl.constexpr,
    MIN_COLLISIONS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scores of CHUNK slots of one KV head: in how many tables they share buckets with its queries.

    A code has GROUPS groups of 32 tables, each of BITS words. CHUNKS: chunks of a row; QUERIES:
    query heads of a KV head, UNROLLED of them in a round of the loop; a query counts from
    MIN_COLLISIONS of the TABLES on. LANES threads keep the code of a key in their registers, and
    take the queries one by one.
    """
    WORDS: tl.constexpr = GROUPS * BITS
    WORDS_PER_LANE: tl.constexpr = (
        (GROUPS + LANES - 1) // LANES * BITS
    )  # words of a key in a thread
    head = tl.program_id(0) % HEADS
    first = tl.program_id(0) // HEADS % CHUNKS * CHUNK
    batch = (tl.program_id(0) // (HEADS * CHUNKS)).to(tl.int64)
    slot = tl.arange(0, CHUNK)
    read = first + slot < tl.minimum(tl.load(lengths + batch), SLOTS)
    keys = k_codes + ((batch * SLOTS + first) * HEADS + head) * WORDS
    keys += slot[:, None] * (HEADS * WORDS)
    end = tl.where(read, GROUPS, 0)[:, None]
    key_words = words_of(keys, end, CHUNK, BITS, GROUPS, LANES)
    score = tl.zeros([CHUNK], tl.int32)
    ROUNDS: tl.constexpr = QUERIES // UNROLLED
    for step in range(TOKENS * ROUNDS):
        token = batch * TOKENS + step // ROUNDS
        query = (token * HEADS + head) * QUERIES + step % ROUNDS * UNROLLED
        for one in tl.static_range(UNROLLED):
            code = q_codes + (query + one) * WORDS
            query_words = words_of(code, GROUPS, 1, BITS, GROUPS, LANES)
            different = tl.zeros([CHUNK, LANES], tl.int32)
            for word in tl.static_range(0, WORDS_PER_LANE, BITS):
                differ = key_words[word] ^ query_words[word]
                for bit in tl.static_range(1, BITS):
                    differ |= key_words[word + bit] ^ query_words[word + bit]
                different += ones_in(differ)
            shared = TABLES - tl.sum(different, axis=1)
            score += tl.where(shared >= MIN_COLLISIONS, shared, 0)
    place = scores + (batch * HEADS + head) * SLOTS + first + slot
    stored_score = tl.where(read & (score > 0), score, -1)
    tl.store(place, stored_score, mask=first + slot < SLOTS)
