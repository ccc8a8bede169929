"""The Triton bodies of attention over a cache, and what gathered attention shares with them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def in_base_2(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Dot products of queries and keys as scores in base 2, capped unless SOFTCAP is None."""
    if SOFTCAP is None:
        capped = scores * (SCALE * LOG2E)
    else:
        x = scores * (SCALE / SOFTCAP)
        # Near 0 the quotient has few digits left, and a series has them all.
        away = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        bent = (1.0 - away) / (1.0 + away)
        square = x * x
        near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        bent = tl.where(tl.abs(x) < 0.125, near, tl.where(x < 0.0, -bent, bent))
        capped = bent * (SOFTCAP * LOG2E)
    return capped


@triton.jit
def products_of(q, k, more_q=None, more_k=None):
    """Dot products ``[ROWS, KEYS]`` of queries and keys; ``more_q``, ``more_k``: more channels.

    Keys of another type are multiplied in float32, which the queries then are; those of 8 bits,
    which wider types hold exactly, in the type of the queries.
    """
    products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if more_q is not None:
        more_k = tl.trans(more_k.to(q.dtype))
        products = tl.dot(more_q, more_k, products, input_precision="ieee")
    return products


@triton.jit
def fold(
    sums,
    q,
    k,
    v,
    visible,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    log_weights=None,
    more_q=None,
    more_k=None,
):
    """Add a tile of keys to the sums: weighted values, their weight, the maximum in base 2.

    ``q [ROWS, WIDTH]``, ``k [KEYS, WIDTH]``, ``v [KEYS, VALUE_WIDTH]``, ``visible [ROWS, KEYS]``:
    which keys a row reads. What no row reads must be finite. ``log_weights [ROWS, KEYS]``: added to
    the scores, natural log. ``more_q [ROWS, REST]``, ``more_k [KEYS, REST]``: more channels of
    queries and keys.
    """
    acc, total, top = sums
    scores = in_base_2(products_of(q, k, more_q, more_k), SCALE, SOFTCAP)
    if log_weights is not None:
        scores += log_weights * LOG2E
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    decay = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return acc, total, higher


@triton.jit
def finished(sums):
    """The sums as an output and its log-sum-exp, natural log: 0 and -inf over no key.

    A NaN among the keys that are read must end as NaN: it is not "no key".
    """
    acc, total, top = sums
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), (top + tl.log2(whole)) / LOG2E)
    return acc / whole[:, None], lse


@triton.jit
def read_queries(
    q,
    at,
    live,
    active,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """A tile ``[ROWS, WIDTH]`` of the queries number ``at``: their channels from FIRST on.

    In float32 where TO_FLOAT32. 0 past their SIZE, for rows that are not ``live``, and where the
    program is not ``active``: it reads no key.
    """
    channel = FIRST + tl.arange(0, WIDTH)
    mask = (live & active)[:, None] & (channel < SIZE)[None, :]
    tile = tl.load(q + at[:, None] * SIZE + channel[None, :], mask=mask, other=0.0)
    return tile.to(tl.float32) if TO_FLOAT32 else tile


@triton.jit
def read_probe(probe, index, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Query number ``index`` in a tile.

    The matrix units take no fewer than 16 rows: the others are 0.
    """
    channel = tl.arange(0, WIDTH)
    mask = (tl.arange(0, 16) == 0)[:, None] & (channel < SIZE)[None, :]
    return tl.load(probe + (index * SIZE + channel)[None, :], mask=mask, other=0.0)


@triton.jit
def read_tile(base, offset, read, SIZE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr = 0):
    """A tile ``[KEYS, WIDTH]`` of keys or values, at each ``offset``, in elements, from ``base``.

    Their channels from FIRST on; 0 past their SIZE and where not ``read``.
    """
    channel = FIRST + tl.arange(0, WIDTH)
    mask = read[:, None] & (channel < SIZE)[None, :]
    return tl.load(base + offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def write_rows(out, lse, at, sums, live, active, VALUE: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Store rows number ``at`` of outputs, where the program is ``active``, and of log-sum-exps.

    ``sums``: those of `fold`; ``live``: which of the tile's rows there are; VALUE: channels of an
    output, of VALUE_WIDTH in the tile.
    """
    result, exponent = finished(sums)
    channel = tl.arange(0, VALUE_WIDTH)
    mask = (live & active)[:, None] & (channel < VALUE)[None, :]
    pointers = out + at[:, None] * VALUE + channel[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at, exponent, mask=live)


@triton.jit
def attend(
    q,
    k,
    v,
    positions,
    key_positions,
    table,
    probe,
    out,
    lse,
    scores,
    tokens,
    slots,
    tiles,
    parts,
    WHOLE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A program attends ROWS of the tokens * GROUP query rows of a KV head to its share of slots.

    Of the tiles of KEYS slots it takes one in SPLITS, whatever the length or the capacity: all
    programs of a batch row have about as much to do, and read what lies together at about the same
    time. Programs of neighbouring heads follow each other, as their keys do in memory. ``tiles`` of
    rows share the keys; ``parts`` of the SPLITS may have something to read. WHOLE: it is one part,
    and the program writes the result, else a part for `merge_kernel`. HAS_KEY_POSITIONS: the
    positions of the keys are ``key_positions``; otherwise a key's slot is its position. BLOCK: the
    slots of a block, of which ``table`` says where a row has each, -1 for none; a multiple of KEYS.
    0: each row has its slots in one piece. PROBED: ``scores`` gets the products of the keys and of
    the head's query in ``probe``; tiles that share keys write the same numbers. The channels of a
    key past WIDTH, where there are any, are a tile REST wide.
    """
    head = tl.program_id(0) % KV_HEADS
    rest = tl.program_id(0) // KV_HEADS
    split = rest // tiles % parts
    batch_row = (rest // (tiles * parts)).to(tl.int64)
    row = rest % tiles * ROWS + tl.arange(0, ROWS)
    live = row < tokens * GROUP
    position = tl.load(positions + batch_row * tokens + row // GROUP, mask=live, other=-1)
    until = tl.max(position) + 1
    end = slots if HAS_KEY_POSITIONS else tl.minimum(until, slots)
    number = split
    if WINDOW is not None:
        first = tl.min(tl.where(position >= 0, position, 2**31 - 1)) - (WINDOW - 1)
        if not HAS_KEY_POSITIONS:
            # The first of this program's tiles that the window reaches.
            passed = tl.minimum(tl.maximum(first, 0), slots) // KEYS
            number = passed + (split + SPLITS - passed % SPLITS) % SPLITS
    begin = number * KEYS

    query = (batch_row * tokens + row // GROUP) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
    CACHED: tl.constexpr = k.dtype.element_ty
    TO_FLOAT32: tl.constexpr = q.dtype.element_ty != CACHED and CACHED.primitive_bitwidth > 8
    tile = read_queries(q, query, live, begin < end, SIZE, WIDTH, TO_FLOAT32)
    more_tile = None
    if REST > 0:
        more_tile = read_queries(q, query, live, begin < end, SIZE, REST, TO_FLOAT32, WIDTH)
    base = batch_row * slots
    key = tl.arange(0, KEYS)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_KEY_POSITIONS:
        key_positions += batch_row * slots
        slot_positions = tl.load(key_positions + begin + key, mask=begin + key < end, other=-1)
    if PROBED:
        probe_index = batch_row * KV_HEADS + head
        pooled = read_probe(probe, probe_index, SIZE, WIDTH).to(tile.dtype)
        scores += (batch_row * KV_HEADS + head) * slots
    if BLOCK > 0:
        table += batch_row * (slots // BLOCK)
        block = tl.load(table + begin // BLOCK, mask=begin < end, other=-1)
    for start in range(begin, end, SPLITS * KEYS):
        slot = start + key
        if HAS_KEY_POSITIONS:
            at, read = slot_positions, (slot_positions >= 0) & (slot_positions < until)
            # The next positions are on their way before this tile is multiplied.
            slot += SPLITS * KEYS
            slot_positions = tl.load(key_positions + slot, mask=slot < end, other=-1)
        else:
            at, read = slot, slot < end
        first_key = base + start
        if BLOCK > 0:
            read &= block >= 0
            first_key = block.to(tl.int64) * BLOCK + start % BLOCK
            # As above.
            following = start + SPLITS * KEYS
            block = tl.load(table + following // BLOCK, mask=following < end, other=-1)
        visible = read[None, :] & (at[None, :] <= position[:, None])
        if WINDOW is not None:
            read &= at >= first
            visible &= at[None, :] > position[:, None] - WINDOW
        # The first slot in int64, the others in int32 from there: a cache may have 2**31 elements.
        first_slot = first_key * KV_HEADS + head
        keys = read_tile(k + first_slot * SIZE, key * (KV_HEADS * SIZE), read, SIZE, WIDTH)
        more_keys = None
        if REST > 0:
            more_keys = read_tile(
                k + first_slot * SIZE, key * (KV_HEADS * SIZE), read, SIZE, REST, WIDTH
            )
        if PROBED:
            products = products_of(pooled, keys)
            tl.store(scores + start + key, tl.sum(products, axis=0) * SCALE, mask=read)
        values = keys
        if not VALUES_IN_KEYS:
            values = read_tile(
                v + first_slot * VALUE, key * (KV_HEADS * VALUE), read, VALUE, VALUE_WIDTH
            )
        acc, total, top = fold(
            *((acc, total, top), tile, keys, values, visible, SCALE, SOFTCAP),
            more_q=more_tile,
            more_k=more_keys,
        )

    if WHOLE:
        write_rows(out, lse, query, (acc, total, top), live, True, VALUE, VALUE_WIDTH)
    else:
        part = (batch_row * KV_HEADS + head) * parts + split
        part = part * (tokens * GROUP) + row
        write_rows(out, lse, part, (acc, total, top), live, begin < end, VALUE, VALUE_WIDTH)


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    positions,
    key_positions,
    table,
    probe,
    out,
    lse,
    scores,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """`attend`, compiled for one number of tokens, slots, tiles and parts."""
    attend(
        q,
        k,
        v,
        positions,
        key_positions,
        table,
        probe,
        out,
        lse,
        scores,
        TOKENS,
        SLOTS,
        TILES,
        PARTS,
        PARTS == 1,
        KV_HEADS,
        GROUP,
        SIZE,
        VALUE,
        SCALE,
        SOFTCAP,
        WINDOW,
        HAS_KEY_POSITIONS,
        BLOCK,
        PROBED,
        VALUES_IN_KEYS,
        WIDTH,
        REST,
        VALUE_WIDTH,
        ROWS,
        SPLITS,
        KEYS,
    )


@triton.jit
def exact_attention_kernel(
    q,
    k,
    v,
    positions,
    key_positions,
    table,
    probe,
    sizes,
    out,
    lse,
    scores,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """`attend` for any number of tokens, slots, tiles and parts: these are the ``sizes``.

    One machine program serves all of them, so that a row's arithmetic cannot follow from them
    (docs/batch_invariance.md).
    """
    attend(
        q,
        k,
        v,
        positions,
        key_positions,
        table,
        probe,
        out,
        lse,
        scores,
        tl.load(sizes),
        tl.load(sizes + 1),
        tl.load(sizes + 2),
        tl.load(sizes + 3),
        False,
        KV_HEADS,
        GROUP,
        SIZE,
        VALUE,
        SCALE,
        SOFTCAP,
        WINDOW,
        HAS_KEY_POSITIONS,
        BLOCK,
        PROBED,
        VALUES_IN_KEYS,
        WIDTH,
        REST,
        VALUE_WIDTH,
        ROWS,
        SPLITS,
        KEYS,
    )
