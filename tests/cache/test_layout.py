"""Layouts against their definition: which positions live, and in which slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.cache import LinearLayout, RingLayout, StripedLayout
from jspec.cache.layout import check_rings, layouts_of
from jspec.config import LayerSpec

STRIPED = [
    StripedLayout(48, 3, 4),
    StripedLayout(48, 1, 16),
    StripedLayout(48, 4, 1),
    StripedLayout(24, 3, 4, wraps=True),
]
LAYOUTS = [LinearLayout(48), RingLayout(7), RingLayout(1), *STRIPED]


slots_of = jax.jit(lambda layout, positions: layout.slots(positions), static_argnums=0)
slot_positions_of = jax.jit(lambda layout, newest: layout.slot_positions(newest), static_argnums=0)


def spec(window: int | None = None) -> LayerSpec:
    return LayerSpec(kv_heads=1, key_size=2, value_size=2, window=window)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=20)
@given(newest=st.integers(-1, 47))
def test_each_slot_holds_the_last_position_that_was_written_to_it(layout, newest):
    expected = np.full(layout.size, -1)
    slots = np.asarray(slots_of(layout, np.arange(48, dtype=np.int32)))
    for position, slot in enumerate(slots[: newest + 1].tolist()):
        assert 0 <= slot < layout.size
        expected[slot] = position
    stored = slot_positions_of(layout, np.array([newest, newest], np.int32))
    assert stored.dtype == jnp.int32
    np.testing.assert_array_equal(stored, [expected, expected])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padding_has_no_slot(layout):
    slots = layout.slots(jnp.asarray([[-1, 0], [3, -1]], jnp.int32))
    assert (np.asarray(slots) == layout.size).tolist() == [[True, False], [False, True]]


def test_stripes_deal_blocks_to_ranks_round_robin():
    """Helix, section 2.1: 3 ranks, blocks of 4: position 13 is in block 3, which is rank 0's
    second."""
    layout = StripedLayout(48, 3, 4)
    ranks = np.asarray(layout.slots(jnp.arange(48, dtype=jnp.int32))) // 16
    np.testing.assert_array_equal(ranks, np.arange(48) // 4 % 3)
    assert layout.slots(jnp.asarray([13], jnp.int32)).tolist() == [5]


def test_layers_with_a_window_get_rings():
    specs = [spec(), spec(4), spec(90), spec(4)]
    layouts = layouts_of(specs, capacity=64, gamma=3)
    assert layouts == (LinearLayout(64), RingLayout(8), LinearLayout(64), RingLayout(8))


def test_ranks_share_a_ring_unless_it_has_room_for_a_row():
    """A window of 20 and drafts of 3 need 24 slots, in blocks of 4 on 3 ranks exactly."""
    specs, shared = [spec(), spec(20), spec(21)], {"ranks": 3, "block": 4}
    result = layouts_of(specs, 30, 3, **shared)
    assert result == (
        StripedLayout(36, 3, 4),
        StripedLayout(24, 3, 4, wraps=True),
        StripedLayout(36, 3, 4),
    )
    result = layouts_of(specs, 30, 3, longest=100, **shared)
    assert result[2] == StripedLayout(36, 3, 4, wraps=True)
    assert [layout.grown(50) for layout in result] == [StripedLayout(60, 3, 4), *result[1:]]


@pytest.mark.parametrize("after", [49, 96, 97])
def test_growth_moves_no_position_within_its_rank(after):
    before = StripedLayout(48, 3, 4)
    layout = before.grown(after)
    assert layout.size == -(-after // 12) * 12
    positions = jnp.arange(48, dtype=jnp.int32)
    was, now = (np.divmod(x.slots(positions), x.size // 3) for x in (before, layout))
    np.testing.assert_array_equal(was, now)


def test_a_ring_too_small_for_gamma_is_refused():
    specs = [spec(), spec(4)]
    layouts = layouts_of(specs, capacity=64, gamma=3)
    shared = layouts_of(specs, capacity=64, gamma=3, ranks=2, block=4)
    for each in (layouts, shared):
        check_rings(specs, each, 3)
        with pytest.raises(ValueError, match=r"gamma=4 does not fit .* made for gamma=3"):
            check_rings(specs, each, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearLayout(0), "size=0 must be at least 1"),
        (lambda: RingLayout(-3), "size=-3 must be at least 1"),
        (lambda: StripedLayout(40, 3, 4), "size=40 must be a multiple of ranks=3 times block=4"),
        (lambda: StripedLayout(40, 0, 4), "ranks=0"),
    ],
    ids=["linear", "ring", "stripes", "ranks"],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
