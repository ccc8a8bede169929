"""Selection by hash codes in CUDA: how it divides rows, and the kernels emulated on a CPU."""

import functools

import jax
import numpy as np
import pytest

from jspec.cuda_ffi import hashed, library
from jspec.cuda_ffi.hashed import HashCut, hash_select_cuda
from jspec.ops.hash_selection import HASH_SELECT
from tests.cuda_ffi.emulated import emulated
from tests.ops.backends import every_case


@pytest.mark.parametrize(
    ("batch", "n", "heads", "chunk"),
    [
        (8, 32_768, 32, 4096),  # 256 blocks of four groups of heads
        (8, 32_768, 8, 2048),
        (1, 131_072, 8, 1024),
        (1, 1000, 1, 256),
        (96, 7168, 3, 2048),  # at most three blocks of 2048 slots, in place of two of 4096
        (64, 30_720, 2, 4096),
        (133, 1024, 8, 1024),
    ],
)
def test_chunks_occupy_all_multiprocessors_evenly(batch, n, heads, chunk, monkeypatch):
    monkeypatch.setattr(hashed, "multiprocessors", lambda: 132)
    codes = jax.ShapeDtypeStruct((batch, n, heads, 4), np.uint32)
    assert hashed.hash_cut(codes, 128).chunk == chunk


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernels themselves")
    return emulated("hashed", tmp_path_factory.mktemp("emulated") / "hashed.so")


@pytest.fixture
def kernels(emulator, monkeypatch):
    """The CUDA source on a CPU in the place of the library."""
    monkeypatch.setattr(library, "call", emulator)


@pytest.mark.slow
@every_case(HASH_SELECT)
@pytest.mark.parametrize("cut", [None, HashCut(256, 2)], ids=str)
def test_slots_equal_the_reference(case, cut, kernels):
    arguments = case.arguments
    want = jax.jit(functools.partial(HASH_SELECT.backend("xla").run, **case.static))(*arguments)
    got = jax.jit(functools.partial(hash_select_cuda, **case.static, cut=cut))(*arguments)
    np.testing.assert_array_equal(got, want)
