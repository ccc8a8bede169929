"""The CUDA kernels of one-sided messages, emulated on a CPU, between virtual devices."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jspec.cuda_ffi import all_to_all as cuda
from jspec.cuda_ffi import library
from jspec.helix import HelixConfig
from jspec.ops.attention.merge import merge_attention
from tests.cuda_ffi.emulated import emulated

MESSAGES = 3  # one after the other: there is room for two


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernels themselves")
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    path = tmp_path_factory.mktemp("emulated") / "exchange.so"
    call = emulated("exchange", path)
    opened = ctypes.CDLL(str(path)).jspec_open_exchange
    opened.restype = ctypes.c_char_p
    assert opened(4) is None
    return call


def on_each(ranks: int, body, *arguments):
    """``body`` of each device's part of the arguments ``[ranks, ...]``, three times in a row.

    The first argument is twice that of the call before, from which it follows.
    """
    mesh = HelixConfig(kvp=ranks).mesh

    def run(*parts):
        first, *others = (x[0] for x in parts)

        def step(first, _):
            out = body(first, *others)
            is_wrong = jax.tree.leaves(out)[0].astype(jnp.float32).min() < -1e30
            return jnp.where(is_wrong, 0, 2 * first).astype(first.dtype), out

        return jax.tree.map(lambda x: x[None], lax.scan(step, first, length=MESSAGES)[1])

    every = jax.shard_map(
        run, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names), check_vma=False
    )
    return jax.tree.map(np.asarray, jax.jit(every)(*arguments))


@pytest.mark.parametrize(
    ("ranks", "heads", "size", "dtype"),
    [(4, 8, 6, "float32"), (2, 4, 160, "bfloat16")],  # one of more lines than a warp has lanes
    ids=str,
)
def test_the_merge_is_that_of_all_parts(ranks, heads, size, dtype, emulator, monkeypatch):
    monkeypatch.setattr(library, "call", emulator)
    rng = np.random.default_rng(ranks)
    outs = jnp.asarray(rng.standard_normal((ranks, 2, 3, heads, size)), dtype)
    lses = rng.standard_normal((ranks, 2, 3, heads), np.float32) * 5
    lses[1, 0] = np.inf  # a rank without a key, and a query that no rank has one for
    lses[:, 0, 1] = -np.inf
    outs = outs.at[1, 0].set(jnp.nan)
    merge = functools.partial(cuda.all_to_all_merge_cuda, axes="kvp")
    merged, sums = on_each(ranks, merge, outs, lses)
    right = merge_attention(outs, jnp.asarray(lses))
    expected, expected_sums = (np.asarray(x, np.float32) for x in right)
    share = heads // ranks
    near = 1e-6 if dtype == "float32" else 2**-8
    for rank in range(ranks):
        own = slice(rank * share, rank * share + share)
        for i in range(MESSAGES):
            found = merged[rank, i].astype(np.float32) / 2**i
            np.testing.assert_allclose(found, expected[:, :, own], rtol=near, atol=near)
            np.testing.assert_allclose(sums[rank, i], expected_sums[:, :, own], rtol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "size", "dtype"), [(2, 300, "bfloat16"), (4, 5, "float32")], ids=str
)
def test_pieces_and_sums_are_those_of_numpy(ranks, size, dtype, emulator, monkeypatch):
    """Sums are rounded, alone and before a residual is added to them."""
    monkeypatch.setattr(library, "call", emulator)
    rng = np.random.default_rng(size)
    x = rng.standard_normal((ranks, ranks, size), np.float32)
    residual = jnp.asarray(rng.standard_normal(size), dtype)

    def body(pieces):
        found = cuda.all_to_all_cuda(pieces, "kvp")
        sums = [cuda.all_reduce_cuda(pieces[0] + 0 * found[0], "kvp", jnp.dtype(dtype), None)]
        follows = residual + (0 * sums[0]).astype(dtype)
        sums.append(cuda.all_reduce_cuda(pieces[0], "kvp", jnp.dtype(dtype), follows))
        return found, sums

    found, (sums, added) = on_each(ranks, body, x)
    expected = functools.reduce(np.add, x[:, 0])  # one rank after another
    for i in range(MESSAGES):
        np.testing.assert_array_equal(found[:, i], 2**i * np.swapaxes(x, 0, 1))
        rounded = jnp.asarray(2**i * expected, dtype)
        for result, right in ((sums, rounded), (added, residual + rounded)):
            np.testing.assert_array_equal(result[:, i], np.repeat(right[None], ranks, axis=0))
