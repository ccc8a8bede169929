"""The Triton body of greedy verification with the bookkeeping of a step."""

import triton
import triton.language as tl

from jspec.triton.verify_kernel import accepted_of, find_ends, write_blocks


@triton.jit
def commit(
    tokens_before,
    cached_before,
    done_before,
    draft,
    target,
    lengths,
    stops,
    limits,
    tokens,
    cached,
    done,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    record,
    BATCH: tl.constexpr,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """ROWS rows a program; ``tokens``, ``cached`` and ``done`` are the memory of those before."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < BATCH
    held = tl.load(cached_before + row, mask=live, other=0)
    ended = tl.load(done_before + row, mask=live, other=1).to(tl.int1)
    limit = tl.load(limits + row, mask=live, other=0)
    drafted = tl.load(lengths + row, mask=live, other=0)
    event, length, wanted, bonus = find_ends(
        draft, target, lengths, stops, row, live, GAMMA, STOPS, ROWS, TILE
    )
    # All lanes have read the rows before one of them writes.
    tl.debug_barrier()
    write_blocks(
        target,
        row,
        live,
        event,
        length,
        wanted,
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

    active = ended == 0
    end = GAMMA - event // 4
    accepted = accepted_of(event, GAMMA)
    committed = tl.where(active, end + 1, 0)
    after = held + committed
    drafted = tl.minimum(tl.maximum(drafted, 0), GAMMA)
    drafted = tl.where(end + 1 <= accepted, accepted, drafted)
    tl.store(cached + row, after, mask=live)
    tl.store(done + row, ended | ((event & 1) != 0) | (after + 1 >= limit), mask=live)
    at = record + row * (GAMMA + 4)
    tl.store(at, drafted, mask=live)
    tl.store(at + 1, tl.where(active, accepted, 0), mask=live)
    tl.store(at + 2, committed, mask=live)

    first = (held + 1)[:, None]
    known = tokens + row.to(tl.int64)[:, None] * SLOTS + first
    kept = (live & active)[:, None]
    for start in tl.static_range(0, GAMMA, TILE):
        index = start + tl.arange(0, TILE)[None, :]
        block = tl.where(kept & (index <= end[:, None]), wanted[start // TILE], -1)
        inside = live[:, None] & (index < GAMMA)
        tl.store(at[:, None] + 3 + index, block, mask=inside)
        # An id of -1 is padding and leaves what is there.
        tl.store(known + index, block, mask=inside & (block >= 0) & (first + index < SLOTS))
    last = tl.where(active & (end == GAMMA), bonus, -1)[:, None]
    tl.store(at[:, None] + 3 + GAMMA, last, mask=live[:, None])
    tl.store(known + GAMMA, last, mask=live[:, None] & (last >= 0) & (first + GAMMA < SLOTS))


@triton.jit
def commit_kernel(
    tokens,
    cached,
    done,
    draft,
    target,
    lengths,
    stops,
    limits,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    record,
    BATCH: tl.constexpr,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`commit`, its rows given once."""
    commit(
        tokens,
        cached,
        done,
        draft,
        target,
        lengths,
        stops,
        limits,
        tokens,
        cached,
        done,
        accepted_out,
        committed_out,
        mismatch_out,
        next_out,
        stopped_out,
        tokens_out,
        record,
        BATCH,
        SLOTS,
        GAMMA,
        STOPS,
        ROWS,
        TILE,
    )


@triton.jit
def commit_kernel_0_3(
    tokens_before,
    cached_before,
    done_before,
    draft,
    target,
    lengths,
    stops,
    limits,
    tokens,
    cached,
    done,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    record,
    BATCH: tl.constexpr,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The same for jax-triton 0.3, which gives the memory of an alias twice."""
    commit(
        tokens_before,
        cached_before,
        done_before,
        draft,
        target,
        lengths,
        stops,
        limits,
        tokens,
        cached,
        done,
        accepted_out,
        committed_out,
        mismatch_out,
        next_out,
        stopped_out,
        tokens_out,
        record,
        BATCH,
        SLOTS,
        GAMMA,
        STOPS,
        ROWS,
        TILE,
    )
