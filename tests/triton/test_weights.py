"""Mean softmax weights in Triton: interpreted, and lowered for CUDA."""

import functools

import jax
import pytest

from jspec.triton import weights as module
from jspec.triton.weights import Blocks, mean_weights_triton
from tests.ops.attention.test_weights import arguments, by_name, check
from tests.triton.lowering import lower


@by_name
@pytest.mark.parametrize("blocks", [Blocks(1, 16, 4), Blocks(8192, 64, 4)], ids=["small", "large"])
def test_equals_the_definition_in_the_interpreter(case, blocks, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    scale = case.size**-0.5 if case.scale is None else case.scale
    settings = {"scale": scale, "softcap": case.softcap, "blocks": blocks}
    check(mean_weights_triton(*arguments(case), **settings), case)


def test_two_tokens_of_qwen3_are_one_launch():
    def shape_of(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    run = functools.partial(mean_weights_triton, scale=0.1, softcap=None)
    q, k, lse = (
        shape_of(2, 2, 32, 128),
        shape_of(2, 4096, 8, 128),
        shape_of(2, 2, 32, dtype="float32"),
    )
    text = lower(run, q, k, lse)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("stablehlo.") == 1
