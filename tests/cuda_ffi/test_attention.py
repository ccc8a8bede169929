"""Attention of many query rows: the CUDA kernel on a GPU or emulated, its counterpart on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tuned
from jspec.cuda_ffi import attention as kernels
from jspec.cuda_ffi import library
from jspec.cuda_ffi.attention import ATTENTION, SCORED, attention_cuda, scored_attention_cuda
from jspec.ops.attention.dense import attention
from tests.cuda_ffi.emulated import emulated
from tests.ops.attention.test_dense import Case, brute_force, inputs
from tests.ops.attention.test_scored import arrays, read_by_some

HALF = {"dtype": "bfloat16", "size": 64}
WHOLE = {"dtype": "bfloat16", "size": 128}
EIGHT_BITS = {"cached": "float8_e4m3fn"}
CASES = [
    # Rows of a head that fill both tiles, or one of them and half of the other, or halves of both.
    Case("full-tiles", 16, 400, (400, 16, 129), heads=8, kv_heads=1, **HALF),
    Case("tile-and-a-half", 12, 640, (640, 257, 12), heads=16, kv_heads=2, **HALF),
    Case("two-halves", 10, 296, (290, 128), padded=(3, 0), heads=12, kv_heads=3, **HALF),
    Case("tile-and-probe", 16, 296, (290, 128), heads=8, kv_heads=2, **HALF),
    Case("many-tokens", 32, 200, (200, 64), padded=(0, 32), heads=3, kv_heads=1, **HALF),
    Case("scaled", 7, 152, (152, 100), heads=18, kv_heads=2, scale=0.5, **HALF),
    # Rows of 128 channels: less than half a tile, most of one, all of one, and more than one.
    Case("llama-t1", 1, 400, (400, 1, 129), heads=8, kv_heads=2, **WHOLE),
    Case("llama-t10", 10, 640, (640, 257, 10), padded=(0, 4, 10), heads=8, kv_heads=2, **WHOLE),
    Case("one-tile", 16, 296, (290, 128), heads=4, kv_heads=1, **WHOLE),
    Case("two-tiles", 10, 264, (258, 40), padded=(1, 0), heads=24, kv_heads=3, **WHOLE),
    # A cache of 8 bits: of more blocks than there are stages, and of each shape of tiles.
    Case("8-bits-64", 12, 640, (640, 257, 12), heads=16, kv_heads=2, **HALF, **EIGHT_BITS),
    Case("8-bits-t1", 1, 1000, (1000, 1, 129), heads=8, kv_heads=2, **WHOLE, **EIGHT_BITS),
    Case(
        "8-bits-t10", 10, 640, (640, 10), padded=(0, 4), heads=8, kv_heads=2, **WHOLE, **EIGHT_BITS
    ),
    Case("8-bits-two-tiles", 10, 264, (258, 40), heads=24, kv_heads=3, **WHOLE, **EIGHT_BITS),
]
LARGE = [
    Case("many-parts", 12, 9000, (9000, 2049, 4097), (16), 2, padded=(0, 5, 12), **HALF),
    Case("long", 15, 40_000, (40_000, 33_333), heads=8, kv_heads=1, **HALF),
    Case("long-llama-t1", 1, 40_000, (40_000, 33_333, 7), heads=32, kv_heads=8, **WHOLE),
    Case("long-llama-t10", 10, 40_000, (40_000, 33_333), heads=32, kv_heads=8, **WHOLE),
    Case("long-two-tiles", 15, 9000, (9000, 4097), heads=16, kv_heads=2, **WHOLE),
    Case("8-bits-long-t1", 1, 40_000, (40_000, 33_333, 7), 32, 8, **WHOLE, **EIGHT_BITS),
    Case("8-bits-long-t10", 10, 40_000, (40_000, 33_333), 32, 8, **WHOLE, **EIGHT_BITS),
]
by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def settings(case: Case) -> dict:
    scale = case.size**-0.5 if case.scale is None else case.scale
    none = dict.fromkeys(("key_positions", "window", "softcap", "value_size"))
    return none | {"scale": scale}


def run_or_skip(case: Case, operands):
    """With scores where they are asked for; skips arguments that a backend refuses."""
    backend = SCORED if len(operands) == 5 else ATTENTION
    if reason := backend.supports(*operands, **settings(case)):
        pytest.skip(reason)
    return jax.jit(functools.partial(backend.run, **settings(case)))(*operands)


def skip_large(case: Case):
    if case in LARGE and jax.default_backend() != "gpu":
        pytest.skip("takes long on a CPU")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    return emulated("attention", tmp_path_factory.mktemp("emulated") / "attention.so")


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """What the backend calls: its library, or the CUDA source on a CPU."""
    if request.param == "emulated":
        monkeypatch.setattr(library, "call", request.getfixturevalue("emulator"))


@by_name([*CASES, *LARGE])
def test_equals_the_definition(case, kernel):
    skip_large(case)
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    out, lse = run_or_skip(case, operands[:4])
    expected_out, expected_lse = brute_force(x, **case.settings)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    padding = x.positions < 0
    assert not np.asarray(out, np.float64)[padding].any()


# Of more blocks of keys than a warp has lanes.
MANY_BLOCKS = Case("many-blocks", 1, 4488, (4488, 4225), heads=2, kv_heads=1, **WHOLE)


@by_name([CASES[1], CASES[6], CASES[8], MANY_BLOCKS])
@pytest.mark.parametrize("parts", [1, 2, 128])
def test_equals_the_definition_in_any_number_of_parts(case, parts, kernel, monkeypatch):
    """Some have more blocks of keys than there are stages."""
    monkeypatch.setattr(kernels, "number_of_parts", lambda *_args, **_sizes: parts)
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    out, lse = run_or_skip(case, operands[:4])
    expected_out, expected_lse = brute_force(x, **case.settings)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@by_name([case for case in (*CASES, *LARGE) if case.name != "full-tiles"])
def test_scores_come_with_the_same_attention(case, kernel):
    skip_large(case)
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    *attended, scores = run_or_skip(case, operands)
    # The probe of a full tile is in a second one: its query rows are then summed in another order.
    tolerance = 4e-3 if case.name == "one-tile" else 0
    for got, want in zip(attended, run_or_skip(case, operands[:4]), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), 0, tolerance)
    k, probe = (np.asarray(a, np.float64) for a in (x.k, operands[4]))
    expected = np.einsum("bkh,bskh->bks", probe, k) * settings(case)["scale"]
    read = np.broadcast_to(read_by_some(x, case)[:, None], expected.shape)
    np.testing.assert_allclose(np.asarray(scores)[read], expected[read], rtol=1e-4, atol=1e-5)


@by_name([CASES[1], CASES[6], LARGE[0]])
def test_a_row_does_not_depend_on_its_neighbours_or_the_capacity(case, kernel, monkeypatch):
    """If `number_of_parts` is the same, which the batch and the capacity may change."""
    monkeypatch.setattr(kernels, "number_of_parts", lambda *_args, **_sizes: 16)
    skip_large(case)
    x = inputs(case, junk=np.nan)
    q, k, v, positions = map(np.asarray, (x.q, x.k, x.v, x.positions))
    together = [np.asarray(a) for a in run_or_skip(case, (q, k, v, positions))]
    more = [np.pad(a, ((0, 0), (0, 4000), (0, 0), (0, 0))) for a in (k, v)]
    longer = [np.asarray(a) for a in run_or_skip(case, (q, *more, positions))]
    for row in range(len(case.lengths)):
        alone = run_or_skip(case, [a[row : row + 1] for a in (q, k, v, positions)])
        for one, every, in_more in zip(alone, together, longer, strict=True):
            np.testing.assert_array_equal(np.asarray(one)[0], every[row])
            np.testing.assert_array_equal(np.asarray(one)[0], in_more[row])


# Of 64 channels, in one tile and in two; of 128, also of 8 bits, with more rows than a tile.
EXACT = [
    Case("exact-64", 20, 640, (640, 257), heads=10, kv_heads=2, **HALF),
    Case("exact-128", 18, 640, (640, 257, 18), padded=(0, 4, 0), heads=8, kv_heads=2, **WHOLE),
    Case("exact-8-bits", 5, 1000, (1000, 129), heads=8, kv_heads=2, **WHOLE, **EIGHT_BITS),
]


class TwoParts:
    """Block sizes with which the heads of `EXACT` have two parts, of several blocks each."""

    def block(self, operation, backend, sizes):
        assert (operation, backend) == ("exact_attention", "cuda")
        return {"programs": 2 * sizes["kv_heads"]}


@by_name([*EXACT[:2], pytest.param(EXACT[2], marks=pytest.mark.slow)])
def test_a_token_of_an_exact_attention_has_the_bits_of_any_pass(case, kernel, monkeypatch):
    """Alone, with any others, in another batch, in a larger cache and where keys are scored."""
    x = inputs(case, junk=np.nan)
    operands, _ = arrays(x, case)
    q, k, v, positions, probe = map(np.asarray, operands)

    monkeypatch.setattr(kernels, "_together", lambda _group: 2)  # few keys have several parts

    def run(*arrays, backend=kernels.EXACT):
        if reason := backend.supports(*arrays, **settings(case)):
            pytest.skip(reason)
        with tuned.use_blocks(TwoParts()):
            got = jax.jit(functools.partial(backend.run, **settings(case)))(*arrays)
        return [np.asarray(a, np.float32) for a in got]

    every = run(q, k, v, positions)
    expected_out, expected_lse = brute_force(x, **case.settings)
    np.testing.assert_allclose(every[0], expected_out, atol=1e-2, rtol=2**-8)
    np.testing.assert_allclose(every[1], expected_lse, rtol=1e-5, atol=1e-5)
    more = [np.pad(a, ((0, 0), (0, 4000), (0, 0), (0, 0))) for a in (k, v)]
    for first, count in ((0, 1), (2, case.tokens - 2)):
        some = slice(first, first + count)
        part = q[:, some], k, v, positions[:, some]
        passes = [run(*part), run(part[0], *more, part[3])]
        *scored, scores = run(*part, probe, backend=kernels.EXACT_SCORED)
        passes.append(scored)
        for got in passes:
            for mine, want in zip(got, every, strict=True):
                np.testing.assert_array_equal(mine, want[:, some])
        one = run(*(a[1:2] for a in part))
        for mine, want in zip(one, every, strict=True):
            np.testing.assert_array_equal(mine, want[1:2, some])
        read = read_by_some(dataclasses.replace(x, positions=x.positions[:, some]), case)
        expected = np.einsum("bkh,bskh->bks", *(np.asarray(a, np.float64) for a in (probe, x.k)))
        at = np.broadcast_to(read[:, None], expected.shape)
        expected = expected[at] * settings(case)["scale"]
        np.testing.assert_allclose(scores[at], expected, rtol=1e-4, atol=1e-5)


def test_parts_of_an_exact_attention_have_256_keys_or_so_for_each_query_head():
    expected = {1: 2, 2: 4, 3: 4, 4: 8, 7: 16, 8: 16, 63: 128}
    assert {group: kernels._together(group) for group in expected} == expected


def test_an_exact_attention_names_a_capacity_that_its_kernel_cannot_read():
    case = dataclasses.replace(EXACT[1], slots=641)
    operands, _ = arrays(inputs(case, junk=0.0), case)
    if reason := kernels.EXACT.supports(*operands[:4], **settings(case)):
        pytest.skip(reason)
    with pytest.raises(ValueError, match=r"capacity=641 is not a multiple of 8, .*; round it up"):
        kernels.EXACT.run(*operands[:4], **settings(case))


@pytest.mark.parametrize(
    ("group", "reason"), [(63, None), (64, "64 query rows a head and a probe")]
)
def test_no_pass_changes_the_kernel_of_an_exact_attention(group, reason):
    """Nor its cache: what a row alone may not take, no pass does, scored or not."""
    answers = set()
    for batch, tokens, slots, scored in ((1, 1, 8, False), (512, 17, 641, False), (8, 2, 64, True)):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        q, k = shape((batch, tokens, group, 128)), shape((batch, slots, 1, 128))
        probe = [shape((batch, 1, 128))] if scored else []
        positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
        answers.add(kernels.EXACT.supports(q, k, k, positions, *probe, **settings(EXACT[1])))
    (answer,) = answers
    assert answer is reason is None or reason in str(answer) or "compiler" in str(answer)


def test_parts_leave_no_program_idle_and_are_not_short():
    """Against those that were the fastest on an H200, within 1 %."""
    sizes = {"programs": 132, "overhead": 256}
    # KV heads of all rows, slots, parts.
    fastest = [
        (288, 7168, (4, 5)),
        (288, 2048, (2,)),
        (36, 2048, (3,)),
        (128, 30_720, (2, 3, 4, 5)),
        (32, 131_072, (4, 33)),
        (256, 8192, (1, 2, 3, 4)),
    ]
    for heads, slots, parts in fastest:
        assert kernels.number_of_parts(heads, slots, **sizes) in parts
    # A part for each program at most, none without a block.
    assert kernels.number_of_parts(1, 1 << 20, **sizes) == kernels.MAX_PARTS
    assert kernels.number_of_parts(1, 136, **sizes) == 2
    assert kernels.number_of_parts(1, 8, **sizes) == 1


def test_padding_may_hold_anything(kernel):
    case = CASES[2]
    x = inputs(case, junk=np.nan)
    operands = [jnp.asarray(a) for a in (x.q, x.k, x.v, x.positions)]
    junk = operands[0].at[x.positions < 0].set(jnp.nan)
    for got, want in zip(
        run_or_skip(case, [junk, *operands[1:]]), run_or_skip(case, operands), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_positions_beyond_the_cache_see_all_of_it(kernel):
    """Of a cache whose last block is not full."""
    case = Case("beyond", 2, 200, (200,), heads=8, kv_heads=1, **HALF)
    x = inputs(case, junk=np.nan)
    q, k, v, _ = (jnp.asarray(a) for a in (x.q, x.k, x.v, x.positions))
    got = run_or_skip(case, (q, k, v, jnp.asarray([[199, 300]], jnp.int32)))
    want = run_or_skip(case, (q, k, v, jnp.asarray([[199, 199]], jnp.int32)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 96}, "H=96 and H'=96 are not both 64 or both 128"),
        ({"dtype": "float16"}, "q of float16, k and v of float16 are not all bfloat16"),
        ({"tokens": 17}, "T=17 with 136 rows a head is over 32 tokens or 128 rows"),
        ({"tokens": 33, "heads": 1}, "T=33 with 33 rows a head is over 32 tokens"),
        ({"slots": 150}, "S=150 is not a multiple of 8; round the capacity up"),
        ({"window": 9}, "window=9, softcap=None: the kernel supports neither"),
        ({"scale": -1.0}, "scale=-1.0 is not positive"),
        ({"slots": 0}, "is empty"),
    ],
    ids=["size", "dtype", "rows", "tokens", "slots", "window", "scale", "empty"],
)
def test_refuses_with_a_reason(change, reason):
    shape = {"size": 64, "dtype": "bfloat16", "tokens": 4, "slots": 640, "heads": 8} | change
    sizes = (2, shape["tokens"], shape["heads"], shape["size"])
    q = jax.ShapeDtypeStruct(sizes, shape["dtype"])
    cache = jax.ShapeDtypeStruct((2, shape["slots"], 1, shape["size"]), shape["dtype"])
    positions = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    more = {name: shape[name] for name in ("window", "scale") if name in shape}
    run = functools.partial(attention, implementation="cuda", **more)
    with pytest.raises(Exception, match=reason):
        jax.eval_shape(run, q, cache, cache, positions)


def test_a_query_that_scores_is_one_row_more():
    q = jax.ShapeDtypeStruct((1, 16, 8, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1, 640, 1, 64), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    probe = jax.ShapeDtypeStruct((1, 1, 64), jnp.bfloat16)
    operands, static = (q, cache, cache, positions), settings(CASES[0])
    assert "over 32 tokens or 127 rows" in (SCORED.supports(*operands, probe, **static) or "")
    assert ATTENTION.run is attention_cuda
    assert SCORED.run is scored_attention_cuda
