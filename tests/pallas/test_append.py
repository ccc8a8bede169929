"""Norm, rotation, cache write and codes on Mosaic GPU: interpreted, lowered, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jspec.ops.append import QKRope
from jspec.ops.norm import RMS
from jspec.pallas.append import APPEND_ENCODE, AppendBlocks, append_encode_pallas, refuses
from jspec.pallas.mosaic import refuses_pallas
from tests.pallas.mosaic import interpret, lower
from tests.triton.test_append import CASES, ENCODED, LARGE, arguments, assert_encoded, with_codes

over_encoded = pytest.mark.parametrize(("case", "bits"), ENCODED, ids=[name for name, _ in ENCODED])


@over_encoded
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_codes_equal_the_signs_when_interpreted(case, bits, normed):
    operands = with_codes(arguments(*CASES[case], normed=normed), bits)
    assert_encoded(interpret(append_encode_pallas, *operands), operands)


def test_tiles_of_tokens_of_any_size_give_the_same():
    operands = with_codes(arguments(*CASES["group-of-three"]), 64)
    got = interpret(lambda *x: append_encode_pallas(*x, blocks=AppendBlocks(1)), *operands)
    assert_encoded(got, operands)


@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_codes_equal_the_signs_on_a_gpu(case):
    if reason := refuses_pallas():
        pytest.skip(reason)
    operands = with_codes(arguments(*(CASES | LARGE)[case]), 128)
    assert_encoded(jax.jit(append_encode_pallas)(*operands), operands)


@over_encoded
def test_lowers(case, bits):
    operands = with_codes(arguments(*CASES[case]), bits)
    assert lower(append_encode_pallas, *operands).count("@mosaic_gpu_v2") == 1


def test_is_one_launch_that_writes_in_place():
    text = lower(append_encode_pallas, *with_codes(arguments(*LARGE["qwen3"]), 128))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 3
    assert text.count("stablehlo.") == 4 + text.count("stablehlo.reshape")


def test_refuses_with_a_reason():
    q, v, w = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 1, 2, 4)), jnp.zeros((2, 8, 32))
    angles = jnp.zeros((1, 1, 1, 4))

    def rope(*norms, columns=20, size=8):
        return QKRope(angles, angles, *norms, joined=jnp.zeros((1, 1, 2, columns)))

    assert refuses(q, v, rope(), w) is None
    assert "not slices of one array" in (refuses(q, v, QKRope(angles, angles), w) or "")
    assert "only one has a norm" in (refuses(q, v, rope(RMS(jnp.ones(8))), w) or "")
    assert "is not [B, T, K, 20]" in (refuses(q, v, rope(columns=24), w) or "")
    odd = refuses(q[..., :6], v, rope(columns=16), w[:, :6]) or ""
    assert "heads of 6 and values of 4 channels are not multiples of 8 and 4" in odd


def test_refuses_arrays_that_vary_over_a_mesh():
    operands = with_codes(arguments(*CASES["group-of-three"]), 64)
    reasons = []

    def check(*shards):
        reasons.append(APPEND_ENCODE.supports(*shards))
        return shards[0]

    mesh = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    by_rows, whole = PartitionSpec("rows"), PartitionSpec()
    specs = [by_rows] * len(operands)
    specs[3] = jax.tree.map(lambda x: by_rows if x.ndim > 1 else whole, operands[3])
    specs[7] = whole
    jax.eval_shape(
        jax.shard_map(check, mesh=mesh, in_specs=tuple(specs), out_specs=by_rows), *operands
    )
    assert "arrays that vary over ['rows'] of a mesh" in reasons[0]
