"""The Triton bodies that merge the parts of a split attention."""

import triton
import triton.language as tl

from jspec.triton.attention_kernel import LOG2E


@triton.jit
def merge(
    part_out,
    part_lse,
    out,
    lse,
    tokens,
    parts,
    MAX_PARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    CHANNELS_AT_ONCE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
):
    """Merge the parts of a split attention, float32, into its output and log-sum-exp.

    ``part_out [B, KV_HEADS, parts, tokens * GROUP, VALUE]`` and ``part_lse``, of the same shape
    without VALUE: what the programs of the split attention left, ``parts`` of each query row and at
    most MAX_PARTS; a part with a log-sum-exp of -inf is not read. ``out [B, tokens, N, VALUE]`` and
    ``lse [B, tokens, N]``: the result. VALUE is the channels of a value. A program merges
    CHANNELS_AT_ONCE of them for one query row, PARTS_AT_ONCE parts in a round; PROGRAMS_PER_ROW
    programs share a row.
    """
    query = (tl.program_id(0) // PROGRAMS_PER_ROW).to(tl.int64)
    start_channel = tl.program_id(0) % PROGRAMS_PER_ROW * CHANNELS_AT_ONCE
    channel = start_channel + tl.arange(0, CHANNELS_AT_ONCE)
    inside = channel < VALUE
    n = query % (KV_HEADS * GROUP)
    token = query // (KV_HEADS * GROUP)
    row = token % tokens * GROUP + n % GROUP
    first = (token // tokens * KV_HEADS + n // GROUP) * parts * (tokens * GROUP) + row
    acc = tl.zeros([CHANNELS_AT_ONCE], tl.float32)
    total = 0.0
    top = float("-inf")
    for start in tl.static_range(0, MAX_PARTS, PARTS_AT_ONCE):
        index = start + tl.arange(0, PARTS_AT_ONCE)
        at = first + index * (tokens * GROUP)
        exponent = tl.load(part_lse + at, mask=index < parts, other=float("-inf"))
        mask = (exponent != float("-inf"))[:, None] & inside[None, :]
        part = tl.load(part_out + at[:, None] * VALUE + channel[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(exponent))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((exponent - base) * LOG2E)
        total = total * decay + tl.sum(weight)
        acc = acc * decay + tl.sum(weight[:, None] * part, axis=0)
        top = higher
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(out + query * VALUE + channel, (acc / whole).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) % PROGRAMS_PER_ROW == 0:
        tl.store(lse + query, tl.where(total == 0.0, float("-inf"), top + tl.log2(whole) / LOG2E))


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    out,
    lse,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    CHANNELS_AT_ONCE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
):
    """`merge`, compiled for one number of tokens and of parts."""
    merge(
        part_out,
        part_lse,
        out,
        lse,
        tokens=TOKENS,
        parts=PARTS,
        MAX_PARTS=PARTS,
        KV_HEADS=KV_HEADS,
        GROUP=GROUP,
        VALUE=VALUE,
        PARTS_AT_ONCE=PARTS_AT_ONCE,
        CHANNELS_AT_ONCE=CHANNELS_AT_ONCE,
        PROGRAMS_PER_ROW=PROGRAMS_PER_ROW,
    )


@triton.jit
def exact_merge_kernel(
    part_out,
    part_lse,
    sizes,
    out,
    lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    CHANNELS_AT_ONCE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
):
    """`merge` for the ``sizes`` of `exact_attention_kernel`, with all parts in one round."""
    merge(
        part_out,
        part_lse,
        out,
        lse,
        tokens=tl.load(sizes),
        parts=tl.load(sizes + 3),
        MAX_PARTS=PARTS_AT_ONCE,
        KV_HEADS=KV_HEADS,
        GROUP=GROUP,
        VALUE=VALUE,
        PARTS_AT_ONCE=PARTS_AT_ONCE,
        CHANNELS_AT_ONCE=CHANNELS_AT_ONCE,
        PROGRAMS_PER_ROW=PROGRAMS_PER_ROW,
    )
