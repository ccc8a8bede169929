"""The Triton bodies between products: they add parts up, and bring weights near meanwhile."""

import triton
import triton.language as tl


@triton.jit
def bring_near(weights, program, THREADS: tl.constexpr, PIECE: tl.constexpr):
    """Ask for ``THREADS`` pieces of ``PIECE`` bytes of the weights in L2, and wait for none."""
    piece = program * THREADS + tl.arange(0, THREADS)
    address = weights.to(tl.int64) + piece.to(tl.int64) * PIECE
    size = tl.full([THREADS], PIECE, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_norm_kernel(
    x,
    parts,
    scale,
    weights,
    out,
    normed,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The first ``ROWS`` programs take a row each; the others bring weights near."""
    program = tl.program_id(0)
    if program >= ROWS:
        if PIECE:
            bring_near(weights, program - ROWS, THREADS, PIECE)
        return
    kind = x.dtype.element_ty
    column = tl.arange(0, TILE)
    there = column < WIDTH
    total = tl.load(x + program * WIDTH + column, mask=there, other=0.0)
    if PARTS:
        sums = tl.zeros([TILE], tl.float32)
        for part in tl.static_range(PARTS):
            place = (part * ROWS + program) * WIDTH + column
            sums += tl.load(parts + place, mask=there, other=0.0).to(tl.float32)
        total += sums.to(kind)
        tl.store(out + program * WIDTH + column, total, mask=there)
    wide = total.to(tl.float32)
    root = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / WIDTH + EPS)
    factor = tl.load(scale + column, mask=there, other=0.0)
    tl.store(normed + program * WIDTH + column, (wide * root).to(kind) * factor, mask=there)


@triton.jit
def gate_kernel(
    parts,
    weights,
    out,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The first ``PROGRAMS`` programs take ``TILE`` columns each; the others bring weights near."""
    program = tl.program_id(0)
    if program >= PROGRAMS:
        if PIECE:
            bring_near(weights, program - PROGRAMS, THREADS, PIECE)
        return
    tiles: tl.constexpr = (WIDTH + TILE - 1) // TILE
    row = program // tiles
    column = program % tiles * TILE + tl.arange(0, TILE)
    there = column < WIDTH
    gate = tl.zeros([TILE], tl.float32)
    up = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * ROWS + row) * 2 * WIDTH + column
        gate += tl.load(parts + place, mask=there, other=0.0).to(tl.float32)
        up += tl.load(parts + place + WIDTH, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    wide = gate.to(kind).to(tl.float32)
    value = (wide * tl.sigmoid(wide)).to(kind) * up.to(kind)
    tl.store(out + row * WIDTH + column, value, mask=there)
