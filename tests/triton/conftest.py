"""Triton's interpreter and its compiler for CUDA, where they are installed."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import numpy as np
import pytest

from jspec.triton.call import not_installed
from tests.triton.interpreter import interpret


@pytest.fixture(scope="session")
def process():
    """One process in which Triton interprets."""
    if reason := not_installed():
        pytest.skip(reason)
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def interpreted(process):
    """Stands in for `jspec.triton.call.triton_call`: runs the body in Triton's interpreter."""

    def call(kernel, *arrays, out, programs, warps, stages=None, aliases=None, **constants):
        del warps, stages  # the interpreter has none
        name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
        # What the kernel does not write must not look like what it should have written.
        empty = [np.full(x.shape, 99, x.dtype) for x in out]
        leaves, structure = jax.tree.flatten(arrays)
        leaves = list(map(np.asarray, leaves))
        for before, after in (aliases or {}).items():
            leaves[before] = empty[after] = np.array(leaves[before])
        operands = list(jax.tree.unflatten(structure, leaves))
        future = process.submit(interpret, name, operands, empty, programs, constants)
        return future.result()

    return call
