"""Greedy verification: every backend against plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.verify import VERIFY_GREEDY, Verified, verify_greedy
from tests.ops.backends import every_backend, every_case, run_or_skip
from tests.parameters import default_run

LAST_ID = 2**31 - 1


def int32(x):
    return jax.device_put(np.asarray(x, np.int32))


def outcome(draft: list[int], target: list[int], length: int, stops: list[int]) -> dict:
    """What greedy verification of one row must give, step by step."""
    length = min(length, len(draft))
    accepted = 0
    while accepted < length and draft[accepted] == target[accepted]:
        accepted += 1
    block = [*draft[:accepted], target[accepted]]
    return cut(block, len(draft) + 1, stops, mismatch=accepted < length)


def cut(block: list[int], size: int, stops: list[int], *, mismatch: bool) -> dict:
    """The outcome for a block of accepted tokens and one more, ended after its first stop."""
    accepted = len(block) - 1
    end = next((i + 1 for i, token in enumerate(block) if token in stops and token >= 0), None)
    remaining = block[:end]
    return {
        "accepted": min(accepted, len(remaining)),
        "committed": len(remaining),
        "mismatch": mismatch and len(remaining) > accepted,
        "next_token": remaining[accepted] if len(remaining) > accepted else -1,
        "stopped": end is not None,
        "tokens": remaining + [-1] * (size - len(remaining)),
    }


def assert_outcomes(got: Verified, expected: list[dict], token=jnp.int32) -> None:
    dtypes = {"mismatch": jnp.bool_, "stopped": jnp.bool_, "next_token": token, "tokens": token}
    for field in dataclasses.fields(Verified):
        value = getattr(got, field.name)
        assert value.dtype == dtypes.get(field.name, jnp.int32), field.name
        np.testing.assert_array_equal(value, [e[field.name] for e in expected], field.name)


# --- greedy ----------------------------------------------------------------------------------

over_backends = every_backend(VERIFY_GREEDY)


def greedy(backend: str, *arguments) -> Verified:
    return run_or_skip(verify_greedy, VERIFY_GREEDY, backend, *map(jnp.asarray, arguments))


@over_backends
@every_case(VERIFY_GREEDY)
def test_greedy_cases_equal_plain_python(case, backend):
    draft, target, lengths, stops = case.build()
    inputs = [x.tolist() for x in (draft, target, lengths.clip(0), stops)]
    expected = [outcome(*row) for row in zip(*inputs, strict=True)]
    assert_outcomes(greedy(backend, *case.arguments), expected)


@over_backends
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_greedy_equals_plain_python(gamma, backend):
    """2,000 random rows over three ids, so that runs of every length, ragged drafts and stop
    tokens at every place occur; seed 0."""
    rng = np.random.default_rng(0)
    count = 2000
    target = rng.integers(0, 3, (count, gamma + 1))
    draft = np.where(rng.random((count, gamma)) < 0.8, target[:, :-1], rng.integers(0, 3, gamma))
    lengths = rng.integers(0, gamma + 1, count)
    draft = np.where(np.arange(gamma) < lengths[:, None], draft, -1)
    stops = np.where(rng.random((count, 2)) < 0.3, rng.integers(0, 3, (count, 2)), -1)
    inputs = [x.tolist() for x in (draft, target, lengths, stops)]
    expected = [outcome(*row) for row in zip(*inputs, strict=True)]
    assert {e["accepted"] for e in expected} == set(range(gamma + 1))
    assert any(e["stopped"] and e["next_token"] == -1 for e in expected)
    assert_outcomes(greedy(backend, *map(int32, (draft, target, lengths, stops))), expected)


@over_backends
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("gamma", default_run([31, 32, 64, 128, 200], "32", "200"))
def test_greedy_of_long_drafts(gamma, dtype, backend):
    """One row for each position that may be rejected, which is each length, and each that may stop.

    Around every multiple of 32, with ids at the type's limits, draft lengths out of range, and 0 to
    40 stop tokens.
    """
    rng = np.random.default_rng(gamma)
    last = np.iinfo(dtype).max
    count = 4 * (gamma + 2)
    at = np.arange(count) % (gamma + 2)
    kind = np.arange(count) // (gamma + 2)
    target = rng.choice([0, 1, last - 1], (count, gamma + 1))
    draft = target[:, :-1].copy()
    rejected = (np.arange(gamma) == at[:, None]) & (kind == 0)[:, None]
    draft[rejected] ^= 1 if dtype == jnp.int32 else 1 << 32  # seen only by those who read all bits
    lengths = np.where(kind == 1, at, rng.choice([gamma, gamma + 7, 2**31 - 1], count))
    lengths = np.where((kind == 1) & (at == gamma + 1), -5, lengths)
    stops = np.full((count, gamma % 41), -1)
    ends = (np.arange(gamma + 1) == at[:, None]) & (kind == 2)[:, None]
    if stops.size:
        target[ends] = last
        draft[ends[:, :-1]] = last
        stops[kind >= 2, -1] = last
    inputs = [x.tolist() for x in (draft, target, lengths.clip(0), stops)]
    expected = [outcome(*row) for row in zip(*inputs, strict=True)]
    assert {e["accepted"] for e in expected} == set(range(gamma + 1))
    with jax.enable_x64(dtype == jnp.int64):
        tokens = [jax.device_put(np.asarray(x, dtype)) for x in (draft, target, stops)]
        got = greedy(backend, *tokens[:2], int32(lengths), tokens[2])
    assert_outcomes(got, expected, dtype)


@over_backends
def test_greedy_under_vmap_and_without_stop_tokens(backend):
    rng = np.random.default_rng(0)
    target = rng.integers(0, 2, (3, 5, 9))
    draft = np.where(rng.random((3, 5, 8)) < 0.8, target[..., :-1], 7)
    arguments = [*map(int32, (draft, target, rng.integers(0, 9, (3, 5)), np.zeros((3, 5, 0))))]
    flat = [x.reshape(15, *x.shape[2:]) for x in arguments]
    expected = greedy(backend, *flat)
    run = functools.partial(verify_greedy, implementation=backend)
    got = jax.device_get(jax.jit(jax.vmap(run))(*arguments))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.reshape(y.shape), y), got, expected)
    # An argument that all members of the vmap share.
    rest = [np.asarray(x)[0] for x in arguments[2:]]
    shared = jax.jit(jax.vmap(lambda *x: run(*x, *rest)))(*arguments[:2])
    np.testing.assert_array_equal(shared.tokens[0], got.tokens[0])


@over_backends
def test_greedy_inside_shard_map(backend):
    """Each of eight devices verifies its own rows, and nothing is gathered."""
    rng = np.random.default_rng(1)
    target = rng.integers(0, 2, (24, 9))
    draft = np.where(rng.random((24, 8)) < 0.8, target[:, :-1], 7)
    arguments = [*map(int32, (draft, target, rng.integers(0, 9, 24), np.full((24, 1), -1)))]
    expected = greedy(backend, *arguments)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("x")
    sharded = jax.jit(
        jax.shard_map(
            lambda *x: verify_greedy(*x, implementation=backend),
            mesh=mesh,
            in_specs=rows,
            out_specs=rows,
        )
    )
    assert "all-gather" not in sharded.lower(*arguments).compile().as_text()
    jax.tree.map(np.testing.assert_array_equal, sharded(*arguments), expected)


@over_backends
@pytest.mark.parametrize(
    ("draft", "target", "length", "stops", "expected"),
    [
        ([5], [5, 6], 1, [-1], (1, 2, False, 6, False, [5, 6])),
        ([5], [4, 6], 1, [-1], (0, 1, True, 4, False, [4, -1])),
        ([5], [5, 6], 0, [-1], (0, 1, False, 5, False, [5, -1])),
        ([1, 2, 3], [9, 2, 3, 4], 3, [-1], (0, 1, True, 9, False, [9, -1, -1, -1])),
        ([1, 2, 3], [1, 2, 3, 4], 3, [-1], (3, 4, False, 4, False, [1, 2, 3, 4])),
        ([1, 2, 3], [1, 2, 3, 4], 3, [1], (1, 1, False, -1, True, [1, -1, -1, -1])),
        ([1, 2, 3], [1, 2, 3, 4], 3, [3], (3, 3, False, -1, True, [1, 2, 3, -1])),
        ([1, 2, 3], [1, 2, 3, 4], 3, [4], (3, 4, False, 4, True, [1, 2, 3, 4])),
        ([1, 2, 3], [1, 7, 3, 4], 3, [7], (1, 2, True, 7, True, [1, 7, -1, -1])),
        ([1, 2, 3], [1, 7, 3, 4], 3, [2, 3], (1, 2, True, 7, False, [1, 7, -1, -1])),
        ([1, 2, -1], [1, 2, 3, 4], 2, [-1], (2, 3, False, 3, False, [1, 2, 3, -1])),
        (
            [0, LAST_ID],
            [0, LAST_ID, LAST_ID],
            2,
            [-1],
            (2, 3, False, LAST_ID, False, [0] + [LAST_ID] * 2),
        ),
        ([0, LAST_ID], [0, LAST_ID, 0], 2, [LAST_ID], (2, 2, False, -1, True, [0, LAST_ID, -1])),
    ],
    ids=[
        "one-accepted",
        "one-rejected",
        "no-draft",
        "all-rejected",
        "all-accepted",
        "stop-first",
        "stop-last-draft",
        "stop-is-bonus",
        "stop-is-correction",
        "stop-was-rejected",
        "padding",
        "largest-id",
        "largest-id-stops",
    ],
)
def test_greedy_edges(draft, target, length, stops, expected, backend):
    got = greedy(backend, int32([draft]), int32([target]), int32([length]), int32([stops]))
    names = [field.name for field in dataclasses.fields(Verified)]
    assert_outcomes(got, [dict(zip(names, expected, strict=True))])


def test_greedy_refuses_a_target_without_the_bonus():
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"needs a target .* got \(2, 3\)"):
        verify_greedy(tokens, tokens, jnp.zeros((2,), jnp.int32), tokens[:, :1])
