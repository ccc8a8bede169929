"""A decoding layer of HATA as one operation, by every backend, against brute force."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import use_backends
from jspec.ops.attention.hashed import HASH_ATTENTION, PARTS, hash_attention
from jspec.ops.hash_selection import HASH_SELECT
from tests.ops.backends import every_backend, every_case

NAMES = "q k v qk_rope keys values codes w positions context_len counts".split()
OUTPUTS = ("out", "lse", "slots", "keys", "values", "codes")


def named_arguments(case) -> dict:
    """The arguments of a case by name."""
    return dict(zip(NAMES, case.build(), strict=True))


def turned(x, norm, cosine, sine):
    """A head ``[H]``: normed, its first half as real, its second as imaginary parts, rotated."""
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x) + norm.eps) * np.float64(norm.scale)
    first, second = np.split(x, 2)
    y = (first + 1j * second) * (cosine + 1j * sine)
    return np.concatenate([y.real, y.imag])


def products(x) -> tuple[np.ndarray, np.ndarray]:
    """Turned queries ``[B, N, H]`` and keys ``[B, K, H]``."""
    qk_rope, heads = x["qk_rope"], []
    cosine, sine = (np.float64(angle[:, 0, 0]) for angle in (qk_rope.cosine, qk_rope.sine))
    for name, norm in (("q", qk_rope.q_norm), ("k", qk_rope.k_norm)):
        rows = zip(np.float64(x[name])[:, 0], cosine, sine, strict=True)
        heads.append(np.array([[turned(head, norm, c, s) for head in row] for row, c, s in rows]))
    return heads[0], heads[1]


def chosen_of(scores, context_len, count, budget, sinks, recent) -> list[int]:
    """The best of the first ``context_len``: forced ones, then the highest, of equals the first."""
    forced = [s for s in range(context_len) if s < sinks or s >= context_len - recent]
    free = sorted(set(range(context_len)) - set(forced), key=lambda s: (-scores[s], s))
    return sorted([*forced, *free][: min(count, budget)])


def brute_force(
    x, *, budget, sinks, recent, num_uncommitted, scale, softcap
) -> dict[str, np.ndarray]:
    """What the operation gives, from the definition, a head at a time, in float64."""
    queries, new = products(x)
    batch, heads, _ = queries.shape
    keys, values, w = (np.float64(x[name]) for name in ("keys", "values", "w"))
    codes, kv_heads = np.array(x["codes"]), keys.shape[2]
    out = np.zeros((batch, 1, heads, values.shape[3]))
    lse, slots = np.full((batch, 1, heads), -np.inf), np.full((batch, kv_heads, budget), -1)
    for b, head in np.ndindex(batch, kv_heads):
        position, context_len = int(x["positions"][b, 0]), int(x["context_len"][b])
        if position >= 0:
            keys[b, position, head], values[b, position, head] = new[b, head], x["v"][b, 0, head]
            bits = new[b, head] @ w[head] > 0
            codes[b, position, head] = np.packbits(bits, bitorder="little").view("<u4")
        group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
        stored = np.unpackbits(codes[b, :, head].view(np.uint8), axis=-1, bitorder="little")
        scores = sum((stored == (queries[b, n] @ w[head] > 0)).sum(axis=-1) for n in group)
        chosen = chosen_of(scores, context_len, int(x["counts"][b]), budget, sinks, recent)
        slots[b, head, : len(chosen)] = chosen
        read = [
            *chosen,
            *(s for s in range(context_len, context_len + num_uncommitted) if s <= position),
        ]
        for n in group if position >= 0 else ():
            logits = scale * keys[b, read, head] @ queries[b, n]
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            lse[b, 0, n] = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            out[b, 0, n] = np.exp(logits - lse[b, 0, n]) @ values[b, read, head]
    return dict(zip(OUTPUTS, (out, lse, slots, keys, values, codes), strict=True))


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    case = next(case for case in HASH_ATTENTION.cases() if case.name == name)
    return brute_force(named_arguments(case), **case.static)


@functools.partial(jax.jit, static_argnames=("backend", "static"))
def _jitted(arrays, backend, static):
    settings = {**dict(static), "implementation": backend}
    return hash_attention(**{k: x for k, x in arrays.items() if x is not None}, **settings)


def run(x, case, backend, **changed) -> dict[str, jax.Array]:
    static, arrays = {**case.static, **changed}, jax.device_put(x)
    others = [arrays[name] for name in NAMES]
    if reason := HASH_ATTENTION.backend(backend).supports(*others, **static):
        pytest.skip(f"{backend}: {reason}")
    return dict(zip(OUTPUTS, _jitted(arrays, backend, tuple(static.items())), strict=True))


@every_backend(HASH_ATTENTION)
@every_case(HASH_ATTENTION)
def test_equals_the_definition(case, backend):
    got, want = run(named_arguments(case), case, backend), expected(case.name)
    x = named_arguments(case)
    assert got["out"].dtype == x["q"].dtype
    assert got["lse"].dtype == jnp.float32
    for name in ("slots", "codes"):
        np.testing.assert_array_equal(got[name], want[name])
    for name in ("keys", "values"):
        assert got[name].dtype == x[name].dtype
        np.testing.assert_allclose(np.float64(got[name]), want[name], rtol=1e-5, atol=1e-5)
    is_float32 = x["q"].dtype == np.float32
    np.testing.assert_allclose(
        np.float64(got["out"]), want["out"], atol=1e-5 if is_float32 else 2e-2
    )
    np.testing.assert_allclose(
        got["lse"], want["lse"], rtol=1e-5, atol=1e-4 if is_float32 else 2e-2
    )


@every_case(HASH_ATTENTION)
def test_the_bits_of_a_case_do_not_hang_on_rounding(case):
    """Sums are far from 0, or of whole numbers: exact."""
    x = named_arguments(case)
    group = x["q"].shape[2] // x["k"].shape[2]
    for heads, by in zip(products(x), (group, 1), strict=True):
        sums = np.einsum("bnh,nhr->bnr", heads, np.repeat(np.float64(x["w"]), by, axis=0))
        assert (np.abs(sums) > 1e-3).all() or (sums == np.round(sums)).all()


def test_the_cases_hold_what_they_should():
    """Ties, an empty row, padding, one budget below another, and a budget above the length."""
    x, want = named_arguments(HASH_ATTENTION.cases()[0]), expected("small")
    assert (x["context_len"] == 0).any()
    assert (x["positions"] < 0).any()
    assert (want["slots"][0] >= 0).all()
    assert (want["slots"][1] == -1).all()
    assert (want["slots"][3] == [0, 1, 2, 3, -1, -1]).all()
    assert np.isneginf(want["lse"][2]).all()
    assert not want["out"][2].any()
    assert np.isfinite(want["lse"][1]).all()  # it reads itself
    tail = expected("tail")["slots"]
    assert ((tail >= 0).sum(axis=-1) == [[6, 6], [2, 2], [0, 0]]).all()


@every_backend(HASH_ATTENTION)
@every_case(HASH_ATTENTION)
def test_what_is_not_read_changes_no_bit(case, backend):
    """NaN in slots that are neither selected nor in the tail, and in what the token overwrites."""
    x, want = named_arguments(case), expected(case.name)
    clean = run(x, case, backend)
    read = np.zeros(x["keys"].shape[:3], bool)
    for b, head in np.ndindex(*want["slots"].shape[:2]):
        position, context_len = x["positions"][b, 0], x["context_len"][b]
        chosen = want["slots"][b, head]
        # The token's own slot is written first.
        read[b, [s for s in (*chosen, *range(context_len, position)) if s >= 0], head] = True
    poisoned = {name: np.where(read[..., None], x[name], np.nan) for name in ("keys", "values")}
    poisoned = {name: a.astype(x[name].dtype) for name, a in poisoned.items()}
    behind = np.arange(x["codes"].shape[1]) >= x["context_len"][:, None]
    poisoned["codes"] = np.where(behind[..., None, None], ~x["codes"], x["codes"])
    got = run(x | poisoned, case, backend)
    for name in ("out", "lse", "slots"):
        np.testing.assert_array_equal(got[name], clean[name])
    assert np.isnan(np.float32(got["keys"])).any()


@every_backend(HASH_ATTENTION)
def test_padding_leaves_the_cache_as_it_is(backend):
    case = HASH_ATTENTION.cases()[0]
    x = named_arguments(case)
    x["positions"] = np.full_like(x["positions"], -1)
    got = run(x, case, backend)
    for name in ("keys", "values", "codes"):
        np.testing.assert_array_equal(got[name], x[name])
    assert not np.asarray(got["out"]).any()
    assert np.isneginf(got["lse"]).all()
    np.testing.assert_array_equal(got["slots"], expected("small")["slots"])


@every_backend(HASH_ATTENTION)
def test_a_row_alone_is_the_row_in_the_batch(backend):
    if backend == "xla" and jax.default_backend() == "gpu":
        pytest.skip("XLA takes another product for another batch")
    case = HASH_ATTENTION.cases()[0]
    x = named_arguments(case)
    together = run(x, case, backend)
    for row in range(len(x["q"])):
        at, qk_rope = slice(row, row + 1), x["qk_rope"]
        angles = {
            "cosine": qk_rope.cosine[at],
            "sine": qk_rope.sine[at],
            "joined": qk_rope.joined[at],
        }
        whole = {"w": x["w"], "qk_rope": dataclasses.replace(qk_rope, **angles)}
        alone = {name: whole[name] if name in whole else x[name][at] for name in NAMES}
        for name, got in run(alone, case, backend).items():
            np.testing.assert_array_equal(got[0], together[name][row])


@every_backend(HASH_ATTENTION)
def test_what_is_left_out_has_its_default(backend):
    """No counts are as many as are selected, and the scale that of the queries' size."""
    case = HASH_ATTENTION.cases()[0]
    x = named_arguments(case)
    want = run(x, case, backend)
    for name, got in run(x | {"counts": None}, case, backend, scale=None).items():
        np.testing.assert_array_equal(got, want[name])


@pytest.mark.parametrize("name", ["xla", "two_steps"])
def test_parts_one_by_one_run_by_the_named_backends(name, monkeypatch):
    chosen = []
    choose = HASH_SELECT.choose

    def watched(*args, **static):
        chosen.append(choose(*args, **static))
        return chosen[-1]

    monkeypatch.setitem(HASH_SELECT.__dict__, "choose", watched)
    case = HASH_ATTENTION.cases()[0]
    with use_backends({"hash_select": name}):
        jax.eval_shape(
            functools.partial(HASH_ATTENTION, **case.static, implementation="one_by_one"),
            *case.arguments,
        )
    assert [backend.name for backend in chosen] == [name]
    assert {"rotate_append_encode", "hash_select"} <= set(PARTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 2, 4, 8)}, r"q \(2, 2, 4, 8\), positions .* must be \[B, 1, N, H\], \[B, 1\]"),
        ({"positions": (2,)}, r"positions \(2,\), context_len \(2,\)"),
        ({"context_len": (2, 2)}, r"context_len \(2, 2\), counts"),
        ({"counts": (2, 2)}, r"counts \(2, 2\) must be"),
        ({"counts": (2,), "dtype": jnp.float32}, "counts float32 must be int32"),
        ({"v": (2, 1, 2, 5)}, r"v \(2, 1, 2, 5\), keys"),
        ({"values": (2, 9, 1, 6)}, r"values \(2, 9, 1, 6\)"),
        ({"codes": (2, 9, 2, 2)}, r"codes uint32\[2, 9, 2, 2\] and w"),
        ({"w": (1, 8, 32)}, r"w \[1, 8, 32\] must be uint32"),
        ({"q": (2, 1, 3, 8)}, "with N a multiple of K"),
        ({"budget": 2}, "k=2 must be at least 1 and hold sinks=1 and recent=2"),
        ({"num_uncommitted": 0}, "num_uncommitted=0 must be at least 1"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(change, message):
    shapes = {"q": (2, 1, 4, 8), "k": (2, 1, 2, 8), "v": (2, 1, 2, 6), "keys": (2, 9, 2, 8)}
    shapes |= {"values": (2, 9, 2, 6), "codes": (2, 9, 2, 1), "w": (2, 8, 32)}
    shapes |= {"positions": (2, 1), "context_len": (2,), "counts": (2,)}
    change = dict(change)
    settings = {"budget": 3, "num_uncommitted": 1} | {
        n: change.pop(n) for n in ("budget", "num_uncommitted") if n in change
    }
    kinds = {"codes": jnp.uint32} | dict.fromkeys(("positions", "context_len", "counts"), jnp.int32)
    kinds |= {"counts": change.pop("dtype")} if "dtype" in change else {}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, kinds.get(name, jnp.float32))
        for name, shape in (shapes | change).items()
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            functools.partial(hash_attention, qk_rope=None, sinks=1, recent=2, **settings), **arrays
        )
