"""Scores by shared hash buckets in Triton: interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.collisions import COLLISION_SCORES, code_words
from jspec.triton import collisions as module
from jspec.triton.call import refuses_triton
from jspec.triton.collisions import Blocks, collisions_triton, refuses_collisions
from tests.kernels import takes
from tests.ops.backends import every_case
from tests.triton.lowering import lower

over_cases = every_case(COLLISION_SCORES, takes(refuses_collisions, 0, 1))


def assert_equal(got, case) -> None:
    """What a kernel gave is the reference's, bit for bit."""
    run = functools.partial(COLLISION_SCORES.backend("xla").run, **case.static)
    np.testing.assert_array_equal(got, jax.jit(run)(*case.arguments))


@over_cases
@pytest.mark.parametrize("blocks", [Blocks(256, 2, 4), Blocks(512, 1, 4)], ids=["small", "large"])
def test_equals_the_reference_in_the_interpreter(blocks, case, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    assert_equal(collisions_triton(*case.arguments, **case.static, blocks=blocks), case)


@over_cases
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    assert_equal(
        jax.jit(functools.partial(collisions_triton, **case.static))(*case.arguments), case
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tables", "bits"),
    [(32, 8, 150, 10), (32, 32, 151, 9), (12, 1, 2, 16)],
    ids=["groups", "an-odd-bit", "one-word"],
)
def test_is_one_launch(heads, kv_heads, tables, bits):
    words = code_words(tables, bits)
    q, k = (
        jax.ShapeDtypeStruct((8, *shape, words), jnp.uint32)
        for shape in ((1, heads), (2**20, kv_heads))
    )
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = lower(functools.partial(collisions_triton, tables=tables), q, k, lengths)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("stablehlo.") == 1


def test_refuses_with_a_reason():
    codes = jnp.zeros((1, 1, 2, 4), jnp.uint32)
    assert refuses_collisions(codes, codes) is None
    assert "nothing to launch" in (refuses_collisions(codes, codes[:, :0]) or "")
