"""The Triton body of packing."""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    kv,
    accepted,
    packed,
    offsets,
    total,
    BATCH: tl.constexpr,
    GAMMA: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Pack the accepted KV rows: CHUNKS programs a batch row, which copy SPAN elements each.

    WIDTH: elements of a KV row, of which a batch row has GAMMA. COUNTS: how many counts of the rows
    before are summed at a time. SPAN and COUNTS are powers of 2.
    """
    batch_row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    accepted_count = tl.minimum(tl.maximum(tl.load(accepted + batch_row), 0), GAMMA)
    if (chunk == 0) | (chunk * SPAN < accepted_count * WIDTH):
        # Summing the counts again costs each program less than a second launch would.
        counts = tl.zeros([COUNTS], tl.int32)
        for start in range(0, batch_row, COUNTS):
            earlier = start + tl.arange(0, COUNTS)
            count = tl.load(accepted + earlier, mask=earlier < batch_row, other=0)
            counts += tl.minimum(tl.maximum(count, 0), GAMMA)
        offset = tl.sum(counts)

        index = chunk * SPAN + tl.arange(0, SPAN)
        inside = index < accepted_count * WIDTH
        source = kv + batch_row.to(tl.int64) * (GAMMA * WIDTH)
        destination = packed + offset.to(tl.int64) * WIDTH
        tl.store(destination + index, tl.load(source + index, mask=inside), mask=inside)

        if chunk == 0:
            tl.store(offsets + batch_row, offset)
            if batch_row == BATCH - 1:
                tl.store(total, offset + accepted_count)
