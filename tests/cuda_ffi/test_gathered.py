"""Attention over selected slots: the CUDA kernel on a GPU or emulated, its counterpart on a CPU."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.cuda_ffi.gathered import ALL_SLOTS, GATHERED, parts_of
from jspec.ops.attention.appended import APPEND_ATTEND
from jspec.ops.attention.gathered import gathered_attention
from jspec.ops.norm import CENTERED, RMS
from tests.cuda_ffi.emulated import emulated
from tests.ops.attention import test_appended
from tests.ops.attention.test_gathered import Case, brute_force, inputs
from tests.ops.backends import every_case

HALF = {"size": 64, "dtype": "bfloat16"}
WHOLE = {"size": 128, "dtype": "bfloat16"}
CASES = [
    # Teams of one, two and four warps, and rows of several teams.
    Case("llama-t1", 1, 300, 200, 3, heads=8, kv_heads=2, **WHOLE),
    Case("per-head", 1, 300, 150, 2, (150, 0, 37), True, heads=4, kv_heads=4, **WHOLE),
    Case("two-warps", 5, 200, 70, 6, (70, 1, 33), heads=8, kv_heads=2, **WHOLE),
    Case("llama-t10", 10, 640, 500, 12, (500, 17, 0), heads=8, kv_heads=2, **WHOLE),
    Case("many-rows", 20, 200, 90, 40, per_head=True, padded=(3, 20, 0), heads=8, **HALF),
    Case("half-t1", 1, 400, 300, 1, (300, 16, 0), heads=14, kv_heads=2, **HALF),
    Case("scaled", 3, 200, 40, 20, heads=10, kv_heads=1, scale=0.5, batch=2, **HALF),
    Case("no-tail", 2, 90, 65, 0, padded=(0, 2, 1), heads=3, kv_heads=3, **HALF),
    # Scores that grow by far more than sums in float32 allow.
    Case("steep", 1, 400, 300, 1, (300, 16, 0), heads=14, kv_heads=2, scale=3.0, **HALF),
    Case("one-slot", 2, 20, 1, 0, counts=(1, 0, 1), heads=4, kv_heads=1, **WHOLE),
]
by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    return emulated("gathered", tmp_path_factory.mktemp("emulated") / "gathered.so")


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """What the backend calls: its library, or the CUDA source on a CPU."""
    if request.param == "emulated":
        monkeypatch.setattr(library, "call", request.getfixturevalue("emulator"))


def run(x, case: Case):
    """Output and log-sum-exp; skips where the backend refuses."""
    *operands, counts, _ = jax.device_put(dataclasses.astuple(x))
    scale = case.size**-0.5 if case.scale is None else case.scale
    settings = {"counts": counts, "scale": scale, "softcap": None, "value_size": None}
    if reason := GATHERED.supports(*operands, **settings):
        pytest.skip(reason)
    static = {name: settings.pop(name) for name in ("scale", "softcap", "value_size")}
    return jax.jit(functools.partial(GATHERED.run, **static))(*operands, **settings)


@by_name(CASES)
def test_equals_the_definition(case, kernel):
    out, lse = run(inputs(case, junk=np.nan), case)
    expected_out, expected_lse = brute_force(inputs(case, junk=0.0), scale=case.scale)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert not np.asarray(out, np.float64)[np.isneginf(expected_lse)].any()


@every_case(APPEND_ATTEND, lambda case: case.name != "float32")
@pytest.mark.parametrize("chunk", [4096, 16])
def test_a_token_is_appended_and_attends(case, chunk, kernel):
    """By one block for a head, and by a cluster whose blocks read a tile or two."""
    with tuned.use_blocks(SameBlocks(chunk, 2, 2)):
        test_appended.check(
            test_appended.run(test_appended.named_arguments(case, junk=np.nan), case, "cuda"), case
        )


@every_case(APPEND_ATTEND, lambda case: case.name == "normed")
def test_a_new_key_is_rounded_where_its_norm_rounds(case, kernel):
    """The bits of the norm and the rotation one by one, which `jax.jit` may round but once."""
    x = test_appended.named_arguments(case)
    got = test_appended.run(x, case, "cuda")[2]
    _, want = x["qk_rope"](jnp.asarray(x["q"]), jnp.asarray(x["k"]))
    for row in (0, 1):
        new = got[row, test_appended.new_slot(x, row)]
        # A square root may round otherwise.
        assert np.mean(new == np.asarray(want[row, 0], np.float64)) > 0.95


@by_name([CASES[1], CASES[3]])
def test_a_row_alone_is_the_row_in_the_batch(case, kernel):
    x = inputs(case, junk=np.nan)
    together = run(x, case)
    for row in range(case.batch):
        for alone, every in zip(run(x.row(row), case), together, strict=True):
            np.testing.assert_array_equal(alone[0], every[row])


@dataclasses.dataclass(frozen=True)
class SameBlocks:
    """The same block sizes for everything, as `jspec.tuned.use_blocks` takes them."""

    chunk: int
    stages: int
    warps: int

    def block(self, operation: str, backend: str, sizes: Mapping[str, int]) -> dict[str, int]:
        assert (operation, backend) == ("gathered_attention", "cuda")
        assert "rows" in sizes
        return dataclasses.asdict(self)


@by_name([CASES[0], CASES[2], CASES[3], CASES[8]])
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(SameBlocks(4096, 2, 8), marks=pytest.mark.exhaustive),
        SameBlocks(4096, 3, 4),
        SameBlocks(16, 8, 8),
        SameBlocks(64, 2, 2),
    ],
)
def test_equals_the_definition_by_any_block_sizes(case, blocks, kernel):
    """Parts of more tiles than stages, of one tile, and so few that they are a cluster."""
    with tuned.use_blocks(blocks):
        out, lse = run(inputs(case, junk=np.nan), case)
    expected_out, expected_lse = brute_force(inputs(case, junk=0.0), scale=case.scale)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=1e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@by_name([CASES[0]])
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["emulated"], indirect=True)
def test_a_gpu_with_less_shared_memory_gets_blocks_of_four_warps(case, kernel, monkeypatch):
    monkeypatch.setenv("EMULATED_SHARED_BYTES", str(99 * 1024))
    with tuned.use_blocks(SameBlocks(4096, 3, 8)):
        got = run(inputs(case, junk=np.nan), case)
    monkeypatch.delenv("EMULATED_SHARED_BYTES")
    with tuned.use_blocks(SameBlocks(4096, 2, 4)):
        want = run(inputs(case, junk=np.nan), case)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@by_name([CASES[3]])
def test_padding_may_hold_anything(case, kernel):
    x = inputs(dataclasses.replace(case, padded=(1, 10, 4)), junk=np.nan)
    q = np.where((x.positions < 0)[..., None, None], np.nan, x.q).astype(x.q.dtype)
    for got, want in zip(run(dataclasses.replace(x, q=q), case), run(x, case), strict=True):
        np.testing.assert_array_equal(got, want)


@by_name([CASES[0], CASES[7]])
@pytest.mark.parametrize("chunk", [4096, 64])
def test_all_slots_are_those_of_a_list_of_them(case, chunk, kernel):
    """Slots after a row's last token may hold anything; a row may read none, or more than all."""
    rng = np.random.default_rng(0)
    lengths, slots = np.array([0, 170, 201], np.int32), 200
    q = rng.standard_normal((3, 1, case.heads, case.size)).astype(jnp.bfloat16)
    k, v = rng.standard_normal((2, 3, slots, case.kv_heads, case.size)).astype(jnp.bfloat16)
    k[np.arange(slots) >= lengths[:, None]] = v[np.arange(slots) >= lengths[:, None]] = np.nan
    positions = lengths[:, None] - 1
    static = {"scale": 0.1, "softcap": None, "value_size": None}
    every = np.tile(np.arange(slots, dtype=np.int32), (3, 1))
    none, start = np.zeros((3, 0), np.int32), np.zeros(3, np.int32)
    with tuned.use_blocks(SameBlocks(chunk, 2, 4)):
        listed = jax.jit(functools.partial(GATHERED.run, **static))
        want = listed(q, k, v, positions, every, none, start, counts=np.minimum(lengths, slots))
        static |= {"key_positions": None, "window": None}
        if reason := ALL_SLOTS.supports(q, k, v, positions, **static):
            pytest.skip(reason)
        got = jax.jit(functools.partial(ALL_SLOTS.run, **static))(q, k, v, positions)
    assert np.isfinite(np.asarray(want[0], np.float32)).all()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("listed", "chunk", "parts"),
    [(1, 128, 1), (129, 128, 2), (513, 128, 5), (8193, 128, 32), (40, 8, 3), (9000, 2048, 5)],
)
def test_a_part_has_about_a_chunk_of_slots(listed, chunk, parts):
    assert parts_of(listed, chunk) == parts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 96}, "H=96 and H'=96 are not both 64 or both 128"),
        ({"dtype": "float16"}, "q of float16, k and v of float16 are not all bfloat16"),
        ({"softcap": 5.0}, "softcap=5.0 or log_weights are passed: the kernel supports neither"),
        ({"scale": -1.0}, "scale=-1.0 is not positive"),
        ({"count": 65536}, r"n \+ m = 65540 slots are over 65536"),
        ({"count": 131072, "tokens": 1}, r"n \+ m = 131076 slots are over 131072"),
        ({"batch": 65536}, "B=65536 is over 65535"),
        ({"count": 0}, "or the selection of 0 slots is empty"),
        ({"slots": 0}, r"k \(2, 0, 1, 64\) or the selection of 99 .* is empty"),
    ],
    ids=["size", "dtype", "softcap", "scale", "listed", "few", "batch", "nothing", "empty"],
)
def test_refuses_with_a_reason(change, reason):
    shape = {"size": 64, "dtype": "bfloat16", "slots": 640, "count": 99, "batch": 2}
    shape = shape | {"tokens": 4} | change
    batch, tokens = shape["batch"], shape["tokens"]
    q = jax.ShapeDtypeStruct((batch, tokens, 8, shape["size"]), shape["dtype"])
    cache = jax.ShapeDtypeStruct((batch, shape["slots"], 1, shape["size"]), shape["dtype"])
    integers = [
        jax.ShapeDtypeStruct((batch, *x), jnp.int32)
        for x in ((tokens,), (shape["count"],), (4,), ())
    ]
    more = {name: shape[name] for name in ("softcap", "scale") if name in shape}
    attend = functools.partial(gathered_attention, implementation="cuda", **more)
    with pytest.raises(Exception, match=reason):
        jax.eval_shape(attend, q, cache, cache, *integers)


HALF_NORMED = next(x for x in APPEND_ATTEND.cases() if x.name == "normed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"joined": None}, "queries, keys and values are not slices of one array"),
        ({"q_norm": None}, "of queries and keys only one has a norm"),
        ({"k_norm": RMS(jnp.ones(64, jnp.bfloat16), centered=True)}, CENTERED),
        ({"k_norm": RMS(jnp.ones(64))}, "projections and norms are not all bfloat16"),
        ({"joined": jnp.zeros((5, 1, 2, 576))}, "projections and norms are not all bfloat16"),
        ({"heads": 18}, "it takes up to 8 query heads a KV head, and there are 9"),
        ({"dtype": "float8_e4m3fn"}, "q of bfloat16, k and v of float8_e4m3fn are not all bfloat"),
        ({"softcap": 5.0}, "softcap=5.0 or log_weights are passed: the kernel supports neither"),
    ],
    ids=["joined", "one-norm", "centered", "scale", "projections", "heads", "dtype", "softcap"],
)
def test_an_appended_token_is_refused_with_a_reason(change, reason):
    q, k, v, qk_rope, keys, values, *rest = HALF_NORMED.build()
    static = dict(HALF_NORMED.static)
    if heads := change.get("heads"):
        q = jnp.zeros((len(q), 1, heads, 64), q.dtype)
    elif dtype := change.get("dtype"):
        keys, values = keys.astype(dtype), values.astype(dtype)
    elif "softcap" in change:
        static |= change
    else:
        qk_rope = dataclasses.replace(qk_rope, **change)
    arguments = q, k, v, qk_rope, keys, values, *rest
    assert reason in (APPEND_ATTEND.backend("cuda").supports(*arguments, **static) or "")


@pytest.mark.parametrize(
    ("tokens", "count", "parts"), [(1, 8188, 8), (1, 8189, 32), (2, 8188, 32)], ids=str
)
def test_parts_of_few_rows_are_those_that_one_launch_merges(tokens, count, parts, monkeypatch):
    sizes = {"chunk": 66, "stages": 2, "warps": 4}
    monkeypatch.setattr("jspec.cuda_ffi.gathered.tuned.block", lambda *args: sizes)
    q = jax.ShapeDtypeStruct((1, tokens, 8, 64), "bfloat16")
    cache = jax.ShapeDtypeStruct((1, 9000, 1, 64), "bfloat16")
    integers = [jax.ShapeDtypeStruct((1, *x), jnp.int32) for x in ((tokens,), (count,), (4,), ())]
    attend = functools.partial(GATHERED.run, counts=None, scale=1.0, softcap=None, value_size=None)
    program = str(jax.make_jaxpr(attend)(q, cache, cache, *integers))
    assert f"f32[1,1,{parts},{8 * tokens},2]" in program  # the sums of each part
