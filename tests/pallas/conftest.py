"""What tests of Mosaic GPU kernels share."""

import jax.numpy as jnp
import pytest

from jspec.pallas import attention_compute as module


@pytest.fixture
def products_of_arrays(monkeypatch):
    """The interpreter has no product of a tile in registers with one in shared memory."""

    def plus(acc, a, b):
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def both(q, k, ready, sums, between):
        found = between(module.times(q, k))
        ready()
        return found, plus(*sums)

    monkeypatch.setattr(module, "plus", plus)
    monkeypatch.setattr(module, "both", both)
