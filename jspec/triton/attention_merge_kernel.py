"""The Triton bodies that merge the parts of a split attention."""

import triton
import triton.language as tl

from jspec.triton.attention_kernel import LOG2E


@triton.jit
def merge(
    parts_of,
    part_lse,
    out,
    lse,
    tokens,
    parts,
    MAX_PARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    SOME: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program merges COLUMNS of the parts of one query row, SOME of them at a time.

    ``parts_of [B, KV_HEADS, parts, tokens * GROUP, VALUE]`` and their log-sum-exp; a part of -inf
    is not read. There are at most MAX_PARTS ``parts``.
    """
    query = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUE
    n = query % (KV_HEADS * GROUP)
    token = query // (KV_HEADS * GROUP)
    row = token % tokens * GROUP + n % GROUP
    first = (token // tokens * KV_HEADS + n // GROUP) * parts * (tokens * GROUP) + row
    acc = tl.zeros([COLUMNS], tl.float32)
    total = 0.0
    top = float("-inf")
    for start in tl.static_range(0, MAX_PARTS, SOME):
        some = start + tl.arange(0, SOME)
        at = first + some * (tokens * GROUP)
        exponent = tl.load(part_lse + at, mask=some < parts, other=float("-inf"))
        mask = (exponent != float("-inf"))[:, None] & inside[None, :]
        part = tl.load(parts_of + at[:, None] * VALUE + column[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(exponent))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((exponent - base) * LOG2E)
        total = total * decay + tl.sum(weight)
        acc = acc * decay + tl.sum(weight[:, None] * part, axis=0)
        top = higher
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(out + query * VALUE + column, (acc / whole).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) % BLOCKS == 0:
        tl.store(lse + query, tl.where(total == 0.0, float("-inf"), top + tl.log2(whole) / LOG2E))


@triton.jit
def merge_kernel(
    parts_of,
    part_lse,
    out,
    lse,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS: tl.constexpr,
    SOME: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`merge` for one number of tokens and parts."""
    merge(
        parts_of,
        part_lse,
        out,
        lse,
        TOKENS,
        PARTS,
        PARTS,
        KV_HEADS,
        GROUP,
        VALUE,
        SOME,
        COLUMNS,
        BLOCKS,
    )


@triton.jit
def exact_merge_kernel(
    parts_of,
    part_lse,
    sizes,
    out,
    lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    SOME: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`merge` for the ``sizes`` of `exact_attention_kernel`; SOME parts are all there can be."""
    merge(
        parts_of,
        part_lse,
        out,
        lse,
        tl.load(sizes),
        tl.load(sizes + 3),
        SOME,
        KV_HEADS,
        GROUP,
        VALUE,
        SOME,
        COLUMNS,
        BLOCKS,
    )
