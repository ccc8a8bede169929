"""Hash codes in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash import HAMMING_SCORES, HASH_ENCODE
from jspec.triton import hash as module
from jspec.triton.call import refuses_triton
from jspec.triton.hash import (
    EncodeBlocks,
    ScoreBlocks,
    encode_triton,
    hamming_triton,
    refuses_encode,
    refuses_scores,
)
from tests.kernels import takes
from tests.ops.backends import every_case
from tests.triton.lowering import lower

over_encoded = every_case(HASH_ENCODE)
over_scored = every_case(HAMMING_SCORES, takes(refuses_scores, 0, 1))


def assert_equal(got, operation, arguments) -> None:
    """What a kernel gave is the reference's, bit for bit."""
    want = jax.jit(operation.backend("xla").run)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@over_encoded
def test_codes_equal_the_reference_in_the_interpreter(case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    got = encode_triton(*case.arguments, blocks=EncodeBlocks(16, 4))
    assert_equal(got, HASH_ENCODE, case.arguments)


@over_scored
@pytest.mark.parametrize("keys", [64, 1024])
def test_scores_equal_the_reference_in_the_interpreter(keys, case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    got = hamming_triton(*case.arguments, blocks=ScoreBlocks(keys, 4))
    assert_equal(got, HAMMING_SCORES, case.arguments)


@over_encoded
def test_codes_equal_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    assert_equal(jax.jit(encode_triton)(*case.arguments), HASH_ENCODE, case.arguments)


@over_scored
def test_scores_equal_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    assert_equal(jax.jit(hamming_triton)(*case.arguments), HAMMING_SCORES, case.arguments)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_codes_of_a_step_are_one_launch(dtype):
    q, k, w = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((8, 1, 32, 128), (8, 1, 8, 128), (8, 128, 128))
    )
    text = lower(encode_triton, q, k, w)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("stablehlo.") == 1


@pytest.mark.parametrize("scaled", [False, True], ids=["counted", "with-norms"])
def test_scores_are_one_launch(scaled):
    codes = [jax.ShapeDtypeStruct((8, n, 8 * g, 4), jnp.uint32) for n, g in ((1, 4), (32768, 1))]
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    norms = jax.ShapeDtypeStruct((8, 32768, 8), jnp.float32) if scaled else None
    text = lower(hamming_triton, *codes, lengths, norms)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1


def test_refuses_with_a_reason():
    q, w = jnp.zeros((1, 1, 2, 8)), jnp.zeros((2, 8, 32))
    assert refuses_encode(q, None, w) is None
    assert "nothing to launch" in (refuses_encode(q[:0], None, w) or "")
    assert "not floats of 16 or 32 bits" in (refuses_encode(q.astype(jnp.int8), None, w) or "")
    codes = jnp.zeros((1, 1, 2, 4), jnp.uint32)
    assert "nothing to launch" in (refuses_scores(codes, codes[:, :0]) or "")
