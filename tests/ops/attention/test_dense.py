"""Every implementation of attention against float64 numpy, written from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError
from jspec.gpu import refuses_gpu
from jspec.ops.attention import dense as module
from jspec.ops.attention.dense import ATTENTION, attention, causal
from tests.parameters import default_run

# How near float32 comes: a GPU's exponential is an approximation.
EXACT = 2e-6 if jax.default_backend() == "cpu" else 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """``lengths``: what each row's cache holds, the new tokens included; ``padded``: how many of
    the ``tokens`` queries at the end of each row are padding; ``empty``: whether key positions are
    given, shuffled and with empty slots among them; ``cached``: the dtype of keys and values, where
    it is not that of the queries."""

    name: str
    tokens: int
    slots: int
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    padded: tuple[int, ...] = ()
    empty: bool = False
    dtype: str = "float32"
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    value_size: int | None = None
    values_in_keys: bool = False
    cached: str | None = None

    @property
    def settings(self) -> dict:
        result = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return result | {"value_size": self.value_size if self.values_in_keys else None}


CASES = [
    Case("one-token", 1, 40, (40, 1, 17)),
    Case("one-slot", 1, 1, (1, 1)),
    Case("two-tokens-mha", 2, 33, (33, 2), heads=3, kv_heads=3, size=8),
    Case("three-tokens-mqa", 3, 24, (7, 24), heads=6, kv_heads=1),
    Case("four-tokens-padding", 4, 37, (37, 30, 6, 4), padded=(0, 1, 3, 4)),
    Case("five-tokens-gqa4", 5, 50, (50, 8, 31), heads=8, kv_heads=2, size=4),
    Case("seven-tokens-holes", 7, 45, (45, 20, 7), empty=True),
    Case("eight-tokens-scale", 8, 16, (16, 9), scale=0.7),
    Case("nine-tokens-holes-padding", 9, 61, (61, 13, 40), padded=(2, 0, 9), empty=True),
    Case("window-padding", 4, 37, (37, 30, 6, 4), padded=(0, 1, 3, 4), window=3),
    Case("window-of-one-holes", 3, 30, (30, 4), window=1, empty=True),
    Case("softcap-small-values", 3, 24, (7, 24), softcap=0.8, value_size=6),
    Case("all-settings", 6, 41, (41, 9), scale=2.0, window=11, softcap=5.0, value_size=24),
    Case("values-in-keys", 3, 24, (7, 24), size=20, value_size=12, values_in_keys=True),
    # Latents with their positional part: keys of more than 256 channels.
    Case("latent-t1", 1, 70, (70, 1, 0, 33), 20, 1, 264, value_size=256, values_in_keys=True),
    Case(
        *("latent-t4", 4, 50, (50, 4, 31), 8, 1, 576, (0, 4, 1)),
        value_size=512,
        values_in_keys=True,
    ),
    Case(
        *("latent-t9-holes", 9, 61, (61, 13, 40), 4, 2, 300, (2, 0, 9), True),
        value_size=256,
        values_in_keys=True,
    ),
    Case(
        *("latent-window-softcap", 4, 60, (60, 17), 4, 1, 576),
        window=9,
        softcap=5.0,
        value_size=512,
        values_in_keys=True,
    ),
    Case(
        *("latent-alone-holes", 4, 40, (40, 9), 2, 1, 512, (), True),
        window=9,
        value_size=512,
        values_in_keys=True,
    ),
    Case(
        *("latent-bfloat16", 1, 48, (48, 11), 16, 1, 576, (), False, "bfloat16", 1 / 32),
        value_size=512,
        values_in_keys=True,
    ),
    Case("size-80", 2, 20, (20, 3), size=80),
    Case("size-96-many-rows", 20, 30, (30, 20), heads=7, kv_heads=1, size=96, window=9),
    Case("bfloat16", 5, 48, (48, 11), dtype="bfloat16"),
    Case("bfloat16-holes", 1, 48, (48, 11), dtype="bfloat16", empty=True),
    Case("8-bits", 5, 48, (48, 11), dtype="bfloat16", cached="float8_e4m3fn"),
    Case("8-bits-float32", 2, 48, (48, 11), cached="float8_e4m3fn", window=9),
]

# Too large for a CPU's tests.
LARGE = [
    Case("llama-t1", 1, 20000, (20000, 7777), 32, 8, 128, dtype="bfloat16"),
    Case("llama-t10", 10, 5001, (5001, 10), 32, 8, 128, dtype="bfloat16"),
    Case(
        "8-bits-t1", 1, 20000, (20000, 7777), 32, 8, 128, dtype="bfloat16", cached="float8_e4m3fn"
    ),
    Case(
        "8-bits-t10",
        10,
        5001,
        (5001, 10),
        32,
        8,
        128,
        (0, 3),
        dtype="bfloat16",
        cached="float8_e4m3fn",
    ),
    Case(
        "8-bits-gpt-oss", 12, 3000, (3000, 150), 64, 8, 64, dtype="bfloat16", cached="float8_e4m3fn"
    ),
    Case("mha-t2", 2, 5000, (5000, 2), 16, 16, 64, dtype="float16"),
    Case("gpt-oss-t12", 12, 3000, (3000, 150), 64, 8, 64, dtype="bfloat16", window=128),
    Case("size-80-ring", 1, 1000, (1000, 400), 32, 32, 80, dtype="bfloat16", empty=True),
    Case("size-96-t10", 10, 3000, (3000, 1499), 32, 8, 96, dtype="bfloat16", padded=(0, 4)),
    Case("size-256-capped", 2, 8000, (8000, 513), 8, 4, 256, dtype="bfloat16", softcap=50.0),
    Case("group-7-t10-ring", 10, 3000, (3000, 77), 28, 4, 128, window=1000, empty=True),
    Case("t64", 64, 2500, (2500, 64, 1024), 16, 4, 128, dtype="bfloat16"),
    Case("float32-t10", 10, 4100, (4100, 4097), 8, 2, 128, softcap=5.0),
    Case("values-in-keys-t4", 4, 2000, (2000, 5), 16, 1, 192, value_size=128, values_in_keys=True),
    *(
        Case(
            *(f"deepseek-t{tokens}", tokens, 4096, (4096, 1500), 128, 1, 576),
            dtype="bfloat16",
            value_size=512,
            values_in_keys=True,
        )
        for tokens in (1, 4)
    ),
]


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    positions: np.ndarray
    key_positions: np.ndarray | None


def inputs(case: Case, *, junk: float) -> Inputs:
    """Random inputs; every slot that no query may read holds ``junk``."""
    rng = np.random.default_rng(len(case.name))
    batch = len(case.lengths)

    def normal(dtype, *shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    q = normal(case.dtype, batch, case.tokens, case.heads, case.size)
    k, v = (
        normal(case.cached or case.dtype, batch, case.slots, case.kv_heads, size)
        for size in (case.size, case.value_size or case.size)
    )
    lengths = np.array(case.lengths)[:, None]
    positions = lengths - case.tokens + np.arange(case.tokens)
    if case.padded:
        remaining = case.tokens - np.array(case.padded)[:, None]
        positions = np.where(np.arange(case.tokens) < remaining, positions, -1)
    stored = np.tile(np.arange(case.slots), (batch, 1))
    stored = np.where(stored < lengths, stored, -1)
    if case.empty:
        stored = rng.permuted(np.where(rng.random(stored.shape) < 0.3, -1, stored), axis=1)
    unread = (stored < 0) | (stored > positions.max(axis=1, keepdims=True))
    k[unread] = v[unread] = junk
    v = None if case.values_in_keys else v
    return Inputs(
        q, k, v, positions.astype(np.int32), stored.astype(np.int32) if case.empty else None
    )


def in_blocks(x: Inputs, block: int) -> tuple[Inputs, np.ndarray]:
    """``x`` with its keys and values in blocks, in random order among some of NaN; and the table.

    There is none for positions that no query of the row reads.
    """
    batch, slots = x.k.shape[:2]
    width = -(-slots // block)
    rng = np.random.default_rng(slots)
    table = rng.permutation(2 * batch * width)[: batch * width].reshape(batch, width)
    table = np.where(np.arange(width) * block > x.positions.max(axis=1)[:, None], -1, table)

    def blocks_of(rows: np.ndarray) -> np.ndarray:
        pool = np.full((2 * batch * width, block, *rows.shape[2:]), np.nan, rows.dtype)
        for row, i in np.argwhere(table >= 0):
            part = rows[row, i * block : (i + 1) * block]
            pool[table[row, i], : len(part)] = part
        return pool

    k, v = (None if a is None else blocks_of(a) for a in (x.k, x.v))
    return dataclasses.replace(x, k=k, v=v), table.astype(np.int32)


def brute_force(
    x: Inputs,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its log-sum-exp, one query and head at a time."""
    q, k = np.asarray(x.q, np.float64), np.asarray(x.k, np.float64)
    v = k[..., :value_size] if x.v is None else np.asarray(x.v, np.float64)
    batch, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    k, v = (np.ascontiguousarray(np.swapaxes(a, 1, 2)) for a in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(batch, tokens, heads):
        stored = np.arange(k.shape[2]) if x.key_positions is None else x.key_positions[b]
        position = x.positions[b, t]
        first = 0 if window is None else max(position - window + 1, 0)
        observed = np.flatnonzero((first <= stored) & (stored <= position))
        if not len(observed):
            continue
        scores = scale * (k[b, n // group][observed] @ q[b, t, n])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        lse[b, t, n] = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        out[b, t, n] = np.exp(scores - lse[b, t, n]) @ v[b, n // group][observed]
    return out, lse


@functools.cache
def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What `brute_force` makes of a case."""
    return brute_force(inputs(case, junk=0.0), **case.settings)


@functools.partial(
    jax.jit, static_argnames=("implementation", "scale", "window", "softcap", "value_size")
)
def _jitted(q, k, v, positions, key_positions, **settings):
    return attention(q, k, v, positions, key_positions=key_positions, **settings)


def run(x: Inputs, implementation: str, **settings):
    arrays = jax.device_put(dataclasses.astuple(x))
    asked = {"scale": None, "window": None, "softcap": None, "value_size": None} | settings
    backend = ATTENTION.backends.get(implementation) and ATTENTION.backend(implementation)
    if backend and (r := backend.supports(*arrays[:4], key_positions=arrays[4], **asked)):
        pytest.skip(f"{implementation}: {r}")
    return _jitted(*arrays, implementation=implementation, **settings)


@pytest.fixture(params=ATTENTION.backends)
def implementation(request, monkeypatch) -> str:
    """Each implementation; blocks of 20 slots are one in some cases, in most several, of which the
    last is ragged."""
    monkeypatch.setattr(module, "BLOCK", 20)
    return request.param


# Each edge and each setting; the others have sizes in between.
over_cases = pytest.mark.parametrize(
    "case",
    default_run(
        CASES,
        *("one-token", "one-slot", "four-tokens-padding", "seven-tokens-holes", "size-80"),
        *("window-padding", "window-of-one-holes", "all-settings", "values-in-keys"),
        *("latent-t1", "latent-window-softcap", "bfloat16", "8-bits-float32"),
    ),
    ids=lambda case: case.name,
)


@over_cases
def test_equals_the_definition(case, implementation):
    out, lse = run(inputs(case, junk=0.0), implementation, **case.settings)
    expected_out, expected_lse = expected(case)
    tolerance = 2e-2 if case.dtype == "bfloat16" else EXACT
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


BLOCKS = [
    dataclasses.replace(case, name=f"{case.name}-blocks")
    for case in CASES
    if case.name in ("four-tokens-padding", "all-settings", "values-in-keys", "latent-t1")
]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_keys_in_blocks_are_read_by_the_table(case, implementation):
    x, table = in_blocks(inputs(case, junk=np.nan), 8)
    out, lse = run(x, implementation, **case.settings, table=jnp.asarray(table))
    expected_out, expected_lse = expected(case)
    np.testing.assert_allclose(out, expected_out, atol=EXACT)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


def without_block(x: Inputs, table: np.ndarray, block: int) -> Inputs:
    """``x`` without the second block of its first row, which ``table`` then lacks."""
    stored = np.tile(np.arange(x.k.shape[1], dtype=np.int32), (len(x.k), 1))
    stored[0, block : 2 * block] = table[0, 1] = -1
    return dataclasses.replace(x, key_positions=stored)


def test_positions_without_a_block_are_not_read(implementation):
    x = inputs(BLOCKS[0], junk=0.0)
    paged, table = in_blocks(x, 8)
    expected_out, expected_lse = brute_force(without_block(x, table, 8))
    out, lse = run(paged, implementation, table=jnp.asarray(table))
    np.testing.assert_allclose(out, expected_out, atol=EXACT)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


def test_rows_may_share_blocks(implementation):
    """The first block of all rows is one."""
    x, table = in_blocks(inputs(BLOCKS[0], junk=0.0), 8)
    table[:, 0] = table[0, 0]
    out, _ = run(x, implementation, table=jnp.asarray(table))
    rows = (np.nan_to_num(a[table].reshape(4, -1, *a.shape[2:])) for a in (x.k, x.v))
    k, v = rows
    expected_out, _ = brute_force(dataclasses.replace(x, k=k, v=v))
    np.testing.assert_allclose(out, expected_out, atol=EXACT)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_real_shapes_equal_the_definition_on_a_gpu(case, implementation):
    if reason := refuses_gpu((8, 0), "a case of this size"):
        pytest.skip(reason)
    out, lse = run(inputs(case, junk=np.nan), implementation, **case.settings)
    expected_out, expected_lse = expected(case)
    is_float32 = case.dtype == "float32"
    error = np.linalg.norm(np.asarray(out, np.float64) - expected_out, axis=-1)
    assert (error <= (1e-5 if is_float32 else 1e-2) * np.linalg.norm(expected_out, axis=-1)).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5 if is_float32 else 1e-2)


@over_cases
def test_empty_slots_change_no_bit(case, implementation):
    clean = run(inputs(case, junk=0.0), implementation, **case.settings)
    for junk in (np.nan, np.inf, 3e38):
        poisoned = run(inputs(case, junk=junk), implementation, **case.settings)
        for want, got in zip(clean, poisoned, strict=True):
            np.testing.assert_array_equal(got, want)


def test_padding_gives_zero_and_minus_infinity(implementation):
    x = inputs(CASES[4], junk=np.nan)
    out, lse = run(x, implementation)
    padding = x.positions < 0
    assert padding.sum() == 8
    assert not np.asarray(out)[padding].any()
    assert (np.asarray(lse)[padding] == -np.inf).all()


def test_large_scores_do_not_overflow(implementation):
    x = inputs(CASES[0], junk=0.0)
    out, lse = run(x, implementation, scale=1e4)
    expected_out, expected_lse = brute_force(x, 1e4)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(out, expected_out, atol=2e-2)


def test_causal_is_attention_of_a_sequence_over_itself():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 6, 4, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 6, 2, 8)).astype(np.float32) for _ in range(2))
    positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    expected, _ = brute_force(Inputs(q, k, v, positions, None))
    np.testing.assert_allclose(jax.jit(causal)(q, k, v), expected, atol=EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 9, 3, 8)}, r"k \(2, 9, 3, 8\).*must be \[B, T, N, H\]"),
        ({"k": (2, 9, 3, 8), "v": (2, 9, 3, 8)}, "N a multiple of K"),
        ({"k": (3, 9, 2, 8), "v": (3, 9, 2, 8)}, "must be"),
        ({"k": (2, 9, 2, 4), "v": (2, 9, 2, 4)}, "must be"),
        ({"v": (2, 8, 2, 8)}, r"\[B, S, K, H'\]"),
        ({"positions": (2, 3)}, r"positions \(2, 3\) must be \[B, T\] = \(2, 4\)"),
        ({"key_positions": (2, 8)}, r"key_positions \(2, 8\) must be \[B, S\] = \(2, 9\)"),
        ({"v": None}, "value_size=None must be from 1 to 8, the channels of a key"),
        ({"v": None, "value_size": 9}, "value_size=9 must be from 1 to 8"),
        (
            {"table": (3, 2)},
            r"table int32\[3, 2\] must be int32 \[B, W\] with B=2, for blocks of keys \[2, 9,",
        ),
        ({"table": (2, 2), "key_positions": (2, 18)}, "key_positions and table are both passed"),
        ({"value_size": 4}, "values of float32, value_size=4: .* value_size is for v=None"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_shapes_are_refused(change, message):
    shapes = {"q": (2, 4, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8), "positions": (2, 4)}
    shapes |= change
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if len(name) == 1 else jnp.int32)
        for name, shape in shapes.items()
        if isinstance(shape, tuple)
    }
    rest = {name: x for name, x in shapes.items() if not isinstance(x, tuple)}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(attention, **rest), **arrays)


def test_all_slots_are_selected_for_short_contexts_alone():
    x = [jax.ShapeDtypeStruct((2, n, 2, 8), jnp.float32) for n in (1, 4104, 4104)]
    positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    with pytest.raises(BackendError, match="gathered: S=4104 is over 4096"):
        jax.eval_shape(functools.partial(attention, implementation="gathered"), *x, positions)


def test_an_unknown_implementation_is_refused():
    x = inputs(CASES[0], junk=0.0)
    with pytest.raises(BackendError, match=r"attention has no implementation 'fastest'.*xla"):
        run(x, "fastest")
