"""The Triton body of verification with packing."""

import triton
import triton.language as tl

from jspec.triton.verify_kernel import accepted_of, find_ends, write_blocks


@triton.jit
def verify_and_pack_kernel(
    draft,
    target,
    lengths,
    stops,
    kv,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    packed,
    offsets,
    total,
    BATCH: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    SCAN: tl.constexpr,
    EAGER: tl.constexpr,
):
    """Verify, and pack the accepted KV rows: CHUNKS programs a batch row, SPAN elements at a time.

    WIDTH: elements of a KV row, of which a batch row has GAMMA. STOPS: stop tokens of a row; TILE:
    positions that are compared at a time; SCAN: earlier rows that are verified at a time. Each
    program verifies its own row, and the rows before it to know its place, while its first elements
    are on their way. EAGER: it reads those before it knows whether they are accepted.
    """
    batch_row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    row = batch_row + tl.arange(0, 1)
    event, length, tokens, bonus = find_ends(
        draft, target, lengths, stops, row, row < BATCH, GAMMA, STOPS, 1, TILE
    )
    accepted_count = tl.sum(accepted_of(event, GAMMA))
    if (chunk == 0) | (chunk * SPAN < accepted_count * WIDTH) | EAGER:
        index = chunk * SPAN + tl.arange(0, SPAN)
        inside = index < accepted_count * WIDTH
        source = kv + batch_row.to(tl.int64) * (GAMMA * WIDTH)
        reads = (index < GAMMA * WIDTH) if EAGER else inside
        elements = tl.load(source + index, mask=reads)

        counts = tl.zeros([SCAN], tl.int32)
        for start in range(0, batch_row, SCAN):
            earlier = start + tl.arange(0, SCAN)
            before = earlier < batch_row
            ends = find_ends(
                draft, target, lengths, stops, earlier, before, GAMMA, STOPS, SCAN, TILE
            )
            counts += tl.where(before, accepted_of(ends[0], GAMMA), 0)
        offset = tl.sum(counts)
        destination = packed + offset.to(tl.int64) * WIDTH
        tl.store(destination + index, elements, mask=inside)
        if CHUNKS * SPAN < GAMMA * WIDTH:
            for start in range((CHUNKS + chunk) * SPAN, accepted_count * WIDTH, CHUNKS * SPAN):
                index = start + tl.arange(0, SPAN)
                inside = index < accepted_count * WIDTH
                tl.store(destination + index, tl.load(source + index, mask=inside), mask=inside)

        if chunk == 0:
            tl.store(offsets + batch_row, offset)
            if batch_row == BATCH - 1:
                tl.store(total, offset + accepted_count)
            write_blocks(
                target,
                row,
                row < BATCH,
                event,
                length,
                tokens,
                bonus,
                accepted_out,
                committed_out,
                mismatch_out,
                next_out,
                stopped_out,
                tokens_out,
                GAMMA,
                TILE,
            )
