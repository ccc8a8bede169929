"""Stochastic verification: where its outcome is certain, and the enumerated law of its block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.dispatch import BackendError
from jspec.ops import stochastic as module
from jspec.ops.sample import Role
from jspec.ops.stochastic import VERIFY_STOCHASTIC, verify_stochastic
from jspec.ops.verify import Verified, verify_greedy
from tests.ops.backends import every_backend
from tests.ops.laws import GREEDY, LAST_NUMBER, SAMPLED, probabilities, sampling_of, to_uint64
from tests.ops.test_verify import assert_outcomes, cut, int32
from tests.ops.toys import (
    Group,
    Toy,
    block_law,
    check_block_law,
    check_forced,
    completed,
    fresh_verify,
    make_toy,
    verify,
)
from tests.parameters import default_run

# --- outcomes that are certain -----------------------------------------------------------------


def random_verification(filtered_rows: list[SamplingParams]):
    rng = np.random.default_rng(0)
    count, gamma, vocabulary = len(filtered_rows), 3, 3
    return {
        "draft_tokens": int32(rng.integers(0, vocabulary, (count, gamma))),
        "target_logits": jnp.asarray(
            2 * rng.standard_normal((count, gamma + 1, vocabulary)), jnp.float32
        ),
        "draft_lengths": int32(rng.integers(0, gamma + 1, count)),
        "stop_tokens": jnp.full((count, 1), -1, jnp.int32),
        "sampling": sampling_of(filtered_rows),
        "positions": int32(rng.integers(0, 100, count)),
    }


@pytest.mark.parametrize("source", ["distribution", "one-hot"])
def test_rows_at_temperature_zero_are_greedy(source):
    args = random_verification([GREEDY] * 500)
    draft_logits = None
    if source == "distribution":
        # A greedy draft takes the largest of its logits.
        draft_logits = 5 * jax.nn.one_hot(args["draft_tokens"], 3)
    got = verify(**args, draft_logits=draft_logits, filtered=False)
    choice = jnp.argmax(args["target_logits"], axis=-1).astype(jnp.int32)
    expected = verify_greedy(
        args["draft_tokens"], choice, args["draft_lengths"], args["stop_tokens"]
    )
    for field in dataclasses.fields(Verified):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(expected, field.name))
    assert {0, 1, 2} <= set(got.accepted.tolist())


def test_a_stop_token_only_cuts_the_block():
    args = random_verification([SAMPLED] * 500)
    free = verify(**args, filtered=False)
    stops = np.random.default_rng(3).integers(-1, 3, (500, 1))
    got = verify(**args | {"stop_tokens": int32(stops)}, filtered=False)
    blocks = [[t for t in block if t >= 0] for block in free.tokens.tolist()]
    inputs = zip(blocks, stops.tolist(), free.mismatch.tolist(), strict=True)
    expected = [cut(b, 4, s, mismatch=m) for b, s, m in inputs]
    assert len({(e["committed"], e["stopped"]) for e in expected}) == 8
    assert_outcomes(got, expected)


def test_what_lies_beyond_the_draft_length_is_ignored():
    args = random_verification([SAMPLED] * 500)
    beyond = np.arange(3) >= np.asarray(args["draft_lengths"])[:, None]
    draft_logits = np.random.default_rng(2).standard_normal((500, 3, 3)).astype(np.float32)
    clean = verify(**args, draft_logits=jnp.asarray(draft_logits), filtered=False)
    after = np.arange(4) > np.asarray(args["draft_lengths"])[:, None]
    junk = {
        "draft_tokens": int32(np.where(beyond, -1, args["draft_tokens"])),
        "target_logits": jnp.asarray(np.where(after[:, :, None], np.nan, args["target_logits"])),
        "draft_logits": jnp.asarray(np.where(beyond[:, :, None], np.nan, draft_logits)),
    }
    poisoned = verify(**args | junk, filtered=False)
    for field in dataclasses.fields(Verified):
        np.testing.assert_array_equal(getattr(poisoned, field.name), getattr(clean, field.name))


@pytest.mark.exhaustive
def test_a_row_does_not_feel_its_neighbours():
    params = [
        SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.5, 1.0, 2.0) for k in (0, 2)
    ] * 4
    args = random_verification(params)
    draft_logits = np.random.default_rng(3).standard_normal((32, 3, 3)).astype(np.float32)
    args["draft_logits"] = draft_logits
    whole = verify(**args)
    # Some rows are left out, and others are there twice.
    order = np.random.default_rng(4).integers(0, 32, 32)
    part = verify(**jax.tree.map(lambda x: np.asarray(x)[order], args))
    np.testing.assert_array_equal(part.tokens, np.asarray(whole.tokens)[order])


FORCED = {
    "mixed": make_toy("mixed", vocabulary=4, gamma=3, seed=0, zeros=0.3),
    "disjoint": make_toy("disjoint", vocabulary=4, gamma=2, seed=1, disjoint=True),
    "one-hot": make_toy("one-hot", vocabulary=5, gamma=2, seed=2, zeros=0.3, one_hot=True),
}


@pytest.mark.parametrize("toy", default_run(FORCED, "mixed"))
def test_the_ends_of_the_numbers_have_certain_outcomes(toy):
    check_forced(toy, 0, LAST_NUMBER)


def test_an_empty_residual_leaves_the_target(monkeypatch):
    """A draft that equals the target and is rejected all the same, as rounding can make it."""
    residual = int(0.6 * 2**64)
    numbers = {Role.ACCEPT: LAST_NUMBER, Role.RESIDUAL: residual, Role.BONUS: 0}
    monkeypatch.setattr(module, "number", lambda s, at, role: to_uint64(numbers[role], at.shape))
    monkeypatch.setattr(
        module, "_accepts", lambda u, p, q, tokens, vocabulary: jnp.zeros(tokens.shape, bool)
    )
    args = random_verification([SAMPLED] * 50) | {"draft_lengths": jnp.full((50,), 3, jnp.int32)}
    got = fresh_verify()(**args, draft_logits=args["target_logits"][:, :3], filtered=False)
    p = probabilities(args["target_logits"], args["sampling"], filtered=False)[:, 0]
    assert not got.accepted.any()
    np.testing.assert_array_equal(got.next_token, (p.cumsum(axis=-1) <= 0.6).sum(axis=-1))


# --- the law ---------------------------------------------------------------------------------

# Toys of one vocabulary and one gamma share their program where they have as many rows.
RAGGED = [Group(SAMPLED, length, 10_000) for length in range(3)]
LONGER = [Group(SAMPLED, length, 10_000) for length in (0, 2, 3)]
MIXED = [
    Group(SAMPLED, 2, 5_000),
    Group(GREEDY, 2, 250),
    Group(SamplingParams(temperature=0.5, top_k=3), 2, 5_000),
    Group(SamplingParams(temperature=2.0, top_p=0.8), 2, 5_000),
    Group(SamplingParams(temperature=1.3, min_p=0.2), 1, 5_000),
    Group(SamplingParams(temperature=0.8, top_k=4, top_p=0.95, min_p=0.05), 2, 5_000),
    Group(GREEDY, 1, 250),
]
LAWS: list[tuple[Toy, list[Group]]] = [
    (make_toy("gamma-1", vocabulary=5, gamma=1, seed=10), [Group(SAMPLED, 1, 30_000)]),
    (make_toy("gamma-2", vocabulary=5, gamma=2, seed=11), [Group(SAMPLED, 2, 30_000)]),
    (make_toy("gamma-3", vocabulary=3, gamma=3, seed=12), [Group(SAMPLED, 3, 30_000)]),
    (make_toy("near-equal", vocabulary=5, gamma=2, seed=13, like=0.97), RAGGED),
    (make_toy("equal", vocabulary=5, gamma=2, seed=14, like=1.0), RAGGED),
    (make_toy("zero-mass", vocabulary=5, gamma=2, seed=15, zeros=0.4), RAGGED),
    (make_toy("disjoint", vocabulary=5, gamma=2, seed=16, disjoint=True), RAGGED),
    (make_toy("empty", vocabulary=5, gamma=2, seed=22, empty=True), RAGGED),
    (make_toy("one-hot", vocabulary=5, gamma=2, seed=17, one_hot=True), RAGGED),
    (make_toy("one-hot-zero", vocabulary=5, gamma=2, seed=18, one_hot=True, zeros=0.4), RAGGED),
    (make_toy("bfloat16", vocabulary=4, gamma=2, seed=19, dtype="bfloat16"), RAGGED),
    (make_toy("block", vocabulary=3, gamma=3, seed=12, rule="block"), LONGER),
    (make_toy("block-zeros", vocabulary=3, gamma=3, seed=15, zeros=0.4, rule="block"), LONGER),
    (make_toy("block-settings", vocabulary=5, gamma=2, seed=20, rule="block"), MIXED),
    (make_toy("settings", vocabulary=5, gamma=2, seed=20), MIXED),
    (make_toy("settings-one-hot", vocabulary=5, gamma=2, seed=21, one_hot=True), MIXED),
]
NAMES = [toy.name for toy, _ in LAWS]
# By the ragged lengths of the others, and by texts of gamma 3 in `tests.decode.test_text_law`.
IMPLIED = ("gamma-1", "gamma-2", "gamma-3")
# Each kind of draft, the most settings at once, and the other rule.
FIRST = ("near-equal", "equal", "zero-mass", "disjoint", "empty", "one-hot", "one-hot-zero")
FIRST += ("settings", "block", "block-zeros")


@pytest.mark.parametrize(("toy", "groups"), LAWS, ids=NAMES)
def test_the_enumerated_law_is_the_target_law(toy, groups):
    """What the tests below compare with is itself lossless: its blocks, continued by the target,
    have the target's own law of gamma + 1 tokens."""
    for group in groups:
        blocks = block_law(toy, group.params, group.length)
        law = completed(toy, group.params, blocks)
        alone = completed(toy, group.params, {(): 1.0})
        assert {k for k, p in law.items() if p > 1e-12} == {
            k for k, p in alone.items() if p > 1e-12
        }
        np.testing.assert_allclose([law[key] for key in alone], list(alone.values()), atol=1e-12)


def by_backend(backend: str, toy: Toy, groups: list[Group]):
    """`verify` by one backend, a skip where it cannot verify the toy."""
    run = functools.partial(verify, implementation=backend)
    args = random_verification([SAMPLED])
    if not toy.one_hot:
        args["draft_logits"] = args["target_logits"][:, 1:]
    filtered = any(group.params.mode == "filtered" for group in groups)
    try:
        jax.eval_shape(functools.partial(run, rule=toy.rule, filtered=filtered), **args)
    except BackendError as refusal:
        pytest.skip(str(refusal))
    return run


@every_backend(VERIFY_STOCHASTIC)
@pytest.mark.parametrize(
    ("toy", "groups"),
    default_run(dict(zip(NAMES, LAWS, strict=True)), *FIRST, slow=IMPLIED),
)
def test_the_committed_block_has_the_ideal_law(toy, groups, backend):
    """Chi-square over all (accepted, tokens) at once; seeds 0, 1, ...; fails below p = 1e-4."""
    check_block_law(toy, groups, verify=by_backend(backend, toy, groups))


@pytest.mark.slow
@every_backend(VERIFY_STOCHASTIC)
@pytest.mark.parametrize(("toy", "groups"), LAWS, ids=NAMES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_committed_block_has_the_ideal_law_in_more_rows(toy, groups, seed, backend):
    groups = [dataclasses.replace(g, rows=40 * g.rows) for g in groups]
    check_block_law(toy, groups, seed=seed, verify=by_backend(backend, toy, groups))


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": (2, 3, 5)}, r"needs a target for \[B, gamma \+ 1\] = \(2, 4\)"),
        ({"draft_logits": (2, 4, 5)}, r"draft_logits \(2, 4, 5\) must be .* \(2, 3, 5\)"),
        ({"draft_lengths": (3,)}, r"draft_lengths \(3,\) .* must be \[B\] and \[B, M\] with B=2"),
        ({"stop_tokens": (2,)}, r"stop_tokens \(2,\) must be \[B\] and \[B, M\]"),
    ],
    ids=["target", "draft-logits", "lengths", "stops"],
)
def test_bad_shapes_are_refused(change, message):
    shapes = {
        "draft_tokens": (2, 3),
        "target_logits": (2, 4, 5),
        "draft_lengths": (2,),
        "stop_tokens": (2, 1),
        "positions": (2,),
        "draft_logits": (2, 3, 5),
    }
    arrays = {
        name: jnp.zeros(shape, jnp.float32 if "logits" in name else jnp.int32)
        for name, shape in (shapes | change).items()
    }
    with pytest.raises(ValueError, match=message):
        verify_stochastic(**arrays, sampling=sampling_of([SAMPLED] * 2))
