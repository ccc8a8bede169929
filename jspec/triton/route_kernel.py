"""The Triton bodies of routing: parts of the logits, then what is chosen and its order."""

import triton
import triton.language as tl


@triton.jit
def route_logits_kernel(
    x,
    kernel,
    scale,
    logits,
    squares,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    EXPERTS: tl.constexpr,
    NORMED: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Logits of experts, from SPAN of the IN inputs and for WIDTH experts, one of PARTS, a program.

    TILE: a power of 2, at least ROWS; STEP: inputs of a tile.
    ``logits [splits, ROWS, EXPERTS]`` are sums over these inputs alone, ``squares [splits, ROWS]``
    those of the norm. Nothing is rounded to the dtype of x.
    """
    split = tl.program_id(0) // PARTS
    row = tl.arange(0, TILE)
    column = tl.program_id(0) % PARTS * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, SPAN, STEP, num_stages=3):
        index = split * SPAN + start + tl.arange(0, STEP)
        inside = index < IN
        live = (row < ROWS)[:, None] & inside[None, :]
        part = tl.load(x + row[:, None] * IN + index[None, :], mask=live, other=0.0).to(tl.float32)
        if NORMED:
            square += tl.sum(part * part, axis=1)
            part *= tl.load(scale + index, mask=inside, other=0.0).to(tl.float32)[None, :]
        mask = inside[:, None] & (column < EXPERTS)
        weights_tile = tl.load(kernel + index[:, None] * EXPERTS + column, mask=mask, other=0.0)
        total = tl.dot(part, weights_tile.to(tl.float32), total, input_precision="tf32x3")
    place = (split * ROWS + row)[:, None] * EXPERTS + column
    tl.store(logits + place, total, mask=(row < ROWS)[:, None] & (column < EXPERTS))
    if NORMED:
        is_first = tl.program_id(0) % PARTS == 0
        tl.store(squares + split * ROWS + row, square, mask=(row < ROWS) & is_first)


@triton.jit
def route_kernel(
    logits,
    squares,
    bias,
    correction,
    chosen,
    weights,
    order,
    starts,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
    FACTOR: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZED: tl.constexpr,
    TILE: tl.constexpr,
    EXPERTS_WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Choose experts by the logits of SPLITS parts of the inputs, and sort the pairs by expert.

    One program takes all rows. TILE, EXPERTS_WIDTH, CHOICES and PAIRS: powers of 2, at least ROWS,
    EXPERTS, CHOSEN and ROWS * CHOSEN. CORRECTED: ``correction`` is added for the choice alone;
    FACTOR: of the weights, which sum to 1 before if NORMALIZED.

    The place of a pair in the order is how many pairs come before it: those of an expert before
    its own, and earlier ones of the same. Pairs are compared CHUNK at a time.
    """
    row = tl.arange(0, TILE)
    expert = tl.arange(0, EXPERTS_WIDTH)[None, :]
    live = (row < ROWS)[:, None] & (expert < EXPERTS)
    total = tl.zeros([TILE, EXPERTS_WIDTH], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * ROWS + row)[:, None] * EXPERTS + expert
        total += tl.load(logits + place, mask=live, other=0.0)
        if NORMED:
            square += tl.load(squares + split * ROWS + row, mask=row < ROWS, other=0.0)
    if NORMED:
        total *= (1.0 / tl.sqrt_rn(square / IN + EPS))[:, None]
    if BIASED:
        total += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    if SOFTMAX:
        total = tl.where(expert < EXPERTS, total, float("-inf"))
        exponents = tl.exp(total - tl.max(total, axis=1)[:, None])
        scores = exponents / tl.sum(exponents, axis=1)[:, None]
    else:
        scores = tl.sigmoid(total)
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    ranked = tl.where(expert < EXPERTS, ranked, float("-inf"))

    choice = tl.arange(0, CHOICES)[None, :]
    chosen_experts = tl.zeros([TILE, CHOICES], tl.int32)
    chosen_scores = tl.zeros([TILE, CHOICES], tl.float32)
    for number in range(CHOSEN):
        best = tl.max(ranked, axis=1)[:, None]
        # Of equal ones the first. Where scores are no numbers it still is an expert.
        index = tl.min(tl.where(ranked == best, expert, EXPERTS - 1), axis=1)[:, None]
        score = tl.sum(tl.where(expert == index, scores, 0.0), axis=1)[:, None]
        chosen_experts = tl.where(choice == number, index, chosen_experts)
        chosen_scores = tl.where(choice == number, score, chosen_scores)
        ranked = tl.where(expert == index, float("-inf"), ranked)
    if NORMALIZED:
        chosen_scores /= tl.sum(chosen_scores, axis=1)[:, None] + 1e-20
    place = row[:, None] * CHOSEN + choice
    mask = (row < ROWS)[:, None] & (choice < CHOSEN)
    tl.store(weights + place, chosen_scores * FACTOR, mask=mask)
    tl.store(chosen + place, chosen_experts, mask=mask)

    # Every pair has to see all of what was chosen, which other threads hold.
    tl.debug_barrier()
    count: tl.constexpr = ROWS * CHOSEN
    pair = tl.arange(0, PAIRS)
    pair_expert = tl.load(chosen + pair, mask=pair < count, other=0)[:, None]
    number_of = tl.arange(0, EXPERTS_WIDTH)
    before = tl.zeros([PAIRS], tl.int32)
    start = tl.zeros([EXPERTS_WIDTH], tl.int32)
    for begin in range(0, count, CHUNK):
        other = begin + tl.arange(0, CHUNK)[None, :]
        other_expert = tl.load(chosen + other, mask=other < count, other=EXPERTS)
        is_before = (other_expert < pair_expert) | (
            (other_expert == pair_expert) & (other < pair[:, None])
        )
        before += tl.sum(is_before.to(tl.int32), axis=1)
        start += tl.sum((other_expert < number_of[:, None]).to(tl.int32), axis=1)
    tl.store(order + before, pair, mask=pair < count)
    tl.store(starts + number_of, start, mask=number_of < EXPERTS)
    tl.store(starts + EXPERTS, count)
