"""The Triton body of a product of a few rows with weights that are small."""

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x,
    kernel,
    bias,
    scale,
    add,
    out,
    ROWS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program takes ``WIDTH`` columns of the result.

    It multiplies without tensor cores: with so few inputs, what counts is that all weights are on
    their way at once and that no product waits for another.
    """
    row = tl.arange(0, TILE)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = column < OUT
    columns: tl.constexpr = 2 * OUT if GATED else OUT
    across: tl.constexpr = IN if TRANSPOSED else 1
    down: tl.constexpr = 1 if TRANSPOSED else columns
    totals = tl.zeros([TILE, STEP, WIDTH], tl.float32)
    gates = tl.zeros([TILE, STEP, WIDTH], tl.float32)
    squares = tl.zeros([TILE, STEP], tl.float32)
    for start in tl.static_range(0, IN, STEP):
        index = start + tl.arange(0, STEP)
        inside = index < IN
        weights = kernel + index[:, None] * down + column[None, :] * across
        mask = inside[:, None] & there[None, :]
        w = tl.load(weights + OUT * across if GATED else weights, mask=mask, other=0.0)
        live = (row < ROWS)[:, None] & inside[None, :]
        part = tl.load(x + row[:, None] * IN + index[None, :], mask=live, other=0.0)
        part = part.to(tl.float32)
        if NORMED:
            squares += part * part
            factor = tl.load(scale + index, mask=inside, other=0.0).to(tl.float32)
            part = (part * factor[None, :]).to(x.dtype.element_ty).to(tl.float32)
        totals += part[:, :, None] * w.to(tl.float32)[None, :, :]
        if GATED:
            w = tl.load(weights, mask=mask, other=0.0)
            gates += part[:, :, None] * w.to(tl.float32)[None, :, :]

    kind = out.dtype.element_ty
    total = tl.sum(totals, axis=1)
    gate = tl.sum(gates, axis=1)
    if NORMED:
        # The norm is a factor of the whole row, so that it can wait for the sum of the squares.
        root = (1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / IN + EPS))[:, None]
        total *= root
        gate *= root
    # Rounded where a model rounds: after the product, its bias, its activation and the sum.
    total = total.to(kind)
    if BIASED:
        offset: tl.constexpr = OUT if GATED else 0
        total += tl.load(bias + offset + column, mask=there, other=0.0).to(kind)[None, :]
    if GATED:
        gate = gate.to(kind)
        if BIASED:
            gate += tl.load(bias + column, mask=there, other=0.0).to(kind)[None, :]
        wide = gate.to(tl.float32)
        total = (wide * tl.sigmoid(wide)).to(kind) * total
    place = row[:, None] * OUT + column[None, :]
    mask = (row < ROWS)[:, None] & there[None, :]
    if ADDED:
        total = tl.load(add + place, mask=mask, other=0.0).to(kind) + total
    tl.store(out + place, total, mask=mask)
