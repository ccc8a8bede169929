"""Drafts that are trees on a KVP x TPA mesh, whose devices exchange what they pack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jspec
from jspec import helix
from jspec.cache.cache import _moved_among_ranks
from jspec.cache.layout import StripedLayout
from jspec.ops.path import pack_path
from tests.decode.test_trees import Known
from tests.helix.test_decoding import MIXED, decoded, model

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
__all__ = ["model"]  # a fixture
GAMMA = 7


def known(answers) -> Known:
    longest = max(map(len, answers))
    return Known(tuple(tuple(row + [-1] * (longest - len(row))) for row in answers))


def test_tokens_are_those_of_plain_decoding(model):
    """Greedily and sampled, in blocks of 4 positions, which a tree of 7 tokens reaches beyond."""
    plain, _ = decoded(model, jspec.NoDraft(), *MIXED)
    sharded = helix.shard(model, helix.HelixConfig(kvp=4, tpa=2, block=4))
    assert decoded(sharded, known(plain), *MIXED, gamma=GAMMA)[0] == plain


def test_entries_move_from_rank_to_rank():
    """Against the same in one array, in the order of the ranks' slots."""
    layout, rng = StripedLayout(32, ranks=4, block=2), np.random.default_rng(0)
    first = np.array([[3], [9], [20]])
    nodes = np.stack([np.sort(rng.permutation(8)[:4]) for _ in first]).astype(np.int32)
    sources, targets = jnp.asarray(first + nodes, jnp.int32), first + np.arange(4)
    targets, counts = jnp.asarray(targets, jnp.int32), jnp.array([4, 0, 3], jnp.int32)
    columns = [
        jnp.asarray(rng.standard_normal((3, 32, 2)), dtype)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)
    ]
    mesh = Mesh(np.array(jax.devices()[:4]), ("kvp",))
    part = layout.part("kvp")

    def move(columns, *places):
        slots = map(part.slots, places[:2])
        return _moved_among_ranks(columns, *slots, places[2], "kvp")

    shares, whole = PartitionSpec(None, "kvp"), PartitionSpec()
    run = jax.shard_map(move, mesh=mesh, in_specs=(shares, whole, whole, whole), out_specs=shares)
    moved = jax.jit(run)(columns, sources, targets, counts)
    expected = pack_path(columns, layout.slots(sources), layout.slots(targets), counts)
    for have, want, before in zip(moved, expected, columns, strict=True):
        np.testing.assert_array_equal(have.astype(jnp.float32), want.astype(jnp.float32))
        assert (have != before).any()
