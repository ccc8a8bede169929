"""Every implementation of gathered attention against float64 numpy, written from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.gpu import refuses_gpu
from jspec.ops.attention.dense import attention
from jspec.ops.attention.gathered import GATHERED, filled, gathered_attention
from tests.ops.attention.test_dense import EXACT


@dataclasses.dataclass(frozen=True)
class Case:
    """``chosen``: how many slots each row selects, of which some are -1, and ``counts`` of which
    count; ``lengths``: how many tokens of the ``tail`` are written before the ``tokens`` queries;
    ``padded``: how many queries at the end of each row are padding; ``weighted``: there are
    log-weights, some of them -inf; ``cached``: the dtype of keys and values, where it is not that
    of the queries."""

    name: str
    tokens: int
    slots: int
    chosen: int
    tail: int
    counts: tuple[int, ...] | None = None
    per_head: bool = False
    batch: int = 3
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int | None = None
    values_in_keys: bool = False
    padded: tuple[int, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    dtype: str = "float32"
    weighted: bool = False
    cached: str | None = None

    @property
    def settings(self) -> dict:
        value_size = self.value_size if self.values_in_keys else None
        return {"scale": self.scale, "softcap": self.softcap, "value_size": value_size}


CASES = [
    Case("shared", 1, 40, 17, 3),
    Case("shared-counts", 2, 40, 20, 5, counts=(20, 0, 7)),
    Case("per-head", 1, 40, 11, 2, per_head=True),
    Case("per-head-counts", 3, 60, 24, 6, counts=(24, 1, 0), per_head=True, softcap=0.8),
    Case("tail-alone", 4, 30, 5, 4, counts=(0, 0, 0)),
    Case("weighted", 2, 40, 21, 3, counts=(21, 2, 9), weighted=True, softcap=0.8),
    Case("weighted-per-head", 3, 50, 20, 5, weighted=True, per_head=True, padded=(1, 0, 3)),
    Case("no-tail", 2, 30, 9, 0),
    Case("queries-past-the-tail", 4, 40, 9, 2),
    Case("padding", 4, 50, 13, 7, padded=(0, 4, 1), scale=0.7),
    Case("small-values-mqa", 2, 40, 19, 2, heads=6, kv_heads=1, value_size=6),
    Case("large-values-mha", 5, 40, 12, 9, heads=3, kv_heads=3, size=8, value_size=24),
    Case("values-in-keys", 2, 40, 12, 3, size=20, value_size=12, values_in_keys=True),
    Case(
        "latent", 1, 40, 19, 2, heads=20, kv_heads=1, size=576, value_size=512, values_in_keys=True
    ),
    Case(
        *("latent-weighted", 4, 40, 12, 5, (12, 0, 7), True),
        size=300,
        value_size=256,
        values_in_keys=True,
        weighted=True,
    ),
    Case("bfloat16", 3, 48, 21, 4, dtype="bfloat16"),
    Case("bfloat16-per-head", 1, 48, 21, 4, per_head=True, dtype="bfloat16"),
    Case("8-bits", 3, 48, 21, 4, dtype="bfloat16", cached="float8_e4m3fn"),
]

# Too large for a CPU's tests.
LARGE = [
    Case("llama-t1", 1, 6000, 3000, 10, None, False, 2, 32, 8, 128, dtype="bfloat16"),
    Case("llama-t10", 10, 3000, 1025, 12, (1025, 5, 0), False, 3, 32, 8, 128, dtype="bfloat16"),
    Case(
        *("8-bits-t10", 10, 3000, 1025, 12, (1025, 5, 0), False, 3, 32, 8, 128),
        dtype="bfloat16",
        cached="float8_e4m3fn",
    ),
    Case("mha-t1", 1, 2000, 512, 1, (512, 77, 300), True, 3, 32, 32, 128, dtype="bfloat16"),
    Case(
        "gqa-per-head-t2", 2, 4000, 700, 9, None, True, 2, 32, 8, 64, dtype="float16", weighted=True
    ),
    Case("size-80-t4", 4, 4000, 1000, 7, None, False, 2, 8, 8, 80, dtype="bfloat16"),
    Case("size-96-t64", 64, 3000, 600, 70, None, False, 2, 8, 2, 96, dtype="bfloat16"),
    Case("size-256", 2, 3000, 999, 4, None, False, 2, 8, 4, 256, softcap=50.0, dtype="bfloat16"),
    Case("group-7", 3, 3000, 999, 4, None, False, 2, 28, 4, 128, dtype="bfloat16"),
    Case("float32", 2, 2000, 1500, 4, None, False, 2, 8, 2, 128),
    Case("values-in-keys", 2, 2000, 900, 4, None, False, 2, 16, 1, 192, 128, True),
    *(
        Case(
            *(f"deepseek-t{tokens}", tokens, 4096, 2048, tokens, None, False, 2, 128, 1, 576, 512),
            values_in_keys=True,
            dtype="bfloat16",
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
    selected: np.ndarray
    tail: np.ndarray
    context_len: np.ndarray
    counts: np.ndarray | None
    log_weights: np.ndarray | None = None

    def row(self, index: int) -> "Inputs":
        """That batch row alone."""
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        cut = {n: None if x is None else x[index : index + 1] for n, x in arrays.items()}
        return Inputs(**cut)


def reads(x: Inputs, b: int, t: int, head: int) -> list[int]:
    """The slots that a query reads for a KV head."""
    position = x.positions[b, t]
    if position < 0:
        return []
    lead = (b, head)[: x.selected.ndim - 1]
    chosen = x.selected[lead][: None if x.counts is None else x.counts[lead]]
    in_tail = [s for i, s in enumerate(x.tail[b]) if x.context_len[b] + i <= position]
    return [s for s in (*chosen, *in_tail) if s >= 0]


def weights(x: Inputs, junk: float) -> np.ndarray:
    """Log-weights, some of them -inf; ``junk`` for entries that select nothing."""
    rng = np.random.default_rng(5)
    shape = (*x.q.shape[:3], x.selected.shape[-1])
    result = np.where(rng.random(shape) < 0.3, -np.inf, rng.normal(0, 3, shape))
    group = x.q.shape[2] // x.k.shape[2]
    chosen = x.selected if x.selected.ndim == 3 else x.selected[:, None]
    chosen = np.broadcast_to(chosen, (len(chosen), x.k.shape[2], shape[-1]))
    none = np.repeat(chosen < 0, group, axis=1)[:, None]
    return np.where(none, junk, result).astype(np.float32)


def inputs(case: Case, *, junk: float) -> Inputs:
    """Random inputs; what no query reads holds ``junk``, head by head."""
    rng = np.random.default_rng(len(case.name))
    batch, kv_heads = case.batch, case.kv_heads

    def normal(dtype, *shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    q = normal(case.dtype, batch, case.tokens, case.heads, case.size)
    k, v = (
        normal(case.cached or case.dtype, batch, case.slots, kv_heads, size)
        for size in (case.size, case.value_size or case.size)
    )
    order = rng.permuted(np.tile(np.arange(case.slots), (batch, 1)), axis=1)
    tail, rest = np.split(order, [case.tail], axis=1)
    if case.per_head:
        rest = rng.permuted(np.repeat(rest[:, None], kv_heads, axis=1), axis=2)
    selected = rest[..., : case.chosen]
    selected = np.where(rng.random(selected.shape) < 0.2, -1, selected)
    if case.tail > case.tokens:
        tail[:, 1] = -1
    context_len = rng.integers(0, 100, batch)
    # The queries stand at the end of the tail, in the second row one before it.
    first = context_len + max(case.tail - case.tokens, 0) - np.arange(batch) % 2
    positions = np.maximum(first, 0)[:, None] + np.arange(case.tokens)
    if case.padded:
        remaining = case.tokens - np.array(case.padded)[:, None]
        positions = np.where(np.arange(case.tokens) < remaining, positions, -1)
    counts = None
    if case.counts is not None:
        counts = np.array(case.counts)
        if case.per_head:
            counts = np.stack([np.roll(counts, head) for head in range(kv_heads)], axis=1)
    whole = [np.asarray(a, np.int32) for a in (positions, selected, tail, context_len)]
    x = Inputs(q, k, v, *whole, None if counts is None else np.asarray(counts, np.int32))
    if case.weighted:
        x = dataclasses.replace(x, log_weights=weights(x, junk))
    unread = np.ones(k.shape[:3], bool)
    for b, t, head in np.ndindex(batch, case.tokens, kv_heads):
        unread[b, reads(x, b, t, head), head] = False
    k[unread] = v[unread] = junk
    return dataclasses.replace(x, v=None) if case.values_in_keys else x


def brute_force(
    x: Inputs,
    scale: float | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its log-sum-exp, one query, head and slot at a time."""
    q, k = np.asarray(x.q, np.float64), np.asarray(x.k, np.float64)
    v = k[..., :value_size] if x.v is None else np.asarray(x.v, np.float64)
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(q.shape[:3]):
        slots = reads(x, b, t, n // group)
        scores = np.array([scale * q[b, t, n] @ k[b, s, n // group] for s in slots])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if x.log_weights is not None:
            chosen = x.selected[(b, n // group)[: x.selected.ndim - 1]]
            added = dict(zip(chosen, np.float64(x.log_weights[b, t, n]), strict=True))
            scores += [added.get(s, 0.0) for s in slots]
        if not np.isfinite(scores).any():
            continue
        lse[b, t, n] = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        weights = np.exp(scores - lse[b, t, n])
        out[b, t, n] = sum(w * v[b, s, n // group] for w, s in zip(weights, slots, strict=True))
    return out, lse


@functools.cache
def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What `brute_force` makes of a case."""
    return brute_force(inputs(case, junk=0.0), **case.settings)


@functools.partial(jax.jit, static_argnames=("implementation", "scale", "softcap", "value_size"))
def _jitted(*arrays, **settings):
    return gathered_attention(*arrays[:-2], counts=arrays[-2], log_weights=arrays[-1], **settings)


def run(x: Inputs, backend: str, **settings):
    arrays = jax.device_put(dataclasses.astuple(x))
    if settings.get("scale") is None:  # which the operation fills in before it asks a backend
        settings["scale"] = x.q.shape[-1] ** -0.5
    all_settings = settings | {"counts": arrays[-2], "log_weights": arrays[-1]}
    if reason := GATHERED.backend(backend).supports(*arrays[:-2], **all_settings):
        pytest.skip(f"{backend}: {reason}")
    return _jitted(*arrays, implementation=backend, **settings)


over_backends = pytest.mark.parametrize("backend", GATHERED.backends)
over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@over_backends
@over_cases
def test_equals_the_definition(case, backend):
    out, lse = run(inputs(case, junk=0.0), backend, **case.settings)
    expected_out, expected_lse = expected(case)
    tolerance = 2e-2 if case.dtype == "bfloat16" else EXACT
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


def of_one_row(x: Inputs) -> Inputs:
    """``x`` with the slots of all batch rows in one, which all of them read."""
    batch, slots = x.k.shape[:2]
    first = slots * np.arange(batch, dtype=np.int32)

    def moved(lists: np.ndarray) -> np.ndarray:
        return np.where(lists >= 0, lists + first.reshape(-1, *[1] * (lists.ndim - 1)), -1)

    k, v = (None if a is None else a.reshape(1, -1, *a.shape[2:]) for a in (x.k, x.v))
    return dataclasses.replace(x, k=k, v=v, selected=moved(x.selected), tail=moved(x.tail))


SHARED = [CASES[1], CASES[3], CASES[6]]


@over_backends
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_rows_may_read_the_slots_of_one(case, backend):
    out, lse = run(of_one_row(inputs(case, junk=np.nan)), backend, **case.settings)
    expected_out, expected_lse = expected(case)
    np.testing.assert_allclose(out, expected_out, atol=EXACT)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=EXACT)


def test_filled_counts_up_to_the_last_slot_that_there_is():
    lists = np.array([[4, -1, 7, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    assert filled(lists).tolist() == [3, 0, 4]


def test_the_cases_hold_what_they_should():
    """Entries of -1, slots of the tail that are still ahead, and a query that reads nothing."""
    x = inputs(CASES[1], junk=np.nan)
    assert (x.selected == -1).any()
    assert (x.tail == -1).any()
    assert np.isnan(x.k[1, x.tail[1, -1]]).all()
    assert (inputs(CASES[4], junk=0.0).positions >= 0).all()
    assert np.isneginf(expected(CASES[4])[1]).any()


@over_backends
@over_cases
def test_unread_slots_change_no_bit(case, backend):
    clean = run(inputs(case, junk=0.0), backend, **case.settings)
    poisoned = run(inputs(case, junk=np.nan), backend, **case.settings)
    for want, got in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(got, want)


@over_backends
@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.name)
def test_a_row_alone_is_the_row_in_the_batch(case, backend):
    if backend == "xla" and jax.default_backend() == "gpu":
        pytest.skip("XLA takes another product for another batch")
    x = inputs(case, junk=np.nan)
    together = run(x, backend, **case.settings)
    for row in range(case.batch):
        for want, got in zip(together, run(x.row(row), backend, **case.settings), strict=True):
            np.testing.assert_array_equal(got[0], want[row])


@over_backends
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_real_shapes_equal_the_definition_on_a_gpu(case, backend):
    if reason := refuses_gpu((8, 0), "a case of this size"):
        pytest.skip(reason)
    out, lse = run(inputs(case, junk=np.nan), backend, **case.settings)
    expected_out, expected_lse = expected(case)
    is_float32 = case.dtype == "float32"
    error = np.linalg.norm(np.asarray(out, np.float64) - expected_out, axis=-1)
    assert (error <= (1e-5 if is_float32 else 1e-2) * np.linalg.norm(expected_out, axis=-1)).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5 if is_float32 else 1e-2)


@jax.jit
def _three_ways(q, k, v, order, context_len):
    """Two queries at ``context_len`` and after it: over the slots, over the slots in another order,
    and over a selection in that order with a tail."""
    behind = context_len[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
    there = jnp.where(order <= behind[:, -1:], order, -1)
    moved = [jnp.take_along_axis(x, order[..., None, None], axis=1) for x in (k, v)]
    selected = jnp.where(order < context_len[:, None], order, -1)
    return (
        attention(q, k, v, behind, implementation="xla"),
        attention(q, *moved, behind, key_positions=there, implementation="xla"),
        gathered_attention(q, k, v, behind, selected, behind, context_len, implementation="xla"),
    )


@given(st.permutations(range(12)), st.integers(0, 10), st.integers(0, 2**32 - 1))
def test_where_a_key_lies_and_who_selects_it_has_no_effect(order, context_len, seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, 2, 4), np.float32) for n in (2, 12, 12))
    reference, *others = _three_ways(
        q, k, v, np.array([order], np.int32), np.array([context_len], np.int32)
    )
    for got in others:
        for have, want in zip(got, reference, strict=True):
            np.testing.assert_allclose(have, want, atol=2e-6)


SHAPES = {
    "q": (2, 4, 4, 8),
    "k": (2, 9, 2, 8),
    "v": (2, 9, 2, 8),
    "positions": (2, 4),
    "selected": (2, 5),
    "tail": (2, 3),
    "context_len": (2,),
}


FLOATS = ("q", "k", "v", "log_weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (2, 8, 2, 8)}, r"k \(2, 9, 2, 8\), v \(2, 8, 2, 8\) must be \[B, T, N, H\]"),
        ({"positions": (2, 3)}, r"positions \(2, 3\) must be \[B, T\] = \(2, 4\)"),
        ({"context_len": (3,)}, r"context_len \(3,\) \[B\] = \(2,\)"),
        ({"selected": (3, 5)}, r"selected \(3, 5\) must be \[B, n\] or \[B, K, n\] with B=2, K=2"),
        ({"selected": (2, 4, 5)}, r"selected \(2, 4, 5\) must be .* with B=2, K=2"),
        ({"selected": (2,)}, r"selected \(2,\) must be"),
        ({"counts": (2, 2)}, r"counts \(2, 2\) must be \(2,\), as selected \(2, 5\) is"),
        ({"selected": (2, 2, 5), "counts": (2,)}, r"counts \(2,\) must be \(2, 2\)"),
        (
            {"log_weights": (2, 4, 4, 4)},
            r"log_weights float32\[2, 4, 4, 4\] must be float32 .*4, 5\]",
        ),
        ({"tail": (3, 3)}, r"tail \(3, 3\) must be \[B, m\] with B=2"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_shapes_are_refused(change, message):
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name in FLOATS else jnp.int32)
        for name, shape in (SHAPES | change).items()
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(gathered_attention, **arrays)
