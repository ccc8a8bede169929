"""The selection of sinks and a recent window, from its definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, Linear
from jspec.config import LayerSpec
from jspec.policies import Streaming

CAPACITY = 20
SPEC = LayerSpec(kv_heads=1, key_size=2, value_size=2)


@pytest.mark.parametrize(
    ("sinks", "window"), [(0, 1), (2, 3), (4, 30), (30, 2), (10, 10), (0, 20)], ids=str
)
def test_it_selects_each_sink_and_each_recent_position_once(sinks, window):
    cache = Cache.create([SPEC], [Linear(CAPACITY)], 4, jnp.float32)
    lengths = [20, 11, 3, 0]
    until = jnp.asarray(lengths, jnp.int32)
    selected = np.asarray(Streaming(sinks, window).select(None, 0, cache, None, until))
    assert selected.dtype == np.int32
    for row, length in enumerate(lengths):
        wanted = {*range(min(sinks, length)), *range(max(length - window, 0), length)}
        assert sorted(p for p in selected[row].tolist() if p >= 0) == sorted(wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
    ids=["sinks", "window"],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Streaming(**settings)
