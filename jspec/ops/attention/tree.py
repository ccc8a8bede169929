"""Attention of the nodes of a tree over a cache, of which each reads its ancestors alone.

`tree_attention` is the public operation; ``xla`` is the reference. ``two_parts`` reads what is
committed by the best backend of `jspec.ops.attention`, and the few nodes apart from it, so that
every backend serves trees.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.attention.dense import ATTENTION, attention_sizes, check_attention, values_in
from jspec.ops.attention.merge import merge_attention
from jspec.ops.attention.softmax import accumulate, empty_sums, finish, grouped
from jspec.ops.tree import MAX_NODES, Tree, has_bit
from jspec.typing import Array


def tree_attention(
    q: Array,
    k: Array,
    v: Array | None,
    tree: Tree,
    slots: Array,
    *,
    key_positions: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`jspec.ops.attention` of the nodes of a tree over a cache that already holds their keys.

    A node reads the keys at positions before that of the root, and those of its ancestors and of
    itself. A window counts positions, which siblings share.

    Args:
        q: ``[B, T, N, H]``, T at most 32.
        k: ``[B, S, K, H]``, with N a multiple of K.
        v: ``[B, S, K, H']``, or None as in `jspec.ops.attention`.
        tree: the nodes; node 0 is the root.
        slots: int32 ``[B, T]``: where the keys of the nodes are; ignored for padding. A key whose
            slot is S or more is not in this cache, and no node reads it.
        key_positions: int32 ``[B, S]``, absolute positions of the keys, -1 for an empty slot; None:
            a key's slot is its position. What it says of the root's position and later ones is
            ignored.
        scale: as in `jspec.ops.attention`.
        window: a node reads only keys at the last ``window`` positions up to its own; None is all.
        softcap: as in `jspec.ops.attention`.
        value_size: as in `jspec.ops.attention`.
        implementation: the backend by name; None is the best one.

    Returns:
        The output ``[B, T, N, H']`` in the dtype of ``q``, and the log-sum-exp of the scores,
        natural log, float32 ``[B, T, N]``. Padding gives 0 and -inf.

    Raises:
        ValueError: for shapes or dtypes that do not fit together, or too many nodes.
    """
    check_attention(q, k, v, tree.positions, key_positions, value_size)
    shape = q.shape[:2]
    if tree.ancestors.shape != shape or slots.shape != shape or shape[1] > MAX_NODES:
        raise ValueError(
            f"ancestors {tree.ancestors.shape} and slots {slots.shape} must be [B, T] = {shape} "
            f"with T at most {MAX_NODES}"
        )
    return TREE_ATTENTION(
        *(q, k, v, tree, slots),
        key_positions=key_positions,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        implementation=implementation,
    )


def _is_ancestor(tree: Tree, slots: Array, capacity: int, window: int | None) -> Array:
    """Which nodes ``[B, T]`` each node reads, bool ``[B, T, T]``: its ancestors in this cache."""
    position = tree.positions
    index = jnp.arange(position.shape[1], dtype=jnp.int32)[None, None]
    is_read = has_bit(tree.ancestors[..., None], index) & (position >= 0)[..., None]
    is_read &= (slots < capacity)[:, None]
    if window is not None:
        is_read &= position[:, None] > position[..., None] - window
    return is_read


def _committed_positions(tree: Tree, key_positions: Array | None, slots: int) -> Array:
    """The positions of the slots before the root, int32 ``[B, S]``, -1 for others."""
    if key_positions is None:
        key_positions = jnp.arange(slots, dtype=jnp.int32)[None]
    return jnp.where(key_positions < tree.positions[:, :1], key_positions, -1)


def _xla(q, k, v, tree, slots, *, key_positions, scale, window, softcap, value_size):
    """The reference of `tree_attention`: a mask over all slots."""
    (batch, tokens), (capacity, kv_heads) = q.shape[:2], k.shape[1:3]
    committed = _committed_positions(tree, key_positions, capacity)
    position = tree.positions
    is_read = (committed >= 0)[:, None] & (position >= 0)[..., None]
    if window is not None:
        is_read &= committed[:, None] > position[..., None] - window
    at = jnp.where(position >= 0, slots, capacity)
    row, node = jnp.arange(batch)[:, None, None], jnp.arange(tokens)[None, :, None]
    nodes_read = _is_ancestor(tree, slots, capacity, window)
    is_read = is_read.at[row, node, at[:, None]].set(nodes_read, mode="drop")
    is_read = jnp.repeat(is_read, q.shape[2] // kv_heads, axis=1)[:, None]
    rows, v = grouped(q * jnp.asarray(scale, q.dtype), kv_heads), values_in(k, v, value_size)
    sums = accumulate(empty_sums(rows, v.shape[3]), rows, k, v, is_read, softcap)
    return finish(sums, tokens, q.dtype)


def _two_parts(q, k, v, tree, slots, *, key_positions, window, **settings: Any):
    """`tree_attention` over what is committed, and over the nodes; merged."""
    position, batch = tree.positions, jnp.arange(len(q))[:, None]
    last = jnp.where(position >= 0, position[:, :1] - 1, -1)
    if window is not None or key_positions is not None:
        # The window of a deep node begins later.
        key_positions, last = _committed_positions(tree, key_positions, k.shape[1]), position
    static = {"key_positions": key_positions, "window": window, **settings}
    committed = ATTENTION(q, k, v, last, **static)
    capacity, kv_heads = k.shape[1:3]
    k, v = (
        x.at[batch, slots].get(mode="clip") for x in (k, values_in(k, v, settings["value_size"]))
    )
    rows = grouped(q * jnp.asarray(settings["scale"], q.dtype), kv_heads)
    nodes_read = _is_ancestor(tree, slots, capacity, window)
    is_read = jnp.repeat(nodes_read, q.shape[2] // kv_heads, axis=1)[:, None]
    sums = accumulate(empty_sums(rows, v.shape[3]), rows, k, v, is_read, settings["softcap"])
    nodes = finish(sums, q.shape[1], q.dtype)
    return merge_attention(*(jnp.stack(pair) for pair in zip(committed, nodes, strict=True)))


def _cases() -> list[Case]:
    """Trees of seven nodes after 20 and 6 tokens, some in slots of no order, one with padding."""
    parents = (0, 0, 1, 1, 3, 2), (0, 1, 2, 0, 4, 5)
    slots = np.array([[20, 22, 21, 26, 24, 23, 25], [6, 7, 8, 9, 10, 11, 12]], np.int32)

    def build() -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        shapes = [(2, n, heads, 16) for n, heads in ((7, 4), (30, 2), (30, 2))]
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        positions, ancestors = np.array([[20] * 7, [6] * 7], np.int32), np.ones((2, 7), np.uint32)
        for row, of_row in enumerate(parents):
            for node, parent in enumerate(of_row, 1):
                positions[row, node] = positions[row, parent] + 1
                ancestors[row, node] = ancestors[row, parent] | 1 << node
        positions[1, 5:] = -1
        nodes: Any = positions, ancestors
        return q, k, v, Tree(*nodes), slots

    return [
        Case(
            name,
            build,
            {"key_positions": None, "scale": 0.25, "value_size": None, **settings},
            small=True,
        )
        for name, settings in (
            ("plain", {"window": None, "softcap": None}),
            ("window-softcap", {"window": 4, "softcap": 2.0}),
        )
    ]


TREE_ATTENTION = Operation(
    "tree_attention",
    {
        "two_parts": Backend("two_parts", _two_parts, always, composite=True),
        "xla": Backend("xla", _xla, always),
    },
    lambda q, k, v, tree, slots, **settings: attention_sizes(q, k),
    _cases,
    default_order=("two_parts",),
)
