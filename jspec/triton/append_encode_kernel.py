"""The Triton body that also writes the hash code of each new key into its column."""

import triton
import triton.language as tl

from jspec.triton.append_kernel import append, as_cached


@triton.jit
def encode(
    first,
    second,
    w,
    codes,
    head,
    place,
    is_stored,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
):
    """Store the hash code of a key: the signs of its matmul with the matrix of its head.

    ``first``, ``second [1, HALF]``: the halves of the key, of SIZE channels in all; ``w [KV_HEADS,
    SIZE, BITS]``. The code is written at ``place`` of ``codes`` where ``is_stored``, a word of 32
    bits at a time.
    """
    half = tl.arange(0, HALF)
    inside = (half < SIZE // 2)[:, None]
    bit = tl.arange(0, 32)
    first = tl.trans(first.to(tl.float32))
    second = tl.trans(second.to(tl.float32))
    at = w + (head * SIZE + half[:, None]) * BITS + bit[None, :]
    for word in tl.static_range(BITS // 32):
        first_weights = tl.load(at + word * 32, mask=inside, other=0.0).to(tl.float32)
        second_weights = tl.load(at + (SIZE // 2 * BITS + word * 32), mask=inside, other=0.0)
        sums = tl.sum(first * first_weights + second * second_weights, axis=0)
        ones = (sums > 0).to(tl.uint32) << bit.to(tl.uint32)
        tl.store(codes + place * (BITS // 32) + word, tl.sum(ones, axis=0), mask=is_stored)


@triton.jit
def append_encode_kernel(
    keys,
    values,
    codes,
    joined,
    cosine,
    sine,
    slots,
    q_scale,
    k_scale,
    w,
    queries,
    NORMED: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    """`append` and `encode`; ``keys``, ``values`` and ``codes`` are inputs and outputs in one."""
    first, second, place, is_stored = append(
        *(joined, cosine, sine, slots, q_scale, k_scale, queries, keys, values),
        *(NORMED, SLOTS, TOKENS, KV_HEADS, GROUP, SIZE, VALUE, Q_EPS, K_EPS),
        *(GROUP_WIDTH, HALF, VALUE_WIDTH),
    )
    head = tl.program_id(0) % KV_HEADS
    kind = keys.dtype.element_ty
    encode(
        as_cached(first, kind),
        as_cached(second, kind),
        w,
        codes,
        head,
        place,
        is_stored,
        SIZE,
        HALF,
        BITS,
    )


@triton.jit
def append_encode_kernel_0_3(
    keys_before,
    values_before,
    codes_before,
    joined,
    cosine,
    sine,
    slots,
    q_scale,
    k_scale,
    w,
    queries,
    keys,
    values,
    codes,
    NORMED: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    """`append_encode_kernel` for jax-triton 0.3, which passes an alias as input and as output."""
    first, second, place, is_stored = append(
        *(joined, cosine, sine, slots, q_scale, k_scale, queries, keys, values),
        *(NORMED, SLOTS, TOKENS, KV_HEADS, GROUP, SIZE, VALUE, Q_EPS, K_EPS),
        *(GROUP_WIDTH, HALF, VALUE_WIDTH),
    )
    head = tl.program_id(0) % KV_HEADS
    kind = keys.dtype.element_ty
    encode(
        as_cached(first, kind),
        as_cached(second, kind),
        w,
        codes,
        head,
        place,
        is_stored,
        SIZE,
        HALF,
        BITS,
    )
