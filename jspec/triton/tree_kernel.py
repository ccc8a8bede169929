"""The Triton body of the verification of trees."""

import triton
import triton.language as tl


@triton.jit
def at(values, index, node):
    """``values[index]``: of the nodes ``node``, one value each."""
    return tl.sum(tl.where(index[:, None] == node[None, :], values[None, :], 0), axis=1)


@triton.jit
def tree_kernel(
    draft,
    target,
    parents,
    lengths,
    stops,
    accepted_out,
    committed_out,
    mismatch_out,
    next_out,
    stopped_out,
    tokens_out,
    path_out,
    GAMMA: tl.constexpr,
    STOPS: tl.constexpr,
    NODES: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Verify the tree of one row. NODES: a power of 2, over GAMMA and up to 2**ROUNDS."""
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    is_draft = (node > 0) & (node <= GAMMA)
    target_tokens = tl.load(target + row * (GAMMA + 1) + node, mask=node <= GAMMA, other=-1)
    drafted = tl.load(draft + row * GAMMA + node - 1, mask=is_draft, other=-1)
    parent = tl.load(parents + row * GAMMA + node - 1, mask=is_draft, other=0)
    parent = tl.minimum(tl.maximum(parent, 0), tl.maximum(node - 1, 0))
    is_node = is_draft & (node <= tl.load(lengths + row))
    matches = is_node & (drafted == at(target_tokens, parent, node))

    # Each round doubles how far a node sees.
    matching = ((node == 0) | matches).to(tl.int32)
    depth = (node > 0).to(tl.int32)
    path_bits = tl.where(node > 0, 1 << node, 0)
    ancestor = parent
    for _ in tl.static_range(ROUNDS):
        matching = matching * at(matching, ancestor, node)
        depth += at(depth, ancestor, node)
        path_bits |= at(path_bits, ancestor, node)
        ancestor = at(ancestor, ancestor, node)
    # The deepest node whose ancestors all match ends the path, the first of equals.
    is_accepted = (matching > 0) & (node <= GAMMA)
    best = tl.max(tl.where(is_accepted, depth * NODES + NODES - 1 - node, 0), axis=0)
    count = best // NODES
    last = NODES - 1 - best % NODES
    continues = tl.max((is_node & (parent == last)).to(tl.int32), axis=0) > 0
    following = tl.sum(tl.where(node == last, target_tokens, 0), axis=0)
    bits = tl.sum(tl.where(node == last, path_bits, 0), axis=0)

    # From here ``node`` counts positions of the block.
    is_at = (((bits >> node) & 1) > 0)[None, :] & (depth[None, :] == node[:, None] + 1)
    path = tl.sum(tl.where(is_at, node[None, :], 0), axis=1)
    token = tl.sum(tl.where(is_at, drafted[None, :], 0), axis=1)
    token = tl.where(node < count, token, tl.where(node == count, following, -1))
    is_stop = tl.zeros([NODES], tl.int1)
    for m in tl.static_range(STOPS):
        is_stop |= token == tl.load(stops + row * STOPS + m)
    first = tl.min(tl.where(is_stop & (token >= 0), node, NODES), axis=0)
    stopped = first < NODES
    committed = tl.where(stopped, first + 1, count + 1)
    accepted = tl.minimum(count, committed)
    cut = committed <= count
    tl.store(accepted_out + row, accepted)
    tl.store(committed_out + row, committed)
    tl.store(mismatch_out + row, (committed > count) & continues)
    tl.store(next_out + row, tl.where(cut, -1, following))
    tl.store(stopped_out + row, stopped)
    token = tl.where(node < committed, token, -1)
    tl.store(tokens_out + row * (GAMMA + 1) + node, token, mask=node <= GAMMA)
    path = tl.where(node < accepted, path, 0)
    tl.store(path_out + row * GAMMA + node, path, mask=node < GAMMA)
