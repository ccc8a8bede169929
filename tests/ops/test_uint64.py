"""64-bit arithmetic against Python's integers, in a process whose JAX has 64-bit types off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops import uint64
from jspec.ops.uint64 import in_64_bits

rng = np.random.default_rng(0)
EDGES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1]
ANY = np.array([*EDGES, *rng.integers(0, 2**64, 56, np.uint64)], np.uint64)
NARROW = np.array([0, 1, 31, 32, 63, 64, 2**31, 2**32 - 1, *rng.integers(0, 2**32, 56)], np.uint32)
FUNCTIONS = {
    "high": (uint64.high, "NN", lambda a, b: a * b >> 32),
    "scale": (uint64.scale, "WN", lambda a, b: (a * b >> 32) % 2**64),
    "high64": (uint64.high64, "WW", lambda a, b: a * b >> 64),
    "shift_left": (uint64.shift_left, "WN", lambda a, b: a << b & 2**64 - 1 if b < 64 else 0),
    "shift_right": (uint64.shift_right, "WN", lambda a, b: a >> b if b < 64 else 0),
    "bit_width": (uint64.bit_width, "W", int.bit_length),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_pair_is_as_python_has_it(name):
    function, kinds, expected = FUNCTIONS[name]
    values = [{"W": ANY, "N": NARROW}[kind] for kind in kinds]
    grid = [x.ravel() for x in np.meshgrid(*values)]

    @jax.jit
    @in_64_bits
    def run():
        return function(*map(jnp.asarray, grid))

    assert not jax.config.jax_enable_x64
    reference = [expected(*numbers) for numbers in zip(*(x.tolist() for x in grid), strict=True)]
    assert np.asarray(run()).tolist() == reference
