"""The Triton bodies of greedy verification with the bookkeeping of a step."""

import triton
import triton.language as tl

from jspec.triton.verify_kernel import accepted_of, find_ends, write_blocks


@triton.jit
def cleaned(logits):
    """Logits as float32, NaN as minus infinity and plus infinity as the largest float32."""
    x = logits.to(tl.float32)
    return tl.where(x != x, float("-inf"), tl.minimum(x, 3.4028234663852886e38))


@triton.jit
def first_of_largest(x, token, axis: tl.constexpr):
    """The largest of ``x`` and the lowest token that has it; tokens are below 2**31 - 1."""
    top = tl.max(x, axis=axis)
    return top, tl.min(tl.where(x == tl.expand_dims(top, axis), token, 2147483647), axis=axis)


@triton.jit
def parts_kernel(
    logits, tops, firsts, VOCABULARY: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr
):
    """The largest logit of each part of a position, and the first token that has it.

    ``logits [positions, VOCABULARY]``; ``tops``, ``firsts [positions, PARTS]``. A part is PART
    logits, a power of 2. A program takes one.
    """
    pair = tl.program_id(0)
    token = pair % PARTS * PART + tl.arange(0, PART)
    inside = token < VOCABULARY
    at = logits + (pair // PARTS).to(tl.int64) * VOCABULARY + token
    x = cleaned(tl.load(at, mask=inside, other=float("-inf")))
    top, first = first_of_largest(x, token, 0)
    tl.store(tops + pair, top)
    tl.store(firsts + pair, first)


@triton.jit
def commit(
    tokens_before,
    cached_before,
    done_before,
    draft,
    tops,
    firsts,
    lengths,
    stops,
    limits,
    target,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    committed_block,
    tokens,
    cached,
    done,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take the target's tokens, verify the draft, and commit a block, one batch row a program.

    ``tokens``, ``cached`` and ``done`` are the memory of those before. ``tops [B, GAMMA + 1,
    WIDTH]``: the logits of each position where WHOLE, else the largest of each of its parts, with
    their tokens in ``firsts``. SLOTS: tokens of a row; STOPS: stop tokens of a row. POSITIONS and
    COLUMNS: powers of 2, at least GAMMA + 1 and WIDTH. TILE: positions that are compared at a time.
    """
    pair = tl.program_id(0)
    row = pair + tl.arange(0, 1)
    live = row >= 0
    cached_count = tl.load(cached_before + row)
    ended = tl.load(done_before + row).to(tl.int1)
    limit = tl.load(limits + row)

    position = tl.arange(0, POSITIONS)
    column = tl.arange(0, COLUMNS)
    inside = (position < GAMMA + 1)[:, None] & (column < WIDTH)[None, :]
    place = (pair.to(tl.int64) * (GAMMA + 1) + position)[:, None] * WIDTH + column[None, :]
    x = cleaned(tl.load(tops + place, mask=inside, other=float("-inf")))
    token = column[None, :] if WHOLE else tl.load(firsts + place, mask=inside, other=2147483647)
    _, token = first_of_largest(x, token, 1)
    tl.store(target + pair * (GAMMA + 1) + position, token, mask=position < GAMMA + 1)
    # All threads have read the rows before one of them writes, and see all of the target.
    tl.debug_barrier()
    event, length, target_tokens, bonus = find_ends(
        draft, target, lengths, stops, row, live, GAMMA, STOPS, 1, TILE
    )
    write_blocks(
        target,
        row,
        live,
        event,
        length,
        target_tokens,
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
    committed = tl.where(active, end + 1, 0)
    after = cached_count + committed
    tl.store(cached + row, after)
    tl.store(done + row, ended | ((event & 1) != 0) | (after + 1 >= limit))
    at = committed_block + row * (GAMMA + 3)
    tl.store(at, tl.where(active, accepted_of(event, GAMMA), 0))
    tl.store(at + 1, committed)

    first = (cached_count + 1)[:, None]
    known = tokens + row.to(tl.int64)[:, None] * SLOTS + first
    for start in tl.static_range(0, GAMMA, TILE):
        index = start + tl.arange(0, TILE)[None, :]
        is_written = active[:, None] & (index <= end[:, None])
        block = tl.where(is_written, target_tokens[start // TILE], -1)
        tl.store(at[:, None] + 2 + index, block, mask=index < GAMMA)
        tl.store(known + index, block, mask=is_written & (index < GAMMA) & (first + index < SLOTS))
    is_written = (active & (end == GAMMA))[:, None]
    tl.store(at[:, None] + 2 + GAMMA, tl.where(is_written, bonus[:, None], -1))
    tl.store(known + GAMMA, bonus[:, None], mask=is_written & (first + GAMMA < SLOTS))


@triton.jit
def commit_kernel(
    tokens,
    cached,
    done,
    draft,
    tops,
    firsts,
    lengths,
    stops,
    limits,
    target,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    committed_block,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`commit`; ``tokens``, ``cached`` and ``done`` are inputs and outputs in one."""
    commit(
        tokens,
        cached,
        done,
        draft,
        tops,
        firsts,
        lengths,
        stops,
        limits,
        target,
        accepted_out,
        committed_out,
        mismatch_out,
        next_out,
        stopped_out,
        tokens_out,
        committed_block,
        tokens,
        cached,
        done,
        SLOTS,
        GAMMA,
        STOPS,
        WHOLE,
        WIDTH,
        POSITIONS,
        COLUMNS,
        TILE,
    )


@triton.jit
def commit_kernel_0_3(
    tokens_before,
    cached_before,
    done_before,
    draft,
    tops,
    firsts,
    lengths,
    stops,
    limits,
    target,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    committed_block,
    tokens,
    cached,
    done,
    SLOTS: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`commit_kernel` for jax-triton 0.3, which passes an aliased array as input and as output."""
    commit(
        tokens_before,
        cached_before,
        done_before,
        draft,
        tops,
        firsts,
        lengths,
        stops,
        limits,
        target,
        accepted_out,
        committed_out,
        mismatch_out,
        next_out,
        stopped_out,
        tokens_out,
        committed_block,
        tokens,
        cached,
        done,
        SLOTS,
        GAMMA,
        STOPS,
        WHOLE,
        WIDTH,
        POSITIONS,
        COLUMNS,
        TILE,
    )
