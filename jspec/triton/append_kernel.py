"""The Triton body that norms and rotates queries and keys, and writes keys and values."""

import triton
import triton.language as tl


@triton.jit
def as_cached(x, KIND: tl.constexpr):
    """As `jspec.ops.cached.as_cached`."""
    is_float8: tl.constexpr = KIND.primitive_bitwidth == 8
    if is_float8:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(KIND)


@triton.jit
def halves(x, at, live, SIZE: tl.constexpr, HALF: tl.constexpr):
    """The halves ``[heads, HALF]`` of heads of SIZE channels that begin at ``at``; 0 past them."""
    half = tl.arange(0, HALF)
    mask = live[:, None] & (half < SIZE // 2)[None, :]
    pointers = x + at[:, None] + half[None, :]
    first = tl.load(pointers, mask=mask, other=0.0)
    return first, tl.load(pointers + SIZE // 2, mask=mask, other=0.0)


@triton.jit
def norm_and_rotate(
    first, second, first_scale, second_scale, cosine, sine, EPS: tl.constexpr, SIZE: tl.constexpr
):
    """Both halves ``[heads, HALF]`` of heads of SIZE channels, normed and rotated: float32.

    ``first_scale``, ``second_scale [HALF]``: the norm's, None for no norm; EPS: its epsilon.
    """
    kind = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if first_scale is not None:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / SIZE
        root = (1.0 / tl.sqrt_rn(mean + EPS))[:, None]
        # Rounded where the model rounds: after the norm, and after its scale.
        first_scale = first_scale.to(tl.float32)[None, :]
        second_scale = second_scale.to(tl.float32)[None, :]
        first = ((first * root).to(kind).to(tl.float32) * first_scale).to(kind).to(tl.float32)
        second = ((second * root).to(kind).to(tl.float32) * second_scale).to(kind).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def append(
    joined,
    cosine,
    sine,
    slots,
    q_scale,
    k_scale,
    queries,
    keys,
    values,
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
):
    """Norm and rotate the queries and the key of one KV head of a token; append key and value.

    ``joined``: the projection ``[B, TOKENS, KV_HEADS, GROUP * SIZE + SIZE + VALUE]``. ``slots``:
    the slot of each token, SLOTS for one that is not appended. GROUP: query heads of a KV head;
    SIZE and VALUE: channels of a key and of a value; NORMED: whether queries and keys have norms,
    with scales and epsilons. GROUP_WIDTH, HALF and VALUE_WIDTH: powers of 2, at least GROUP,
    SIZE / 2 and VALUE.

    Returns both halves of the key, its place in the cache and whether it was appended.
    """
    head = tl.program_id(0) % KV_HEADS
    token = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    start = (token * KV_HEADS + head) * (GROUP * SIZE + SIZE + VALUE)
    half = tl.arange(0, HALF)
    inside = half < SIZE // 2
    query = tl.arange(0, GROUP_WIDTH)
    live = query < GROUP
    lone = tl.arange(0, 1)
    channel = tl.arange(0, VALUE_WIDTH)
    there = channel < VALUE
    # Everything is loaded before anything is stored: no load waits for another.
    slot = tl.load(slots + token)
    q_first, q_second = halves(joined, start + query * SIZE, live, SIZE, HALF)
    k_first, k_second = halves(joined, start + GROUP * SIZE + lone, lone == 0, SIZE, HALF)
    value = tl.load(joined + start + (GROUP * SIZE + SIZE) + channel, mask=there, other=0.0)
    c = tl.load(cosine + token * (SIZE // 2) + half, mask=inside, other=0.0)[None, :]
    s = tl.load(sine + token * (SIZE // 2) + half, mask=inside, other=0.0)[None, :]
    q_scale_1 = tl.load(q_scale + half, mask=inside, other=0.0) if NORMED else None
    q_scale_2 = tl.load(q_scale + half + SIZE // 2, mask=inside, other=0.0) if NORMED else None
    k_scale_1 = tl.load(k_scale + half, mask=inside, other=0.0) if NORMED else None
    k_scale_2 = tl.load(k_scale + half + SIZE // 2, mask=inside, other=0.0) if NORMED else None

    first, second = norm_and_rotate(q_first, q_second, q_scale_1, q_scale_2, c, s, Q_EPS, SIZE)
    to = queries + ((token * KV_HEADS + head) * GROUP + query)[:, None] * SIZE + half[None, :]
    mask = live[:, None] & inside[None, :]
    tl.store(to, first.to(queries.dtype.element_ty), mask=mask)
    tl.store(to + SIZE // 2, second.to(queries.dtype.element_ty), mask=mask)

    place = (token // TOKENS * SLOTS + slot) * KV_HEADS + head
    is_stored = slot < SLOTS
    first, second = norm_and_rotate(k_first, k_second, k_scale_1, k_scale_2, c, s, K_EPS, SIZE)
    to = keys + place * SIZE + lone[:, None] + half[None, :]
    mask = is_stored & (lone == 0)[:, None] & inside[None, :]
    # Rounded as the queries are, also where the cache is of another type.
    kind = joined.dtype.element_ty
    tl.store(to, as_cached(first.to(kind), keys.dtype.element_ty), mask=mask)
    tl.store(to + SIZE // 2, as_cached(second.to(kind), keys.dtype.element_ty), mask=mask)
    value = as_cached(value, values.dtype.element_ty)
    tl.store(values + place * VALUE + channel, value, mask=there & is_stored)
    return first.to(kind), second.to(kind), place, is_stored


@triton.jit
def append_kernel(
    keys,
    values,
    joined,
    cosine,
    sine,
    slots,
    q_scale,
    k_scale,
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
):
    """`append` into ``keys`` and ``values``, which are inputs and outputs in one."""
    append(
        joined,
        cosine,
        sine,
        slots,
        q_scale,
        k_scale,
        queries,
        keys,
        values,
        NORMED,
        SLOTS,
        TOKENS,
        KV_HEADS,
        GROUP,
        SIZE,
        VALUE,
        Q_EPS,
        K_EPS,
        GROUP_WIDTH,
        HALF,
        VALUE_WIDTH,
    )


@triton.jit
def append_kernel_0_3(
    keys_before,
    values_before,
    joined,
    cosine,
    sine,
    slots,
    q_scale,
    k_scale,
    queries,
    keys,
    values,
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
):
    """`append_kernel` for jax-triton 0.3, which passes an aliased array as input and as output."""
    append(
        joined,
        cosine,
        sine,
        slots,
        q_scale,
        k_scale,
        queries,
        keys,
        values,
        NORMED,
        SLOTS,
        TOKENS,
        KV_HEADS,
        GROUP,
        SIZE,
        VALUE,
        Q_EPS,
        K_EPS,
        GROUP_WIDTH,
        HALF,
        VALUE_WIDTH,
    )
