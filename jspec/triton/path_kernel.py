"""The Triton body that moves entries of several columns within their rows."""

import triton
import triton.language as tl


@triton.jit
def path_kernel(
    columns,
    source_slots,
    target_slots,
    counts,
    WIDTHS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOVES: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Move one chunk of the entries of one row of a column.

    ``columns``: integers ``[B, SLOTS, width]`` each, which are inputs and outputs in one; WIDTHS:
    the width of each. MOVES: entries of ``source_slots`` and ``target_slots`` per row; CHUNKS: of
    an entry, each of SPAN elements. TOGETHER: a power of 2, at least MOVES.
    """
    chunk = tl.program_id(0) % CHUNKS
    index = tl.program_id(0) // CHUNKS % len(columns)
    row = tl.program_id(0) // CHUNKS // len(columns)
    move = tl.arange(0, TOGETHER)
    count = tl.load(counts + row)
    is_there = (move < MOVES) & (move < count)
    source = tl.load(source_slots + row * MOVES + move, mask=is_there, other=0)
    target = tl.load(target_slots + row * MOVES + move, mask=is_there, other=0)
    moves = is_there & (source != target)
    at = chunk * SPAN + tl.arange(0, SPAN)
    first = row.to(tl.int64) * SLOTS
    for i in tl.static_range(len(columns)):
        if index == i:
            mask = moves[:, None] & (at < WIDTHS[i])[None, :]
            entries = columns[i] + at[None, :]
            loaded = tl.load(entries + (first + source)[:, None] * WIDTHS[i], mask=mask)
            # Every source is loaded before a target overwrites it.
            tl.debug_barrier()
            tl.store(entries + (first + target)[:, None] * WIDTHS[i], loaded, mask=mask)
