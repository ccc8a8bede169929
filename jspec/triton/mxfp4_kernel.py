"""Matmuls with MXFP4 weights, for the Triton bodies of `linear` and `grouped_linear`.

docs/matmuls.md shows the bits.
"""

import triton
import triton.language as tl


@triton.jit
def bits_of(words):
    """Words of 8 codes ``[WIDTH, N]`` as the bits of bfloat16 ``[WIDTH, N, 2, 2, 2]``.

    Those are the numbers times ``2**-126``: 0.5 is a subnormal one. Input ``4 h + 2 a + b`` of a
    word is at ``[a, b, h]``. A code and the one 4 inputs after it are converted at once: a
    product, which is a sum of two shifts, puts sign and other bits at their places in both halves.
    """
    upper = words >> 8
    first = (words & 0x000F000F) * 0x1040 & 0x81C081C0
    second = (words & 0x00F000F0) * 0x0104 & 0x81C081C0
    third = (upper & 0x000F000F) * 0x1040 & 0x81C081C0
    fourth = (upper & 0x00F000F0) * 0x0104 & 0x81C081C0
    both = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.join((both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16))


@triton.jit
def scaled(
    codes,
    scales,
    column,
    there,
    start,
    kind: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The weights of STEP inputs from ``start``, in the shape of `bits_of`, of the dtype ``kind``.

    bfloat16: times ``2**-32``. Then one exact product serves for the scale and for the ``2**126``
    that `bits_of` leaves out: its factor has room for scales up to 160, and is infinite above.
    """
    # Compared as they are, since several numbers are copied at once where the compiler sees that
    # they are inside together.
    word = start // 8 + tl.arange(0, STEP // 8)[None, :]
    block = start // 32 + tl.arange(0, STEP // 32)[None, :]
    words = tl.load(
        codes.to(tl.pointer_type(tl.uint32)) + column * (IN // 8) + word,
        mask=there & (word < IN // 8),
        other=0,
    )
    scale = tl.load(scales + column * (IN // 32) + block, mask=there & (block < IN // 32), other=0)
    bits = bits_of(words)
    if kind == tl.bfloat16:
        weights = bits.to(tl.bfloat16, bitcast=True)
        factor = tl.minimum(scale.to(tl.int32) + (126 - 32), 255) << 7
        factor = factor.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        weights = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        weights *= 8.507059173023462e37  # 2**126
        factor = (scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    factor = factor[:, :, None, None, None, None]
    factor = tl.broadcast_to(factor, [WIDTH, STEP // 32, 4, 2, 2, 2])
    return (weights * tl.reshape(factor, [WIDTH, STEP // 8, 2, 2, 2])).to(kind)


@triton.jit
def added(
    total,
    weights,
    part,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """``total`` and the products of ``weights``, shaped as `bits_of`, and ``part [STEP, TILE]``.

    Inputs come in an order in which no weight moves from thread to thread. Tiles whose warps share
    the columns: by their places in words. Those with ``SPLIT`` parts of the inputs, one a warp: by
    words.
    """
    if SPLIT == 1:
        weights = tl.reshape(tl.permute(weights, (0, 2, 3, 1, 4)), [WIDTH, STEP])
        part = tl.permute(tl.reshape(part, [STEP // 8, 2, 4, TILE]), (2, 0, 1, 3))
        part = tl.reshape(part, [STEP, TILE])
    else:
        length: tl.constexpr = STEP // SPLIT
        weights = tl.permute(tl.reshape(weights, [WIDTH, SPLIT, length]), (1, 0, 2))
        part = tl.permute(tl.reshape(part, [SPLIT, length // 8, 2, 4, TILE]), (0, 1, 3, 2, 4))
        part = tl.reshape(part, [SPLIT, length, TILE])
    return tl.dot(weights, part, total, input_precision="tf32x3")


@triton.jit
def finished(total, kind: tl.constexpr, SPLIT: tl.constexpr):
    """The sums ``[TILE, WIDTH]`` of what `added` made of x of the dtype ``kind``."""
    if SPLIT > 1:
        total = tl.sum(total, axis=0)
    if kind == tl.bfloat16:
        total *= 4294967296.0  # what `scaled` leaves out
    return tl.trans(total)


@triton.jit
def mxfp4_sums(
    rows,
    live,
    codes,
    scales,
    norm,
    column,
    there,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The sums ``[TILE, WIDTH]`` of columns, and of their gates; of squares ``[TILE]``.

    ``rows [TILE]``: where those of x begin, ``live`` which of them there are. ``column [WIDTH]``,
    ``there`` alike. x is times ``norm [IN]`` if NORMED. GATED: gates lie OUT columns before.
    Weights are the first operand of a matmul, which matrix units take from registers.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    column = column.to(tl.int64)[:, None]
    there = there[:, None]
    index = tl.arange(0, STEP)
    if SPLIT == 1:
        total = tl.zeros([WIDTH, TILE], tl.float32)
        gates = tl.zeros([WIDTH, TILE], tl.float32)
    else:
        total = tl.zeros([SPLIT, WIDTH, TILE], tl.float32)
        gates = tl.zeros([SPLIT, WIDTH, TILE], tl.float32)
    squares = tl.zeros([STEP // 8, TILE], tl.float32)
    offset: tl.constexpr = OUT if GATED else 0
    for start in tl.range(0, IN, STEP, num_stages=STAGES):
        inside = start + index < IN
        mask = live[None, :] & inside[:, None]
        part = tl.load(rows[None, :] + (start + index[:, None]), mask=mask, other=0.0)
        if NORMED:
            upcast = part.to(tl.float32)
            # Eight inputs of a row are with one thread; the sum over threads waits for the end.
            squares += tl.sum(tl.reshape(upcast * upcast, [STEP // 8, 8, TILE]), axis=1)
            factor = tl.load(norm + start + index, mask=inside, other=0.0).to(tl.float32)
            part = (upcast * factor[:, None]).to(part.dtype)
        if GATED:
            gate = scaled(codes, scales, column, there, start, kind, IN, STEP, WIDTH)
            gates = added(gates, gate, part, TILE, STEP, WIDTH, SPLIT)
        up = scaled(codes, scales, column + offset, there, start, kind, IN, STEP, WIDTH)
        total = added(total, up, part, TILE, STEP, WIDTH, SPLIT)
    total = finished(total, kind, SPLIT)
    gates = finished(gates, kind, SPLIT)
    return total, gates, tl.sum(squares, axis=0)
