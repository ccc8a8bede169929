"""Hash codes on Mosaic GPU: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.hash import HAMMING_SCORES, HASH_ENCODE
from jspec.pallas.codes import refuses_codes
from jspec.pallas.encode import EncodeBlocks, encode_pallas, refuses_encode
from jspec.pallas.hash import ScoreBlocks, hamming_pallas
from jspec.pallas.inline import INTERPRETED, swar_count
from jspec.pallas.mosaic import refuses_pallas
from tests.kernels import takes
from tests.ops.backends import every_case
from tests.pallas.mosaic import interpret, lower

over_encoded = every_case(HASH_ENCODE)
over_scored = every_case(HAMMING_SCORES, takes(refuses_codes, 0, 1))
interpreted_scores = functools.partial(hamming_pallas, inline=INTERPRETED)


def assert_equal(got, operation, arguments) -> None:
    """What a kernel gave is the reference's, bit for bit."""
    want = jax.jit(operation.backend("xla").run)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_swar_counts_bits():
    words = jnp.asarray([0, 1, 2**31, 2**32 - 1, 0x0F0F1234], jnp.uint32)
    assert swar_count(words).tolist() == [0, 1, 1, 32, 13]


@over_encoded
def test_codes_equal_the_reference_when_interpreted(case):
    got = interpret(encode_pallas, *case.arguments)
    assert_equal(got, HASH_ENCODE, case.arguments)


def test_tiles_of_tokens_of_any_size_give_the_same():
    arguments = next(c for c in HASH_ENCODE.cases() if c.name == "a-pass").arguments
    got = interpret(lambda *x: encode_pallas(*x, blocks=EncodeBlocks(8)), *arguments)
    assert_equal(got, HASH_ENCODE, arguments)


@over_encoded
def test_codes_equal_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    assert_equal(jax.jit(encode_pallas)(*case.arguments), HASH_ENCODE, case.arguments)


@over_encoded
def test_codes_lower(case):
    assert lower(encode_pallas, *case.arguments).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_codes_of_a_step_are_one_launch(dtype):
    q, k, w = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((8, 1, 32, 128), (8, 1, 8, 128), (8, 128, 128))
    )
    text = lower(encode_pallas, q, k, w)
    assert text.count("stablehlo.custom_call") == 1
    assert text.count("stablehlo.") == 1 + text.count("stablehlo.reshape")


@over_scored
def test_scores_equal_the_reference_when_interpreted(case):
    got = interpret(interpreted_scores, *case.arguments)
    assert_equal(got, HAMMING_SCORES, case.arguments)


def test_chunks_of_any_size_give_the_same():
    arguments = next(c for c in HAMMING_SCORES.cases() if c.name == "grouped").arguments
    scores = functools.partial(interpreted_scores, blocks=ScoreBlocks(128))
    assert_equal(interpret(scores, *arguments), HAMMING_SCORES, arguments)


@over_scored
def test_scores_equal_the_reference_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    assert_equal(jax.jit(hamming_pallas)(*case.arguments), HAMMING_SCORES, case.arguments)


def codes_like(batch, tokens, heads, kv_heads, slots, words):
    return (
        jax.ShapeDtypeStruct((batch, tokens, heads, words), jnp.uint32),
        jax.ShapeDtypeStruct((batch, slots, kv_heads, words), jnp.uint32),
    )


@over_scored
def test_scores_lower(case):
    assert lower(hamming_pallas, *case.arguments).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("words", "scaled"), [(4, False), (8, True)])
def test_scores_are_one_launch(words, scaled):
    codes = codes_like(8, 1, 8, 2, 32768, words)
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    norms = jax.ShapeDtypeStruct((8, 32768, 2), jnp.float32) if scaled else None
    text = lower(hamming_pallas, *codes, lengths, norms)
    assert text.count("stablehlo.custom_call") == 1
    assert "math.ctpop" in text


def test_refuses_with_a_reason():
    q, w = jnp.zeros((1, 1, 2, 8)), jnp.zeros((2, 8, 32))
    assert refuses_encode(q, None, w) is None
    assert "nothing to launch" in (refuses_encode(q[:0], None, w) or "")
    assert "not floats of 16 or 32 bits" in (refuses_encode(q.astype(jnp.int8), None, w) or "")
    assert "H=6 is not a multiple of 4" in (refuses_encode(q[..., :6], None, w) or "")
    codes = jnp.zeros((1, 5, 2, 4), jnp.uint32)
    assert refuses_codes(codes[:, :1], codes) is None
    assert "nothing to launch" in (refuses_codes(codes[:, :1], codes[:, :0]) or "")
    assert refuses_codes(codes[:, :1, :, :1], codes[..., :1]) == (
        "the 8 bytes of a slot's codes are not a multiple of 16, as copies to shared memory need; "
        "name another backend"
    )
