"""What tests of Mosaic GPU kernels share."""

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jspec.pallas import attention_compute as module
from jspec.pallas import gathered_compute, gathered_copy, tile_sums


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
    monkeypatch.setattr(gathered_compute, "add_matmul", add_matmul)
    monkeypatch.setattr(module, "overlapped_matmuls", overlapped_matmuls)


@pytest.fixture
def copies_of_arrays(monkeypatch):
    """The interpreter runs no inline code: rows are there as soon as their copies begin."""

    def copy_rows(source, target, slots, head):
        target[...] = source[...][slots, head]

    monkeypatch.setattr(gathered_copy, "copy_rows", copy_rows)
    monkeypatch.setattr(gathered_copy, "commit_copies", lambda: None)
    monkeypatch.setattr(gathered_copy, "wait_copies", lambda groups: None)


@pytest.fixture
def runs_of_arrays(monkeypatch):
    """The interpreter runs no inline code: runs of logits are loaded one after the other."""

    def load_runs(ref, begins, size, layout):
        return jnp.stack([ref[pl.ds(begins[i], size)] for i in range(len(begins))])

    monkeypatch.setattr(tile_sums, "load_runs", load_runs)
