"""Hash codes in CUDA: the kernels on a GPU or emulated, their counterparts on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.codes import HAMMING_SCORES as SCORES_BACKEND
from jspec.cuda_ffi.codes import HASH_ENCODE as ENCODE_BACKEND
from jspec.dispatch import Backend
from jspec.ops.hash import HAMMING_SCORES, HASH_ENCODE
from tests.cuda_ffi.emulated import emulated
from tests.ops.backends import every_case


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    return emulated("codes", tmp_path_factory.mktemp("emulated") / "codes.so")


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """What the backends call: their library, or the CUDA source on a CPU."""
    if request.param == "emulated":
        monkeypatch.setattr(library, "call", request.getfixturevalue("emulator"))


def assert_equal(backend: Backend, operation, arguments) -> None:
    """What a backend gives is the reference's, bit for bit; skips arguments that it refuses."""
    if reason := backend.supports(*arguments):
        pytest.skip(reason)
    want = jax.jit(operation.backend("xla").run)(*arguments)
    got = jax.jit(lambda *x: backend.run(*x))(*arguments)  # traced for what is called now
    jax.tree.map(np.testing.assert_array_equal, got, want)


@every_case(HAMMING_SCORES)
def test_scores_equal_the_reference(case, kernel):
    assert_equal(SCORES_BACKEND, HAMMING_SCORES, case.arguments)


@every_case(HASH_ENCODE)
def test_codes_equal_the_reference(case, kernel):
    assert_equal(ENCODE_BACKEND, HASH_ENCODE, case.arguments)


def test_several_tiles_of_vectors(kernel):
    """Two tiles of a head, and 200 channels, of two dtypes."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.integers(-3, 4, (3, 3, heads, 200)), jnp.bfloat16) for heads in (6, 2))
    w = jnp.asarray(rng.integers(-3, 4, (2, 200, 64)), jnp.float32)
    assert_equal(ENCODE_BACKEND, HASH_ENCODE, (q, k, w))


def test_scores_of_mapped_arguments(kernel):
    _, case, *_ = HAMMING_SCORES.cases()
    q, k, lengths, _ = case.arguments
    stacked = [jnp.stack([x, x[::-1]]) for x in (q, k, lengths)]
    got = jax.vmap(lambda *x: SCORES_BACKEND.run(*x, None))(*stacked)
    want = HAMMING_SCORES.backend("xla").run(q, k, lengths, None)
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], want[::-1])


def test_refuses_with_a_reason():
    codes, queries = (jnp.zeros(shape, jnp.uint32) for shape in ((1, 1, 1, 8), (1, 16, 1, 8)))
    scores = SCORES_BACKEND.supports(queries, codes) or ""
    assert scores == "scores to G T R = 4096 are not in 1..4095"
    q, w = jnp.zeros((1, 1, 1, 6)), jnp.zeros((1, 6, 32))
    assert "H=6 is not a multiple of 4" in (ENCODE_BACKEND.supports(q, None, w) or "")
    half = q.astype(jnp.float16)
    assert "are not bfloat16 or float32" in (ENCODE_BACKEND.supports(half, None, w) or "")
