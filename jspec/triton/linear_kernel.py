"""The Triton body of a matmul, in tiles of the same number of rows."""

import triton
import triton.language as tl

from jspec.triton.mxfp4_kernel import mxfp4_sums


@triton.jit
def matmul_tile(
    x,
    kernel,
    column_scale,
    bias,
    scale,
    add,
    out,
    rows,
    block,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The first TILE of ``rows``, and WIDTH columns of the result: block number ``block`` of them.

    IN: inputs of a column, summed STEP at a time, in one order; OUT: columns. NORMED: x is divided
    by its root mean square, with EPS, and times ``scale``; GATED: the kernel has the columns of the
    gate, then of up; ADDED: ``add`` is added at the end. STAGES: of the loop's pipelining. SCALED:
    weights are of 8 bits, and each column is times its ``column_scale``. SPLIT: in how many parts
    `added` sums MXFP4 weights, whose scales are ``column_scale``; 0 for others.
    """
    row = tl.arange(0, TILE)[:, None]
    column = block * WIDTH + tl.arange(0, WIDTH)[None, :]
    there = column < OUT
    columns: tl.constexpr = 2 * OUT if GATED else OUT
    column_stride: tl.constexpr = IN if TRANSPOSED else 1
    input_stride: tl.constexpr = 1 if TRANSPOSED else columns
    if SPLIT:
        total, gates, squares = mxfp4_sums(
            x + tl.arange(0, TILE) * IN,
            tl.arange(0, TILE) < rows,
            kernel,
            column_scale,
            scale,
            block * WIDTH + tl.arange(0, WIDTH),
            block * WIDTH + tl.arange(0, WIDTH) < OUT,
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
        for start in tl.range(0, IN, STEP, num_stages=STAGES):
            index = start + tl.arange(0, STEP)
            inside = index < IN
            live = (row < rows) & inside[None, :]
            part = tl.load(x + row * IN + index[None, :], mask=live, other=0.0)
            if NORMED:
                upcast = part.to(tl.float32)
                squares += tl.sum(upcast * upcast, axis=1)
                factor = tl.load(scale + index, mask=inside, other=0.0).to(tl.float32)
                part = (upcast * factor[None, :]).to(part.dtype)
            weights = kernel + index[:, None].to(tl.int64) * input_stride + column * column_stride
            mask = inside[:, None] & there
            if GATED:
                gate = tl.load(weights, mask=mask, other=0.0).to(part.dtype)
                gates = tl.dot(part, gate, gates, input_precision="tf32x3")
                weights += OUT * column_stride
            up = tl.load(weights, mask=mask, other=0.0).to(part.dtype)
            total = tl.dot(part, up, total, input_precision="tf32x3")

    kind = out.dtype.element_ty
    if NORMED:
        # The norm is a factor of the whole row, so that it can wait for the sum of the squares.
        root = (1.0 / tl.sqrt_rn(squares / IN + EPS))[:, None]
        total *= root
        gates *= root
    offset: tl.constexpr = OUT if GATED else 0
    if SCALED:
        total *= tl.load(column_scale + offset + column, mask=there, other=0.0)
        if GATED:
            gates *= tl.load(column_scale + column, mask=there, other=0.0)
    # Rounded where a model rounds: after the matmul, its bias, its activation and the sum.
    total = total.to(kind)
    if BIASED:
        total += tl.load(bias + offset + column, mask=there, other=0.0).to(kind)
    if GATED:
        gates = gates.to(kind)
        if BIASED:
            gates += tl.load(bias + column, mask=there, other=0.0).to(kind)
        upcast = gates.to(tl.float32)
        total = (upcast * tl.sigmoid(upcast)).to(kind) * total
    place = row * OUT + column
    mask = (row < rows) & there
    if ADDED:
        total = tl.load(add + place, mask=mask, other=0.0).to(kind) + total
    tl.store(out + place, total, mask=mask)


@triton.jit
def linear_kernel(
    x,
    kernel,
    column_scale,
    bias,
    scale,
    add,
    count,
    out,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A program takes TILE of the rows and WIDTH columns of the result.

    There are ROWS rows, or ``count[0]`` where ROWS is 0: one machine program then serves any number
    of rows, so that a row's arithmetic cannot follow from it (docs/batch_invariance.md). Tiles that
    share weights follow each other.
    """
    rows = ROWS
    if ROWS == 0:
        rows = tl.load(count)
    tiles = tl.cdiv(rows, TILE)
    first = tl.program_id(0) % tiles * TILE
    # In int64: x and the result may have 2**31 elements, a tile of them has not.
    before = first.to(tl.int64)
    matmul_tile(
        x + before * IN,
        kernel,
        column_scale,
        bias,
        scale,
        add + before * OUT,
        out + before * OUT,
        rows - first,
        tl.program_id(0) // tiles,
        IN,
        OUT,
        EPS,
        SCALED,
        BIASED,
        NORMED,
        ADDED,
        GATED,
        TRANSPOSED,
        TILE,
        STEP,
        WIDTH,
        STAGES,
        SPLIT,
    )
