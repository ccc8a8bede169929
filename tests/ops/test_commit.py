"""Verification with the bookkeeping of a step: against plain Python, by every backend."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.commit import VERIFY_AND_COMMIT, Rows, verify_and_commit
from jspec.ops.verify import verify_greedy
from tests.ops.backends import every_backend, every_case, run_or_skip


def chosen(logits) -> np.ndarray:
    """The first of the largest; NaN counts as minus infinity, plus infinity as the largest."""
    cleaned = np.nan_to_num(logits, nan=-np.inf, posinf=np.finfo(np.float32).max, neginf=-np.inf)
    return np.argmax(cleaned, axis=-1).astype(np.int32)


def by_hand(arguments) -> tuple[np.ndarray, Rows]:
    """What is committed and the rows, by the definition: one row and one token at a time."""
    draft, logits, lengths, stops, limits, tokens, cached, done = map(np.array, arguments)
    target = chosen(logits)
    gamma = draft.shape[1]
    committed = np.full((len(draft), gamma + 3), -1, np.int32)
    for row, (left, limit) in enumerate(zip(lengths.clip(0, gamma), limits, strict=True)):
        accepted = 0
        while accepted < left and draft[row, accepted] == target[row, accepted]:
            accepted += 1
        block = target[row, : accepted + 1].tolist()
        ends = [i for i, token in enumerate(block) if token in stops[row]]
        block = block[: ends[0] + 1] if ends else block
        committed[row, :2] = 0
        if done[row]:
            continue
        committed[row, :2] = min(accepted, len(block)), len(block)
        committed[row, 2 : 2 + len(block)] = block
        for token in block:
            cached[row] += 1
            if cached[row] < tokens.shape[1]:
                tokens[row, cached[row]] = token
        done[row] = bool(ends) or cached[row] + 1 >= limit
    # A row that was done stays done, whatever it has reached.
    return committed, Rows(tokens, cached, done)


def called(*arguments, implementation=None):
    *rest, tokens, cached, done = arguments
    rows = Rows(tokens, cached, done)
    return verify_and_commit(*rest, rows, implementation=implementation)


@every_backend(VERIFY_AND_COMMIT)
@every_case(VERIFY_AND_COMMIT)
def test_equals_the_definition(case, backend):
    arguments = case.arguments
    draft, logits, lengths, stops, *_ = arguments
    verified, *got = run_or_skip(called, VERIFY_AND_COMMIT, backend, *arguments)
    expected = jax.jit(verify_greedy)(draft, chosen(logits), lengths, stops)
    chex.assert_trees_all_equal(verified, expected)
    chex.assert_trees_all_equal(tuple(got), by_hand(arguments))


@every_backend(VERIFY_AND_COMMIT)
@pytest.mark.parametrize("name", ["odd", "no-stops"])
def test_bfloat16_logits_give_what_their_float32_values_give(name, backend):
    case = next(x for x in VERIFY_AND_COMMIT.cases() if x.name == name)
    draft, logits, *rest = case.arguments
    narrow = logits.astype(jnp.bfloat16)
    got = run_or_skip(called, VERIFY_AND_COMMIT, backend, draft, narrow, *rest)
    expected = by_hand((draft, narrow.astype(jnp.float32), *rest))
    chex.assert_trees_all_equal(tuple(got[1:]), expected)


def with_later_tokens(arguments) -> tuple:
    """The arguments with a token in each slot, also in those after the last known one."""
    *rest, tokens, cached, done = arguments
    return *rest, jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape), cached, done


@every_backend(VERIFY_AND_COMMIT)
def test_slots_after_the_block_stay_as_they_are(backend):
    case = next(x for x in VERIFY_AND_COMMIT.cases() if x.name == "odd")
    arguments = with_later_tokens(case.arguments)
    got = run_or_skip(called, VERIFY_AND_COMMIT, backend, *arguments)
    chex.assert_trees_all_equal(got[2], by_hand(arguments)[1])


def test_cases_have_rows_of_every_kind():
    """Rows that are done before, by a stop token, by their limit, and not at all."""
    case = next(x for x in VERIFY_AND_COMMIT.cases() if x.name == "many-rows")
    *_, limits, _, _, before = case.arguments
    committed, rows = by_hand(case.arguments)
    full = rows.cached + 1 >= limits
    kinds = {(bool(b), bool(d), bool(f)) for b, d, f in zip(before, rows.done, full, strict=True)}
    assert kinds >= {(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0)}
    assert set(committed[:, 0]) == set(range(5))


@pytest.mark.parametrize("which", [0, 3, 4, 5, 6, 7])
def test_arrays_of_another_type_are_refused(which):
    case = next(x for x in VERIFY_AND_COMMIT.cases() if x.name == "small")
    arguments = list(case.arguments)
    arguments[which] = arguments[which].astype(jnp.int8)
    with pytest.raises(ValueError, match=r" int8\[2.* must be int32, but for logits"):
        called(*arguments)
