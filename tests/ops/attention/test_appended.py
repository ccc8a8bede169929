"""A token that is appended and attends, as one operation, by every backend, against brute force."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import use_backends
from jspec.ops.attention.appended import APPEND_ATTEND, PARTS, rotate_append_attend
from tests.ops.attention.test_hashed import products
from tests.ops.backends import every_backend, every_case

NAMES = "q k v qk_rope keys values positions selected tail context_len".split()


def named_arguments(case, junk=0.0) -> dict:
    """The arguments of a case by name; ``junk``: in all slots that no query reads."""
    x = dict(zip(NAMES, case.build(), strict=True))
    for b, read in enumerate(slots_of(x)):
        for head, slots in enumerate(read):
            unread = np.setdiff1d(np.arange(x["keys"].shape[1]), slots)
            for name in ("keys", "values"):
                x[name][b, unread, head] = junk
    return x


def new_slot(x, row: int) -> int:
    """The slot of the cache that a row's token is written into, -1 for none."""
    index = int(x["positions"][row, 0]) - int(x["context_len"][row])
    return int(x["tail"][row, index]) if 0 <= index < x["tail"].shape[1] else -1


def slots_of(x) -> list[list[list[int]]]:
    """The slots of the cache that each row and KV head reads, but for the token's own."""
    batch, _, kv_heads, _ = x["keys"].shape
    lists = x["selected"].reshape(batch, -1, x["selected"].shape[-1])
    of_heads = np.broadcast_to(lists, (batch, kv_heads, lists.shape[-1]))
    earlier = [
        [int(slot) for i, slot in enumerate(x["tail"][b]) if x["context_len"][b] + i < position]
        for b, (position,) in enumerate(x["positions"])
    ]
    return [
        [[*(int(s) for s in row[row >= 0]), *earlier[b]] for row in of_heads[b]]
        for b in range(batch)
    ]


def brute_force(x, *, scale, softcap) -> list[np.ndarray]:
    """What the operation gives, from the definition, a head at a time, in float64."""
    queries, new = products(x)
    batch, heads, _ = queries.shape
    keys, values = (np.float64(x[name]) for name in ("keys", "values"))
    kv_heads, read = keys.shape[2], slots_of(x)
    out, lse = np.zeros((batch, 1, heads, values.shape[3])), np.full((batch, 1, heads), -np.inf)
    for b, head in np.ndindex(batch, kv_heads):
        position, slots = int(x["positions"][b, 0]), read[b][head]
        if (slot := new_slot(x, b)) >= 0:
            keys[b, slot, head], values[b, slot, head] = new[b, head], x["v"][b, 0, head]
            slots = [*slots, slot]
        group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
        for n in group if position >= 0 else ():
            logits = scale * keys[b, slots, head] @ queries[b, n]
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            lse[b, 0, n] = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            out[b, 0, n] = np.exp(logits - lse[b, 0, n]) @ values[b, slots, head]
    return [out, lse, keys, values]


def run(x, case, backend, **changed):
    settings = case.static | changed
    arrays = jax.device_put([x[name] for name in NAMES])
    if reason := APPEND_ATTEND.backend(backend).supports(*arrays, **settings):
        pytest.skip(f"{backend}: {reason}")
    function = functools.partial(rotate_append_attend, **settings, implementation=backend)
    return [np.asarray(y, np.float64) for y in jax.jit(function)(*arrays)]


@every_backend(APPEND_ATTEND)
@every_case(APPEND_ATTEND)
def test_equals_the_definition(case, backend):
    """With NaN in all slots that no query reads."""
    check(run(named_arguments(case, junk=np.nan), case, backend), case)


@every_backend(APPEND_ATTEND)
def test_a_soft_cap_and_the_usual_scale(backend):
    case = next(x for x in APPEND_ATTEND.cases() if x.name == "float32")
    got = run(named_arguments(case, junk=np.nan), case, backend, scale=None, softcap=2.0)
    check(got, dataclasses.replace(case, static={"scale": 16**-0.5, "softcap": 2.0}))


def check(got, case):
    want = brute_force(named_arguments(case), **case.static)
    x = named_arguments(case, junk=np.nan)
    near = 2e-6 if x["q"].dtype == np.float32 else 2e-2
    np.testing.assert_allclose(got[0], want[0], atol=near)
    np.testing.assert_allclose(got[1], want[1], atol=near)
    for result, before, after in zip(got[2:], (x["keys"], x["values"]), want[2:], strict=True):
        is_new = np.zeros(before.shape, bool)
        for b in range(len(before)):
            if (slot := new_slot(x, b)) >= 0:
                is_new[b, slot] = True
        np.testing.assert_allclose(result[is_new], after[is_new], atol=near, rtol=1e-2)
        np.testing.assert_array_equal(result[~is_new], np.float64(before)[~is_new])


def test_who_names_a_backend_of_a_part_gets_it():
    case = next(x for x in APPEND_ATTEND.cases() if x.name == "normed")
    arguments = jax.device_put(list(case.build()))
    assert not APPEND_ATTEND.backend("one_by_one").supports(*arguments, **case.static)
    for part in PARTS:
        with use_backends({part: "xla"}):
            reason = APPEND_ATTEND.backend("cuda").supports(*arguments, **case.static)
            assert reason == f"a backend is named for {part}, which it takes the place of"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.zeros((5, 2, 6, 16))}, r"q \(5, 2, 6, 16\) must have one token a row"),
        ({"k": jnp.zeros((5, 1, 1, 16))}, r"k \(5, 1, 1, 16\) and v .* must be \[B, 1, K, H\]"),
        ({"tail": jnp.zeros((3, 6), jnp.int32)}, r"tail \(3, 6\) must be \[B, m\] with B=5"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    case = next(x for x in APPEND_ATTEND.cases() if x.name == "float32")
    arguments = dict(zip(NAMES, case.build(), strict=True)) | changed
    with pytest.raises(ValueError, match=message):
        rotate_append_attend(*arguments.values(), **case.static)
