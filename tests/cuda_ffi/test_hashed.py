"""Selection by hash codes and a layer around it in CUDA, as it divides rows; emulated on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cuda_ffi import hashed, library
from jspec.cuda_ffi.hashed import HashCut, hash_attention_cuda, hash_select_cuda
from jspec.ops.append import QKRope
from jspec.ops.attention.hashed import HASH_ATTENTION
from jspec.ops.hash_selection import HASH_SELECT
from tests.cuda_ffi.emulated import emulated
from tests.ops.attention.test_hashed import OUTPUTS, expected
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


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def calls(request, monkeypatch) -> list[str]:
    """The targets that backends call; those of hashes run the CUDA source on a CPU if emulated."""
    targets, call = list[str](), library.call
    source = request.getfixturevalue("emulator") if request.param == "emulated" else call

    def watched(target, *arguments, **settings):
        targets.append(target)
        run = source if target in library.TARGETS["hashed"] else call
        return run(target, *arguments, **settings)

    monkeypatch.setattr(library, "call", watched)
    return targets


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["emulated"], indirect=True)
@every_case(HASH_SELECT)
@pytest.mark.parametrize("cut", [None, HashCut(256, 2)], ids=str)
def test_slots_equal_the_reference(case, cut, calls):
    arguments = case.arguments
    want = jax.jit(functools.partial(HASH_SELECT.backend("xla").run, **case.static))(*arguments)
    got = jax.jit(functools.partial(hash_select_cuda, **case.static, cut=cut))(*arguments)
    np.testing.assert_array_equal(got, want)


GATHERS = ["hash_append_select", "gathered_attention"]


@every_case(HASH_ATTENTION, lambda case: case.name in ("bfloat16", "small-heads"))
@pytest.mark.parametrize(("processors", "targets"), [(132, ["hash_attention"]), (1, GATHERS)])
def test_a_layer_equals_the_definition(case, processors, targets, calls, monkeypatch):
    """In one launch after the scores, and where rows fill the GPU in two."""
    monkeypatch.setattr(hashed, "multiprocessors", lambda: processors)
    if reason := hashed.HASH_ATTENTION.supports(*case.arguments, **case.static):
        pytest.skip(reason)
    got = jax.jit(functools.partial(hash_attention_cuda, **case.static))(*case.arguments)
    assert calls == targets
    for name, array in zip(OUTPUTS, got, strict=True):
        if name in ("slots", "codes"):
            np.testing.assert_array_equal(array, expected(case.name)[name])
        else:
            np.testing.assert_allclose(np.float64(array), expected(case.name)[name], atol=2e-2)


@pytest.mark.parametrize(
    ("change", "gathers"),
    [
        ({}, True),
        ({"heads": 2}, False),  # a group of two
        ({"batch": 11}, False),  # six multiprocessors a row
        ({"size": 256}, False),  # which the gathered kernel does not take
    ],
    ids=str,
)
def test_many_rows_with_groups_are_gathered(change, gathers, calls, monkeypatch):
    monkeypatch.setattr(hashed, "multiprocessors", lambda: 66)
    shape = {"batch": 12, "heads": 3, "size": 64} | change
    batch, heads, size = shape["batch"], shape["heads"], shape["size"]
    of = jax.ShapeDtypeStruct
    q, new = of((batch, 1, heads, size), jnp.bfloat16), of((batch, 1, 1, size), jnp.bfloat16)
    angles = of((batch, 1, 1, size // 2), jnp.float32)
    rope = QKRope(angles, angles, joined=of((batch, 1, 1, (heads + 2) * size), jnp.bfloat16))
    column, codes = of((batch, 90, 1, size), jnp.bfloat16), of((batch, 90, 1, 4), jnp.uint32)
    arguments = (
        *(q, new, new, rope, column, column, codes, of((1, size, 128), jnp.float32)),
        *(of((batch, 1), jnp.int32), *[of((batch,), jnp.int32)] * 2),
    )
    static = {"budget": 24, "sinks": 4, "recent": 8, "num_uncommitted": 1, "scale": 0.1}
    layer = functools.partial(hash_attention_cuda, **static, softcap=None)
    out, lse, *_ = jax.eval_shape(layer, *arguments)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert calls == (GATHERS if gathers else ["hash_attention"])
