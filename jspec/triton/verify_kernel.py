"""The Triton body of greedy verification, in two halves that other kernels share."""

import triton
import triton.language as tl


@triton.jit
def find_ends(
    draft,
    target,
    lengths,
    stops,
    row,
    live,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the committed blocks of ROWS batch rows end.

    GAMMA: draft tokens of a row; STOPS: stop tokens of a row; TILE: positions that are compared at
    a time; ``live``: which of the rows there are. Returns, for each row, the event at its end
    (4 times the distance from the last position, plus 2 where the draft is rejected and 1 where
    the target stops), the draft's length, the target's tokens by tile, and the bonus token.

    A committed token is the target's own: the draft serves only to count. A block ends at its
    first position where the draft is rejected or the target stops. One maximum finds it, over the
    distance from the end with the two flags in the lowest bits.
    """
    length = tl.minimum(tl.load(lengths + row, mask=live, other=0), GAMMA)
    bonus = tl.load(target + row * (GAMMA + 1) + GAMMA, mask=live, other=-1)
    stop_ids = ()
    bonus_stops = tl.zeros([ROWS], tl.int1)
    for m in tl.static_range(STOPS):
        stop_ids += (tl.load(stops + row * STOPS + m, mask=live, other=-1),)
        bonus_stops |= bonus == stop_ids[m]
    # The bonus token follows a whole accepted draft, as if a draft token had been rejected there.
    # An id of -1 is padding, among the stop tokens as elsewhere.
    bonus_event = 2 + (bonus_stops & (bonus >= 0)).to(tl.int32)

    events = tl.zeros([ROWS, TILE], tl.int32)
    tokens = ()
    for start in tl.static_range(0, GAMMA, TILE):
        index = start + tl.arange(0, TILE)[None, :]
        inside = live[:, None] & (index < GAMMA)
        drafted = tl.load(draft + row[:, None] * GAMMA + index, mask=inside, other=-1)
        target_tile = tl.load(target + row[:, None] * (GAMMA + 1) + index, mask=inside, other=-1)
        tokens += (target_tile,)
        is_stop = tl.zeros([ROWS, TILE], tl.int1)
        for m in tl.static_range(STOPS):
            is_stop |= target_tile == stop_ids[m][:, None]
        rejected = (drafted != target_tile) | (index >= length[:, None])
        flags = rejected.to(tl.int32) * 2 + (is_stop & (target_tile >= 0)).to(tl.int32)
        event = tl.where(inside & (flags > 0), (GAMMA - index) * 4 + flags, 0)
        events = tl.maximum(events, event)
    return tl.maximum(tl.max(events, axis=1), bonus_event), length, tokens, bonus


@triton.jit
def accepted_of(event, GAMMA: tl.constexpr):
    """Accepted draft tokens of a block that ends with ``event``, a stop token among them."""
    return GAMMA - event // 4 + tl.where((event & 2) != 0, 0, 1)


@triton.jit
def write_blocks(
    target,
    row,
    live,
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
    GAMMA: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write what `find_ends` found as the fields of `Verified`."""
    end = GAMMA - event // 4
    rejected = (event & 2) != 0
    following = tl.load(target + row * (GAMMA + 1) + end, mask=live, other=-1)
    tl.store(accepted_out + row, accepted_of(event, GAMMA), mask=live)
    tl.store(committed_out + row, end + 1, mask=live)
    tl.store(mismatch_out + row, rejected & (end < length), mask=live)
    tl.store(next_out + row, tl.where(rejected, following, -1), mask=live)
    tl.store(stopped_out + row, (event & 1) != 0, mask=live)
    for start in tl.static_range(0, GAMMA, TILE):
        index = start + tl.arange(0, TILE)[None, :]
        block = tl.where(index <= end[:, None], tokens[start // TILE], -1)
        inside = live[:, None] & (index < GAMMA)
        tl.store(tokens_out + row[:, None] * (GAMMA + 1) + index, block, mask=inside)
    tl.store(tokens_out + row * (GAMMA + 1) + GAMMA, tl.where(end == GAMMA, bonus, -1), mask=live)


@triton.jit
def verify_kernel(
    draft,
    target,
    lengths,
    stops,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    BATCH: tl.constexpr,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Verify ROWS of the BATCH rows a program, TILE positions at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < BATCH
    event, length, tokens, bonus = find_ends(
        draft, target, lengths, stops, row, live, GAMMA, STOPS, ROWS, TILE
    )
    write_blocks(
        target,
        row,
        live,
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
