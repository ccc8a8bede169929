"""How selection by CUDA divides rows, and the memory that its handler asks for; its kernels, also
emulated on a CPU."""

import jax
import numpy as np
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.select import (
    MAX_CLUSTER,
    REGISTER_SLOTS,
    SELECT,
    Cut,
    select_cuda,
    selection_cut,
)
from tests.cuda_ffi.emulated import emulated
from tests.ops.test_selection import by_sorting

PROCESSORS = 132  # of an H100, and what a CPU takes


@pytest.mark.parametrize(
    ("rows", "n", "counted"),
    [
        (1, 0, 256),
        (1, 4096, 4096),
        (1, 16_384, 4096),  # few rows: a cluster
        (PROCESSORS, 16_384, 16_384),
        (1, 131_072, 16_384),
        (1, 131_073, 1024),  # over the largest cluster: short chunks for three launches
        (99, 32_768, 16_384),  # 1.5 blocks a multiprocessor
        (100, 32_768, 32_768),
        (100, 131_072, 32_768),
        (64, 2**20, 32_768),
    ],
)
def test_a_row_has_a_block_a_cluster_or_three_launches(rows, n, counted, monkeypatch):
    monkeypatch.setattr("jspec.cuda_ffi.select.multiprocessors", lambda: PROCESSORS)
    assert selection_cut(rows, n) == Cut(counted, counted)


def test_clusters_are_few(monkeypatch):
    monkeypatch.setattr("jspec.cuda_ffi.select.multiprocessors", lambda: PROCESSORS)
    for rows in (1, 7, 12, 13, 98, 99, 100, 1000):
        for n in (4097, 16_384, 16_385, 65_536, 100_000, 131_072, 131_073, 2**20):
            cut = selection_cut(rows, n)
            chunks = -(-n // cut.counted)
            if 1 < chunks <= MAX_CLUSTER and cut.counted <= REGISTER_SLOTS:
                assert 2 * rows * chunks <= 3 * PROCESSORS, (rows, n)


@pytest.mark.parametrize(
    ("n", "counted", "collected"),
    [
        (1000, 256, 256),  # a cluster
        (2049, 256, 512),  # a chunk more than a cluster has blocks
        (16_385, 32_768, 32_768),  # a block with a list
        (33_000, 32_768, 32_768),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_the_handler_takes_the_workspace_of_each_way(n, counted, collected, dtype):
    """It refuses another size than that of its own plan."""
    static = {"k": 40, "sinks": 1, "recent": 2, "highest": 99 if dtype == "int32" else None}
    scores = np.random.default_rng(n).integers(0, 99, (2, n)).astype(jax.numpy.dtype(dtype))
    arguments = scores, np.array([40, 7], np.int32), np.array([n, n // 2], np.int32)
    if reason := SELECT.supports(*arguments, **static):
        pytest.skip(reason)
    got = select_cuda(*jax.device_put(arguments), **static, cut=Cut(counted, collected))
    np.testing.assert_array_equal(got, by_sorting(*arguments, **static))


@pytest.mark.parametrize(
    ("n", "k", "values"),
    [
        (140_000, 9800, 2**20),  # a tile of the list for each block of a cluster
        (300_000, 280_000, 2**20),  # several tiles
        (300_000, 20_000, 3),  # ties in many blocks
        (140_000, 12, 2**20),  # blocks without a share
    ],
    ids=["tile", "tiles", "ties", "few"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_share_a_list_take_the_best_of_it(n, k, values, dtype):
    """On a GPU; the CPU's handler has one loop."""
    static = {"k": k, "sinks": 1, "recent": 2, "highest": None}
    scores = np.random.default_rng(k).integers(0, values, (2, n)) - 5.0
    scores[1] = 1 + scores[1] / 2**24  # equal first digits: all of a row is listed
    if k < 100:
        scores[0, 5000 : 5000 + k] = 2.0**30 + np.arange(k)  # and these alone
    scores = scores.astype(jax.numpy.dtype(dtype))
    arguments = scores, np.array([k, k // 2], np.int32), np.array([n, n - 77], np.int32)
    if reason := SELECT.supports(*arguments, **static):
        pytest.skip(reason)
    got = select_cuda(*jax.device_put(arguments), **static)
    np.testing.assert_array_equal(got, by_sorting(*arguments, **static))


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernels themselves")
    return emulated("select", tmp_path_factory.mktemp("emulated") / "select.so")


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [2, 5000], ids=["ties", "values"])
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "bounded"])
@pytest.mark.parametrize(
    ("n", "rows", "counted", "collected"),
    [
        (3001, 1, 256, 512),  # three launches, and a cluster of two for the list
        (3001, 2, 256, 256),
        (1500, 2, 256, 256),  # a cluster of six
        (1000, 2, 1024, 1024),
        (17_000, 1, 32_768, 32_768),  # a block with a list
        (40_000, 1, 1024, 1024),  # more of the list than two blocks hold
        (3000, 1, 256, 256),  # one slot in the list: a block without a share
    ],
    ids=["launches", "rows", "cluster", "block", "listed", "long", "few"],
)
def test_emulated_kernels_take_the_best(
    n, rows, counted, collected, dtype, kinds, emulator, monkeypatch
):
    monkeypatch.setattr(library, "call", emulator)
    k, is_bounded = {40_000: n - 100, 3000: 9}.get(n, n // 3), dtype == "bounded"
    static = {"k": k, "sinks": 3, "recent": 5, "highest": 99 if is_bounded else None}
    scores = np.random.default_rng(n).integers(
        0, min(kinds, 99 if is_bounded else kinds), (rows, n)
    )
    if n == 3000:
        scores[0, 500] = 99 if is_bounded else 2**14
    scores = scores.astype(jax.numpy.dtype("int32" if is_bounded else dtype))
    arguments = scores, np.array([k, 70][:rows], np.int32), np.array([n, n - 77][:rows], np.int32)
    got = select_cuda(*jax.device_put(arguments), **static, cut=Cut(counted, collected))
    np.testing.assert_array_equal(got, by_sorting(*arguments, **static))
