"""Selection over rows that devices share, against `select` of the whole rows by a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jspec.cache import StripedLayout
from jspec.ops.select_sharded import select_sharded
from jspec.ops.selection import ragged, rows_of_scores, select
from tests.ops.test_sharded import collective_bytes

RANKS = 4
pytestmark = pytest.mark.skipif(jax.device_count() < RANKS, reason="needs 4 devices")


def sharded(layout: StripedLayout, k: int, **settings):
    """Scores in the order of positions to the positions that any rank selects, ``[ranks, ...]``."""
    mesh = jax.make_mesh((RANKS,), ("ranks",), axis_types=(AxisType.Auto,))
    part = layout.part("ranks")

    def body(scores, counts, lengths):
        positions = part.slot_positions(lengths.reshape(-1)[:1] * 0 + layout.size - 1)
        slots = select_sharded(
            *(scores, positions, k),
            axis_name="ranks",
            capacity=layout.size,
            counts=counts,
            lengths=lengths,
            **settings,
        )
        return jnp.where(slots >= 0, part.at(slots), -1)[None]

    def run(scores, counts, lengths):
        slots = layout.slots(jnp.arange(layout.size, dtype=jnp.int32))
        placed = jnp.zeros_like(scores).at[..., slots].set(scores)
        axes = [None] * (scores.ndim - 1)
        specs = (P(*axes, "ranks"), P(), P())
        shard = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ranks"))
        return shard(placed, counts, lengths)

    return jax.jit(run)


@pytest.mark.parametrize(
    ("dtype", "kinds", "k", "sinks", "recent", "lead"),
    [
        ("int32", 9, 40, 3, 5, (12,)),
        ("float32", 2, 96, 2, 8, (12,)),
        ("float32", 0, 30, 0, 1, (4, 3)),
        ("bfloat16", 0, 1, 1, 0, (8,)),
        ("int32", 0, 17, 2, 3, (6,)),
    ],
    ids=["ties", "all", "floats", "one", "integers"],
)
def test_ranks_select_what_one_device_does(dtype, kinds, k, sinks, recent, lead):
    layout, rows = StripedLayout(96, RANKS, 4), int(np.prod(lead))
    scores = rows_of_scores(rows, 96, dtype, kinds).reshape(*lead, 96)
    counts, lengths = (np.array(ragged(rows, limit)).reshape(lead) for limit in (k, 96))
    lengths[0] = 96
    settings = {"sinks": sinks, "recent": recent}
    highest = {"highest": kinds} if dtype == "int32" and kinds else {}
    whole = functools.partial(select, k=k, **settings, **highest, implementation="xla")
    right = jax.jit(whole)(scores, counts=counts, lengths=lengths)
    result = np.asarray(sharded(layout, k, **settings, **highest)(scores, counts, lengths))
    for rank, slots in enumerate(result):
        assert ((slots < 0) | (slots // 4 % RANKS == rank)).all()
        live = np.where(slots < 0, np.iinfo(np.int32).max, slots)
        assert (np.diff(live, axis=-1) >= 0).all()  # ascending, the empty places last
    result = np.moveaxis(result, 0, -2).reshape(*lead, -1)
    result = np.sort(np.where(result < 0, 96, result), axis=-1)[..., :k]
    np.testing.assert_array_equal(np.where(result == 96, -1, result), right)
    assert (np.asarray(right) >= 0).any()


def test_what_is_exchanged_follows_from_the_budget():
    """One message of scores and positions, as long for four times the scores."""
    moved = []
    for size in (2**14, 2**16):
        run = sharded(StripedLayout(size, RANKS, 16), 64, sinks=0, recent=0)
        shapes = [
            jax.ShapeDtypeStruct((2, *x), dtype)
            for x, dtype in (((size,), jnp.float32), ((), jnp.int32), ((), jnp.int32))
        ]
        jaxpr = jax.make_jaxpr(run)(*shapes)
        assert str(jaxpr).count("all_gather[") == 1
        moved.append(collective_bytes(jaxpr.jaxpr))
    assert moved == [RANKS * 2 * 2 * 64 * 4] * 2


def test_scores_that_no_rank_can_read_are_left_out():
    """Minus infinity after the policies' own rule, on one rank and on all."""
    layout = StripedLayout(32, RANKS, 4)
    scores = jnp.full((1, 32), -jnp.inf).at[0, 5].set(1.0)
    counts = lengths = jnp.asarray([3], jnp.int32)
    result = sharded(layout, 3, sinks=0, recent=0)(scores, counts, lengths + 29)
    assert sorted(result[result >= 0].tolist()) == [0, 1, 5]


def test_a_budget_without_room_is_refused():
    with pytest.raises(ValueError, match="k=2 must be at least 1 and hold sinks=3"):
        select_sharded(
            *(jnp.zeros((1, 4)), jnp.zeros((1, 4), jnp.int32), 2),
            axis_name="ranks",
            capacity=4,
            lengths=jnp.ones(1, jnp.int32),
            sinks=3,
        )
