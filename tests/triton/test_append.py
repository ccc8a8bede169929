"""Norm, rotation and cache write in Triton: interpreted, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.append import APPEND as OPERATION
from jspec.ops.append import QKRope
from jspec.ops.norm import RMS
from jspec.triton import append as module
from jspec.triton import hash as hash_module
from jspec.triton.append import append_encode_triton, append_triton
from jspec.triton.call import refuses_triton
from tests.triton.lowering import lower

REFERENCE = OPERATION.backend("xla").run


def arguments(batch, tokens, heads, kv_heads, size, value, dtype, cached=None, *, normed=True):
    """Random ones, with slots in no order and one of them out of the cache, of dtype ``cached``.

    A cache of 8 bits gets numbers that it has no room for.
    """
    rng, dtype = np.random.default_rng(batch * tokens + size), jnp.dtype(dtype)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    group = heads // kv_heads
    joined = normal(batch, tokens, kv_heads, group * size + size + value)
    joined = joined * dtype.type(300 if cached else 1)
    q, k, v = np.split(joined, [group * size, group * size + size], axis=-1)
    angle = rng.standard_normal((batch, tokens, 1, size // 2), np.float32)
    norms = (RMS(normal(size)), RMS(normal(size), 1e-5)) if normed else (None, None)
    slots = np.stack([rng.permutation(24)[:tokens] for _ in range(batch)]).astype(np.int32)
    slots[0, -1] = 24
    cache = (
        normal(batch, 24, kv_heads, n).astype(jnp.dtype(cached or dtype)) for n in (size, value)
    )
    qk_rope = QKRope(np.cos(angle), np.sin(angle), *norms, joined)
    q = q.reshape(batch, tokens, heads, size)
    return jax.device_put((q, k, v, qk_rope, *cache, slots))


CASES = {
    "mha": (1, 1, 2, 2, 16, 16, "float32"),
    "group-of-three": (2, 3, 6, 2, 16, 8, "float32"),
    "odd-sizes": (2, 2, 4, 1, 24, 40, "float16"),
}
LARGE = {
    "qwen3": (4, 10, 32, 8, 128, 128, "bfloat16"),
    "gpt-oss": (2, 1, 64, 8, 64, 64, "bfloat16"),
    "8-bits-qwen3": (4, 10, 32, 8, 128, 128, "bfloat16", "float8_e4m3fn"),
    "h80": (3, 2, 16, 4, 80, 80, "float16"),
}


def assert_appended(got, operands) -> None:
    expected = jax.jit(REFERENCE)(*operands)
    for name, have, want in zip(("q", "keys", "values"), got, expected, strict=True):
        assert have.dtype == want.dtype
        # Numbers of 8 bits are up to an eighth apart.
        rounding = {4: 2e-6, 2: 2e-2, 1: 0.126}
        tolerance = rounding[want.dtype.itemsize]
        have, want = (np.asarray(x, np.float64) for x in (have, want))
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_in_the_interpreter(case, normed, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    operands = arguments(*CASES[case], normed=normed)
    assert_appended(append_triton(*operands), operands)


def test_a_cache_of_8_bits_holds_the_largest_number_for_one_past_it(interpreted, monkeypatch):
    """Numbers that need no rounding, in which Triton's interpreter is wrong."""
    monkeypatch.setattr(module, "triton_call", interpreted)
    operands = arguments(2, 2, 4, 2, 16, 8, "float16", "float8_e4m3fn", normed=False)
    joined = jnp.clip(operands[3].joined, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float16)
    q, k, v = jnp.split(4 * joined, [32, 48], axis=-1)
    cosine, sine = jnp.ones((2, 2, 1, 8)), jnp.zeros((2, 2, 1, 8))
    qk_rope = QKRope(cosine, sine, None, None, 4 * joined)
    operands = q.reshape(2, 2, 4, 16), k, v, qk_rope, *operands[4:]
    _, keys, values = append_triton(*operands)
    assert (jnp.abs(keys.astype(jnp.float32)) == 448).sum() > 50
    for got, want in zip((keys, values), jax.jit(REFERENCE)(*operands)[1:], strict=True):
        np.testing.assert_array_equal(got.view(jnp.uint8), want.view(jnp.uint8))


@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_equals_the_reference_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    operands = arguments(*(CASES | LARGE)[case])
    assert_appended(jax.jit(append_triton)(*operands), operands)


def test_is_one_launch_that_writes_in_place():
    operands = arguments(*LARGE["qwen3"])
    text = lower(append_triton, *operands)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def with_codes(operands, bits: int):
    """The arguments with a column of codes and matrices that encode keys into it."""
    *rest, keys, values, slots = operands
    rng = np.random.default_rng(bits)
    batch, size, kv_heads, channels = keys.shape
    codes = rng.integers(0, 2**32, (batch, size, kv_heads, bits // 32), np.uint32)
    w = rng.standard_normal((kv_heads, channels, bits), np.float32)
    return *rest, keys, values, jnp.asarray(codes), jnp.asarray(w), slots


def assert_encoded(got, operands) -> None:
    """Keys and all as without codes; bits as of the keys, but where a sum is next to 0."""
    *plain, before, w, slots = operands
    *appended, codes = got
    assert_appended(appended, (*plain, slots))
    keys, want = np.float64(np.asarray(appended[1], np.float32)), np.array(before)
    sums = np.einsum("bskh,khr->bskr", keys, np.float64(w))
    bits = np.packbits(sums > 0, axis=-1, bitorder="little").view("<u4")
    unsure = np.packbits(np.abs(sums) < 1e-4, axis=-1, bitorder="little").view("<u4")
    assert np.count_nonzero(unsure) < 5
    for row, token in np.ndindex(slots.shape):
        if (slot := slots[row, token]) < keys.shape[1]:
            want[row, slot] = bits[row, slot] ^ ((bits ^ np.asarray(codes)) & unsure)[row, slot]
    np.testing.assert_array_equal(codes, want)


ENCODED = [("mha", 32), ("group-of-three", 64), ("odd-sizes", 128)]


@pytest.mark.parametrize(("case", "bits"), ENCODED, ids=[name for name, _ in ENCODED])
def test_codes_equal_the_signs_in_the_interpreter(case, bits, interpreted, monkeypatch):
    monkeypatch.setattr(module, "triton_call", interpreted)
    operands = with_codes(arguments(*CASES[case]), bits)
    assert_encoded(append_encode_triton(*operands), operands)


def test_many_tokens_take_a_launch_for_their_codes(interpreted, monkeypatch):
    def launch(*arrays, **settings):
        return tuple(map(jnp.asarray, interpreted(*arrays, **settings)))

    for home in (module, hash_module):
        monkeypatch.setattr(home, "triton_call", launch)
    monkeypatch.setattr(module, "ENCODED", 1)
    operands = with_codes(arguments(*CASES["group-of-three"]), 32)
    assert_encoded(append_encode_triton(*operands), operands)


def test_exact_keys_are_those_of_the_launch_without_codes(interpreted, monkeypatch):
    """Few tokens or many: the launch that encodes too sums a norm in another order."""

    def launch(kernel, *arrays, **settings):
        launched.append(kernel.fn.__name__)
        return tuple(map(jnp.asarray, interpreted(kernel, *arrays, **settings)))

    launched: list[str] = []
    for home in (module, hash_module):
        monkeypatch.setattr(home, "triton_call", launch)
    operands = with_codes(arguments(*CASES["group-of-three"]), 32)
    got = module.EXACT_ENCODE.run(*operands)
    assert_encoded(got, operands)
    assert launched[0].startswith("append_kernel")
    for plain, other in zip(got, append_triton(*operands[:6], operands[-1]), strict=False):
        np.testing.assert_array_equal(plain, other)


@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_codes_equal_the_signs_on_a_gpu(case):
    if reason := refuses_triton():
        pytest.skip(reason)
    operands = with_codes(arguments(*(CASES | LARGE)[case]), 128)
    assert_encoded(jax.jit(append_encode_triton)(*operands), operands)


def test_codes_are_of_the_same_launch():
    operands = with_codes(arguments(*LARGE["qwen3"]), 128)
    text = lower(append_encode_triton, *operands)
    assert text.count("stablehlo.custom_call @triton_kernel_call_ffi") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 3
