"""What tests of Mosaic GPU kernels share."""

import jax.numpy as jnp
import pytest

from jspec.pallas import attention_compute as module
from jspec.pallas import gathered


@pytest.fixture
def products_of_arrays(monkeypatch):
    """The interpreter has no product of a tile in registers with one in shared memory."""

    def add_matmul(acc, a, b):
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def overlapped_matmuls(q, k, ready, sums, between):
        intermediates = between(module.matmul(q, k))
        ready()
        return intermediates, add_matmul(*sums)

    monkeypatch.setattr(module, "add_matmul", add_matmul)
    monkeypatch.setattr(gathered, "add_matmul", add_matmul)
    monkeypatch.setattr(module, "overlapped_matmuls", overlapped_matmuls)
