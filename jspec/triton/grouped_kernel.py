"""The Triton body of the grouped matmul, which reads only the weights of groups with rows."""

import triton
import triton.language as tl

from jspec.triton.mxfp4_kernel import mxfp4_sums


@triton.jit
def grouped_linear_kernel(
    x,
    kernel,
    kernel_scales,
    starts,
    bias,
    gather_indices,
    scatter_indices,
    scale,
    weights,
    out,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SHARE: tl.constexpr,
    EPS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIASED: tl.constexpr,
    GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    SEARCHED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A program takes WIDTH of the OUT columns of a group, one of PARTS, TILE rows at a time.

    IN: inputs of a column, summed STEP at a time. Flags say which arguments there are, and GATED,
    CLAMPED, with LIMIT and ALPHA, which activation follows. STAGES: of the loop's pipelining.

    ``starts [GROUPS + 1]``: the first row of each group, and one past the last. The next rows of a
    group find its weights in the L2. SEARCHED: there are fewer programs than groups, and a program
    looks for its group among those that have rows. GROUPS_WIDTH: a power of 2, at least GROUPS.
    SHARE: rows of the result for each row of x. GATED: the columns of gate lie before those of up.
    SPLIT: in how many parts `added` sums MXFP4 weights, whose scales are ``kernel_scales``; 0 for
    others.
    """
    group = tl.program_id(0) // PARTS
    if SEARCHED:
        number = tl.arange(0, GROUPS_WIDTH)
        firsts = tl.load(starts + number, mask=number < GROUPS, other=0)
        ends = tl.load(starts + number + 1, mask=number < GROUPS, other=0)
        filled = ends > firsts
        is_group = filled & (tl.cumsum(filled.to(tl.int32), axis=0) == group + 1)
        group = tl.sum(tl.where(is_group, number, 0), axis=0)
        first = tl.sum(tl.where(is_group, firsts, 0), axis=0)
        end = tl.sum(tl.where(is_group, ends, 0), axis=0)
    else:
        first = tl.load(starts + group)
        end = tl.load(starts + group + 1)
    first_column = tl.program_id(0) % PARTS * WIDTH
    column = first_column + tl.arange(0, WIDTH)[None, :]
    there = column < OUT
    columns: tl.constexpr = 2 * OUT if GATED else OUT
    offset: tl.constexpr = OUT if GATED else 0
    matrix = group.to(tl.int64) * (IN * columns)
    for begin in range(first, end, TILE):
        row = begin + tl.arange(0, TILE)
        live = row < end
        source = row
        if GATHERED:
            source = tl.load(gather_indices + row, mask=live, other=0) // SHARE
        rows = x + source.to(tl.int64) * IN
        if SPLIT:
            total, gates, squares = mxfp4_sums(
                rows,
                live,
                kernel + matrix // 2,
                kernel_scales + matrix // 32,
                scale,
                first_column + tl.arange(0, WIDTH),
                first_column + tl.arange(0, WIDTH) < OUT,
                IN,
                OUT,
                NORMED,
                GATED,
                TILE,
                STEP,
                WIDTH,
                STAGES,
                SPLIT,
            )
        else:
            total = tl.zeros([TILE, WIDTH], tl.float32)
            gates = tl.zeros([TILE, WIDTH], tl.float32)
            squares = tl.zeros([TILE], tl.float32)
            if NORMED:
                ahead = tl.load(scale + tl.arange(0, STEP), mask=tl.arange(0, STEP) < IN, other=0.0)
            for start in tl.range(0, IN, STEP, num_stages=STAGES):
                index = start + tl.arange(0, STEP)
                inside = index < IN
                mask = live[:, None] & inside[None, :]
                part = tl.load(rows[:, None] + index[None, :], mask=mask, other=0.0)
                if NORMED:
                    upcast = part.to(tl.float32)
                    squares += tl.sum(upcast * upcast, axis=1)
                    part = (upcast * ahead.to(tl.float32)[None, :]).to(part.dtype)
                    # A round early: what a thread loads of it is too little to be copied.
                    ahead = tl.load(scale + index + STEP, mask=index + STEP < IN, other=0.0)
                place = kernel + matrix + index[:, None] * columns + column
                mask = inside[:, None] & there
                if GATED:
                    gate = tl.load(place, mask=mask, other=0.0)
                    gates = tl.dot(part, gate, gates, input_precision="tf32x3")
                up = tl.load(place + offset, mask=mask, other=0.0)
                total = tl.dot(part, up, total, input_precision="tf32x3")
        if NORMED:
            # The norm is a factor of the whole row, so that it can wait for the sum of the squares.
            root = (1.0 / tl.sqrt_rn(squares / IN + EPS))[:, None]
            total *= root
            gates *= root
        if BIASED:
            group_bias = bias + group * columns + column
            total += tl.load(group_bias + offset, mask=there, other=0.0).to(tl.float32)
            if GATED:
                gates += tl.load(group_bias, mask=there, other=0.0).to(tl.float32)
        if GATED:
            if CLAMPED:
                gates = tl.minimum(gates, LIMIT)
                total = tl.minimum(tl.maximum(total, -LIMIT), LIMIT) + 1.0
            total *= gates * tl.sigmoid(ALPHA * gates)
        goal = row
        if SCATTERED:
            goal = tl.load(scatter_indices + row, mask=live, other=0)
        if WEIGHTED:
            total *= tl.load(weights + goal, mask=live, other=0.0)[:, None]
        tl.store(
            out + goal.to(tl.int64)[:, None] * OUT + column,
            total.to(out.dtype.element_ty),
            mask=live[:, None] & there,
        )
