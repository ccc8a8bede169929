"""Drafts that are trees: what each node comes after, and which path verification accepts.

Node 0 of a row is its last known token, the root; node i + 1 is draft token i. A node comes after
its parent. A candidate is certain given its context, so the target's token is drawn at each node
with its position's own random number, and the child that equals it is followed: the committed
tokens are those of plain decoding (docs/sampling.md, *One-hot drafts*).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.verify import Verified, check_greedy, commit, greedy_sizes, verified_like
from jspec.typing import Array

MAX_NODES = 32  # the root included: the ancestors of a node are bits of a number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """The nodes of a pass over a tree.

    Attributes:
        positions: int32 ``[B, T]``: positions of the nodes in their texts, the root's and the depth
            below it; -1 for padding.
        ancestors: uint32 ``[B, T]``: bit i is set for the ancestor i of a node, and for the node
            itself.
    """

    positions: Array
    ancestors: Array

    @classmethod
    def of(cls, parents: Array, begin: Array, is_node: Array) -> Tree:
        """The tree of ``parents [B, gamma]``, whose root is at ``begin [B]``.

        ``is_node``: bool ``[B, gamma + 1]``, which nodes there are.
        """
        ancestors = ancestors_of(parents)
        positions = jnp.where(is_node, begin[:, None] + depths_of(ancestors), -1)
        return cls(positions, ancestors)


def ancestors_of(parents: Array) -> Array:
    """`Tree.ancestors`, uint32 ``[B, gamma + 1]``, of ``parents [B, gamma]``.

    What is no node before it counts as the nearest one that is.
    """
    nodes = parents.shape[1] + 1
    index = jnp.arange(nodes, dtype=jnp.int32)[None]
    parents = jnp.pad(parents, ((0, 0), (1, 0)))
    parents = jnp.clip(parents, 0, jnp.maximum(index - 1, 0))
    ancestors = jnp.broadcast_to(jnp.uint32(1) << index.astype(jnp.uint32), parents.shape)
    # Each round doubles how far a node sees.
    for _ in range((nodes - 1).bit_length()):
        ancestors = ancestors | jnp.take_along_axis(ancestors, parents, axis=1)
        parents = jnp.take_along_axis(parents, parents, axis=1)
    return ancestors


def depths_of(ancestors: Array) -> Array:
    """How many nodes below the root each node is, int32."""
    return lax.population_count(ancestors).astype(jnp.int32) - 1


def has_bit(bits: Array, index: Array) -> Array:
    """Whether bit ``index``, in 0..31, of ``bits`` is set."""
    return (bits >> index.astype(jnp.uint32) & 1) == 1


def verify_tree(
    draft_tokens: Array,
    target_tokens: Array,
    parents: Array,
    draft_lengths: Array,
    stop_tokens: Array,
    *,
    implementation: str | None = None,
) -> tuple[Verified, Array]:
    """Follow the target's tokens through a tree, as long as a child equals them.

    Where children of a node are equal, the deepest path that matches is followed, of equally deep
    ones that with the first last node.

    Args:
        draft_tokens: int32 ``[B, gamma]``, gamma at most 31; the token of node i + 1 is number i.
        target_tokens: ``[B, gamma + 1]``, the target's token after each node.
        parents: int32 ``[B, gamma]``: the parent of node i + 1 is in 0..i, the root being node 0.
        draft_lengths: int32 ``[B]`` in 0..gamma; draft tokens beyond are ignored.
        stop_tokens: ``[B, M]``, -1 for none. All token ids have one dtype.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Verified`, and the path int32 ``[B, gamma]``: the nodes of the accepted tokens, in
        ascending order; 0 after them.

    Raises:
        ValueError: for shapes or dtypes that do not fit together, or too many nodes.
    """
    check_greedy(draft_tokens, target_tokens, draft_lengths, stop_tokens)
    check_parents(parents, draft_tokens.shape)
    arguments = (draft_tokens, target_tokens, parents, draft_lengths, stop_tokens)
    *fields, path = VERIFY_TREE(*arguments, implementation=implementation)
    return Verified(*fields), path


def tree_like(draft_tokens: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what backends return for ``draft_tokens [B, gamma]``."""
    path = jax.ShapeDtypeStruct(draft_tokens.shape, jnp.int32)
    return *verified_like(draft_tokens), path


def check_parents(parents: Array, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` where ``parents`` are not those of draft tokens of this ``shape``."""
    if parents.shape != shape or parents.dtype != jnp.int32:
        raise ValueError(f"parents {parents.dtype} {parents.shape} must be int32 {shape}")
    if shape[1] >= MAX_NODES:
        raise ValueError(
            f"gamma={shape[1]} is over {MAX_NODES - 1}, the most draft tokens of a tree"
        )


def _xla(draft_tokens, target_tokens, parents, draft_lengths, stop_tokens) -> tuple[Array, ...]:
    """The reference of `verify_tree`: the fields of `Verified`, and the path."""
    gamma = draft_tokens.shape[1]
    ancestors, index = ancestors_of(parents), jnp.arange(gamma + 1, dtype=jnp.int32)[None]
    depths = depths_of(ancestors)
    parents = jnp.clip(parents, 0, index[:, :-1])
    is_node = index[:, 1:] <= draft_lengths[:, None]
    matches = is_node & (draft_tokens == jnp.take_along_axis(target_tokens, parents, axis=1))
    matches = jnp.pad(matches, ((0, 0), (1, 0)), constant_values=True)
    matching = jnp.where(matches, jnp.uint32(1) << index.astype(jnp.uint32), 0).sum(
        axis=1, dtype=jnp.uint32, keepdims=True
    )
    # Those whose ancestors all match, of which the deepest one ends the path.
    is_accepted = ancestors & ~matching == 0
    last = jnp.argmax(jnp.where(is_accepted, depths, -1), axis=1).astype(jnp.int32)[:, None]
    end, accepted, following = (
        jnp.take_along_axis(x, last, axis=1) for x in (ancestors, depths, target_tokens)
    )
    is_at = has_bit(end, index)[:, None] & (depths[:, None] == index[:, 1:, None])
    path = jnp.where(is_at, index[:, None], 0).sum(axis=2, dtype=jnp.int32)
    tokens = jnp.take_along_axis(draft_tokens, jnp.maximum(path - 1, 0), axis=1)
    # The tokens of a path are a chain, which goes on where the last node has a child.
    continues = (is_node & (parents == last)).any(axis=1)
    accepted = accepted[:, 0]
    lengths = accepted + continues.astype(jnp.int32)
    fields = commit(tokens, lengths, accepted, following[:, 0], stop_tokens)
    return *fields, jnp.where(index[:, 1:] <= fields[0][:, None], path, 0)


def random_tree(batch: int, gamma: int, stops: int, dtype: str = "int32") -> tuple[np.ndarray, ...]:
    """Arguments of `verify_tree`: random trees over few tokens, whose siblings differ.

    Of the first row each node is the child of the one before it: a chain.
    """
    rng = np.random.default_rng([batch, gamma, stops])
    parents = np.stack([rng.integers(0, i + 1, batch) for i in range(gamma)], axis=1)
    parents[0] = np.arange(gamma)
    target = rng.integers(0, 4, (batch, gamma + 1))
    draft = np.empty((batch, gamma), int)
    for row, i in np.ndindex(batch, gamma):
        siblings = draft[row, :i][parents[row, :i] == parents[row, i]]
        expected = target[row, parents[row, i]]
        others = [token for token in range(20) if token not in siblings]
        is_target = expected not in siblings and rng.random() < 0.7
        draft[row, i] = expected if is_target else rng.choice(others)
    lengths = np.where(rng.random(batch) < 0.6, gamma, rng.integers(0, gamma + 1, batch))
    stop_tokens = np.where(rng.random((batch, stops)) < 0.3, 3, -1)
    kinds = (dtype, dtype, "int32", "int32", dtype)
    arrays = (draft, target, parents, lengths, stop_tokens)
    return tuple(x.astype(kind) for x, kind in zip(arrays, kinds, strict=True))


# ``(B, gamma, M, dtype)`` by name.
_SHAPES = {
    "small": (4, 3, 1, "int32"),
    "sixteen": (40, 15, 1, "int32"),
    "largest": (9, 31, 2, "int64"),
    "no-stops": (6, 8, 0, "int32"),
}


def _equal_siblings() -> tuple[np.ndarray, ...]:
    draft, target, *rest = random_tree(*_SHAPES["sixteen"])
    return draft % 2, target % 2, *rest


def _cases() -> list[Case]:
    cases = [
        Case(name, functools.partial(random_tree, *shape), small=shape[3] == "int32")
        for name, shape in _SHAPES.items()
    ]
    return [*cases, Case("equal-siblings", _equal_siblings, small=True)]


# Backends return the fields of `Verified`, then the path.
VERIFY_TREE = Operation(
    "verify_tree",
    {
        "xla": Backend("xla", _xla, always),
        "cuda": "jspec.cuda_ffi.verify:TREE",
        "pallas": "jspec.pallas.tree:VERIFY_TREE",
        "triton": "jspec.triton.tree:VERIFY_TREE",
    },
    greedy_sizes,
    _cases,
)
