"""Verification of trees: plain Python, every outcome of a small law, and mutants of the rule."""

import inspect
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops import tree as module
from jspec.ops import verify_tree
from jspec.ops.tree import VERIFY_TREE, Tree
from tests.ops.backends import every_backend, every_case, run_or_skip
from tests.ops.test_verify import assert_outcomes, cut

over_backends = every_backend(VERIFY_TREE)


def walk(draft, target, parents, length: int) -> list[int]:
    """The nodes of the deepest path that equals the target's tokens, of equals the first."""
    paths: dict[int, list[int]] = {0: []}
    for node, (token, parent) in enumerate(zip(draft[:length], parents, strict=False), 1):
        if parent in paths and token == target[parent]:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)


def outcome(draft, target, parents, length: int, stops) -> tuple[dict, list[int]]:
    """What verification of one row must give, and its path."""
    path = walk(draft, target, parents, length)
    last = path[-1] if path else 0
    block = [*(draft[i - 1] for i in path), target[last]]
    result = cut(block, len(draft) + 1, stops, mismatch=last in parents[:length])
    path = path[: result["accepted"]]
    return result, path + [0] * (len(draft) - len(path))


@over_backends
@every_case(VERIFY_TREE)
def test_the_path_is_that_of_equal_children(case, backend):
    with jax.enable_x64(case.build()[0].dtype == np.int64):
        verified, path = run_or_skip(verify_tree, VERIFY_TREE, backend, *case.arguments)
    draft, target, parents, lengths, stops = (x.tolist() for x in case.build())
    rows = list(map(outcome, draft, target, parents, lengths, stops))
    assert_outcomes(verified, [fields for fields, _ in rows], case.build()[0].dtype)
    np.testing.assert_array_equal(path, [nodes for _, nodes in rows])
    assert path.dtype == jnp.int32


def test_accepted_nodes_can_be_packed_one_after_the_other():
    """No target is the source of a later one, as `pack_path` asks."""
    arguments = VERIFY_TREE.cases()[1].arguments
    verified, path = jax.jit(partial(verify_tree, implementation="xla"))(*arguments)
    scattered = 0
    for nodes, count in zip(np.asarray(path), np.asarray(verified.accepted), strict=True):
        targets, sources = np.arange(1, count + 1), nodes[:count]
        assert (sources >= targets).all()
        assert (np.diff(sources) > 0).all()
        scattered += (sources > targets).sum()
    assert scattered > 10


# A tree with siblings at several levels, over tokens 0..2.
PARENTS = [0, 0, 1, 1, 2, 3, 4]
DRAFT = [1, 0, 2, 1, 0, 0, 2]


def check_law(verify) -> None:
    """For every outcome of the random numbers: committed tokens are those of plain decoding.

    The token after a text follows from the text and the number of its position, one of three.
    """
    paths = [()]
    for parent, token in zip(PARENTS, DRAFT, strict=True):
        paths.append((*paths[parent], token))

    def next_token(text, numbers):
        return (2 * sum(text) + 5 * len(text) + text[-1:].count(0) + numbers[len(text)]) % 3

    every = list(itertools.product(range(3), repeat=4))
    target = [[next_token(path, numbers) for path in paths] for numbers in every]
    rows = len(every)
    arrays = ([DRAFT] * rows, target, [PARENTS] * rows, [len(DRAFT)] * rows, [[-1]] * rows)
    verified, _ = verify(*(jnp.asarray(x, jnp.int32) for x in arrays))
    longest = 0
    for numbers, block in zip(every, verified.tokens.tolist(), strict=True):
        text: tuple[int, ...] = ()
        while text in paths:
            text = (*text, next_token(text, numbers))
        assert tuple(block[: len(text)]) == text
        assert set(block[len(text) :]) == {-1}
        longest = max(longest, len(text))
    assert longest == 4


@over_backends
def test_committed_tokens_have_the_law_of_plain_decoding(backend):
    check_law(lambda *x: run_or_skip(verify_tree, VERIFY_TREE, backend, *x))


MUTANTS = {
    # A node is compared with what the target says after the node before it.
    "sibling-order": (
        "jnp.take_along_axis(target_tokens, parents, axis=1)",
        "target_tokens[:, :-1]",
    ),
    "a-level-is-skipped": (
        "ancestors & ~matching == 0",
        "lax.population_count(ancestors & ~matching) <= 1",
    ),
    "bonus-of-another-node": (
        "following[:, 0]",
        "jnp.take_along_axis(target_tokens, accepted[:, None], axis=1)[:, 0]",
    ),
    "an-earlier-end": ("jnp.where(is_accepted, depths, -1)", "is_accepted"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_seen(name):
    source, names = inspect.getsource(module._xla), dict(vars(module))
    right, wrong = MUTANTS[name]
    assert source.count(right) == 1
    exec(source.replace(right, wrong), names)

    def verify(*arguments):
        *fields, path = names["_xla"](*arguments)
        return module.Verified(*fields), path

    with pytest.raises(AssertionError):
        check_law(jax.jit(verify))


def test_positions_and_ancestors_of_a_tree():
    parents = jnp.array([[0, 0, 1, 3, 9], [0, 1, 2, 3, 4]], jnp.int32)
    is_node = jnp.array([[True] * 6, [True] * 3 + [False] * 3])
    tree = Tree.of(parents, jnp.array([7, 30], jnp.int32), is_node)
    # The last node's parent is none before it: the nearest one that is counts.
    np.testing.assert_array_equal(tree.positions, [[7, 8, 8, 9, 10, 11], [30, 31, 32, -1, -1, -1]])
    ancestors = [[0b1, 0b11, 0b101, 0b1011, 0b11011, 0b111011], [2**n - 1 for n in range(1, 7)]]
    np.testing.assert_array_equal(tree.ancestors, np.array(ancestors, np.uint32))


def test_shapes_that_do_not_fit_are_named():
    draft, target, parents, lengths, stops = VERIFY_TREE.cases()[0].arguments
    with pytest.raises(ValueError, match=r"parents int32 \(4, 2\) must be int32 \(4, 3\)"):
        verify_tree(draft, target, parents[:, :2], lengths, stops)
    wide = jnp.zeros((4, 32), jnp.int32)
    with pytest.raises(ValueError, match="gamma=32 is over 31, the most draft tokens of a tree"):
        verify_tree(wide, jnp.zeros((4, 33), jnp.int32), wide, lengths, stops)
