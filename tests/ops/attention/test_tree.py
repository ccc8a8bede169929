"""Attention of trees against float64 NumPy, written from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.attention.merge import merge_attention
from jspec.ops.attention.tree import TREE_ATTENTION, tree_attention
from jspec.ops.tree import Tree
from tests.ops.attention.test_dense import EXACT, Inputs, brute_force
from tests.ops.backends import every_backend

B, T, S = 3, 7, 40
BEGIN = (25, 6, 0)
PARENTS = ((0, 0, 1, 1, 3, 2), (0, 1, 2, 3, 4, 5), (0, 0, 0, 3, 3, 5))
NODES = (7, 5, 7)  # of each row; the rest is padding
SETTINGS = {
    "plain": {},
    "window-softcap": {"window": 4, "softcap": 2.0, "scale": 0.7},
    "window-of-one": {"window": 1},
    "values-in-keys": {"value_size": 9},
    "8-bits": {},
}


def ancestors(row: int, node: int) -> list[int]:
    result = [node]
    while result[-1]:
        result.append(PARENTS[row][result[-1] - 1])
    return result


@functools.cache
def arguments(name: str, shuffled: bool):
    """Random arrays; slots that no node reads hold NaN, and those of nodes are anywhere."""
    rng = np.random.default_rng(len(name))

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    q, k, v = normal(B, T, 4, 16), normal(B, S, 2, 16), normal(B, S, 2, 12)
    is_used = np.zeros((B, S), bool)
    positions, bits = np.full((B, T), -1), np.zeros((B, T), np.uint32)
    slots, stored = np.full((B, T), S), np.tile(np.arange(S), (B, 1))
    for row, begin in enumerate(BEGIN):
        if shuffled:
            order = rng.permutation(S)
            stored[row] = np.argsort(order)
        else:
            order = np.arange(S)
        is_used[row, order[: begin + NODES[row]]] = True
        for node in range(T):
            before = ancestors(row, node)
            bits[row, node] = sum(1 << i for i in before)
            if node < NODES[row]:
                positions[row, node] = begin + len(before) - 1
                slots[row, node] = order[begin + node]
    k[~is_used] = v[~is_used] = np.nan
    if name == "8-bits":
        k, v = (x.astype(jnp.float8_e4m3fn) for x in (k, v))
    tree = Tree(positions.astype(np.int32), bits)
    v = None if name == "values-in-keys" else v
    stored = np.where(is_used, stored, -1).astype(np.int32) if shuffled else None
    return q, k, v, tree, slots.astype(np.int32), stored


def expected(name: str, shuffled: bool):
    """Each node by itself: the keys of its text, at their positions, and no others."""
    q, k, v, tree, slots, stored = arguments(name, shuffled)
    outs, lses = [], []
    for node in range(T):
        where = np.full((B, S), -1)
        for row, begin in enumerate(BEGIN):
            if tree.positions[row, node] < 0:
                continue
            at = np.arange(S) if stored is None else stored[row]
            where[row] = np.where((at >= 0) & (at < begin), at, -1)
            for other in ancestors(row, node):
                where[row, slots[row, other]] = tree.positions[row, other]
        one = slice(node, node + 1)
        x = Inputs(q[:, one], k, v, tree.positions[:, one], where)
        out, lse = brute_force(x, **SETTINGS[name])
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs, axis=1), np.concatenate(lses, axis=1)


@every_backend(TREE_ATTENTION)
@pytest.mark.parametrize("shuffled", [False, True], ids=["slots", "key-positions"])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_node_reads_its_own_text(name, shuffled, backend):
    *arrays, stored = arguments(name, shuffled)
    settings = SETTINGS[name] | {"implementation": backend}
    run = jax.jit(lambda *x, p: tree_attention(*x, key_positions=p, **settings))
    out, lse = run(*jax.device_put(arrays), p=stored)
    expected_out, expected_lse = expected(name, shuffled)
    np.testing.assert_allclose(out, expected_out, atol=EXACT, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=EXACT, rtol=1e-5)


@every_backend(TREE_ATTENTION)
def test_keys_in_two_caches_are_read_where_they_are(backend):
    """As two devices share the rows: what both read, merged, is what one reads."""
    q, k, v, tree, slots, stored = arguments("plain", True)
    half = S // 2
    run = jax.jit(lambda *x, p: tree_attention(*x, key_positions=p, implementation=backend))
    parts = [
        run(
            *jax.device_put((q, k[:, part], v[:, part], tree)),
            jnp.where((slots >= part.start) & (slots < part.stop), slots - part.start, half),
            p=stored[:, part],
        )
        for part in (slice(0, half), slice(half, S))
    ]
    out, lse = merge_attention(*map(jnp.stack, zip(*parts, strict=True)))
    expected_out, expected_lse = expected("plain", True)
    np.testing.assert_allclose(out, expected_out, atol=EXACT, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=EXACT, rtol=1e-5)


def test_shapes_that_do_not_fit_are_named():
    q, k, v, tree, slots, _ = arguments("plain", False)
    with pytest.raises(ValueError, match=r"slots \(3, 6\) must be \[B, T\] = \(3, 7\)"):
        tree_attention(q, k, v, tree, slots[:, :-1])
