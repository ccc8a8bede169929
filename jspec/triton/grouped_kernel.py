"""The Triton body of products by groups of rows, which reads what groups with rows need."""

import triton
import triton.language as tl


@triton.jit
def grouped_kernel(
    x,
    kernel,
    starts,
    out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes ``WIDTH`` columns of a group, one of ``PARTS``, ``TILE`` rows at a time.

    ``starts [E + 1]``: the first row of each group, and one past the last. The next rows of a group
    find its weights in the L2.
    """
    group = tl.program_id(0) // PARTS
    first = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    column = tl.program_id(0) % PARTS * WIDTH + tl.arange(0, WIDTH)[None, :]
    there = column < OUT
    own = kernel + group.to(tl.int64) * (IN * OUT)
    for begin in range(first, end, TILE):
        row = (begin + tl.arange(0, TILE)).to(tl.int64)[:, None]
        live = row < end
        total = tl.zeros([TILE, WIDTH], tl.float32)
        for start in tl.range(0, IN, STEP, num_stages=STAGES):
            index = start + tl.arange(0, STEP)
            inside = index < IN
            part = tl.load(x + row * IN + index[None, :], mask=live & inside[None, :], other=0.0)
            weights = tl.load(
                own + index[:, None] * OUT + column, mask=inside[:, None] & there, other=0.0
            )
            total = tl.dot(part, weights, total, input_precision="tf32x3")
        tl.store(out + row * OUT + column, total, mask=live & there)
