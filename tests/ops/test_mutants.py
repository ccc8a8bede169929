"""Wrong verifications that the checks of `tests.ops.test_verify` must tell from the right one.

Each mutant replaces one internal of `jspec.ops.verify` and faces the check named beside it.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from jspec.ops import verify as module
from jspec.ops.sample import Role
from tests.ops.laws import check_block_law, check_forced, fresh_verify
from tests.ops.test_verify import BELOW_ONE, FORCED, LAWS

RIGHT = {
    name: getattr(module, name)
    for name in ("uniform", "inverse_cdf", "probabilities", "_accepts", "_residual", "_row")
}


def by_law(name: str) -> Callable[[], None]:
    """The chi-square check of one of the toys."""
    toy, groups = next((t, g) for t, g in LAWS if t.name == name)
    return lambda: check_block_law(toy, groups, verify=fresh_verify())


def by_forced(name: str, u) -> Callable[[], None]:
    """The check of certain outcomes."""
    return lambda: check_forced(FORCED[name], u)


def roles(**instead: Role):
    """Random numbers of one role spent on another."""

    def uniform(seeds, positions, role):
        return RIGHT["uniform"](seeds, positions, instead.get(role.name, role))

    return {"uniform": uniform}


def or_equal(u, p, q, tokens):
    p_token = module._of_token(p[:, : tokens.shape[1]], tokens)
    q_token = jnp.ones_like(p_token) if q is None else module._of_token(q, tokens)
    return u * q_token <= p_token


def without_normalising(weights, u):
    """Draws with ``u`` itself instead of ``u`` times the total: the last token gets the rest."""
    size = weights.shape[-1]
    last = size - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    rest = jnp.maximum(1 - weights.sum(axis=-1, keepdims=True), 0)
    weights = weights + jnp.where(jnp.arange(size)[None] == last[:, None], rest, 0)
    return RIGHT["inverse_cdf"](weights, u)


def target_for_residual(p_here, q, tokens, accepted):
    return p_here


def stale_q_accepts(u, p, q, tokens):
    return RIGHT["_accepts"](u, p, jnp.roll(q, 1, axis=1), tokens)


def stale_q_residual(p_here, q, tokens, accepted):
    return RIGHT["_residual"](p_here, jnp.roll(q, 1, axis=1), tokens, accepted)


def late_p_accepts(u, p, q, tokens):
    return RIGHT["_accepts"](u, p[:, 1:], q, tokens)


def row_before(weights, index):
    return RIGHT["_row"](weights, jnp.maximum(index - 1, 0))


def q_at_temperature_one(logits, rows, *, filtered):
    if logits.shape[1] == 2:  # gamma of the toy "settings"; the target has one more
        on = (rows.temperature > 0).astype(jnp.float32)
        rows = dataclasses.replace(rows, temperature=on)
    return RIGHT["probabilities"](logits, rows, filtered=filtered)


def q_without_filters(logits, rows, *, filtered):
    return RIGHT["probabilities"](logits, rows, filtered=filtered and logits.shape[1] == 3)


def one_hot_as_p(u, p, q, tokens):
    return RIGHT["_accepts"](u, p, p[:, : tokens.shape[1]] if q is None else q, tokens)


def rejected_token_stays(p_here, q, tokens, accepted):
    return p_here if q is None else RIGHT["_residual"](p_here, q, tokens, accepted)


def q_forgotten(u, p, q, tokens):
    return RIGHT["_accepts"](u, p, None, tokens)


def lengths_forgotten(stands, lengths):
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1)


MUTANTS: dict[str, tuple[dict, Callable[[], None]]] = {
    "one number for all roles": (
        roles(ACCEPT=Role.DRAFT, RESIDUAL=Role.DRAFT, BONUS=Role.DRAFT),
        by_law("gamma-2"),
    ),
    "accept shares with draft": (roles(ACCEPT=Role.DRAFT), by_law("gamma-1")),
    "residual shares with draft": (roles(RESIDUAL=Role.DRAFT), by_law("gamma-2")),
    "residual shares with accept": (roles(RESIDUAL=Role.ACCEPT), by_law("gamma-2")),
    "<= for <": ({"_accepts": or_equal}, by_forced("mixed", 0.0)),
    "<= for <, disjoint": ({"_accepts": or_equal}, by_forced("disjoint", 0.0)),
    "<= for <, one-hot": ({"_accepts": or_equal}, by_forced("one-hot", 0.0)),
    "residual not normalised": ({"inverse_cdf": without_normalising}, by_law("gamma-2")),
    "residual is the target": ({"_residual": target_for_residual}, by_law("gamma-2")),
    "residual is the target, near-equal": (
        {"_residual": target_for_residual},
        by_law("near-equal"),
    ),
    "residual is the target, forced": (
        {"_residual": target_for_residual},
        by_forced("mixed", BELOW_ONE),
    ),
    "stale q": (
        {"_accepts": stale_q_accepts, "_residual": stale_q_residual},
        by_law("gamma-3"),
    ),
    "stale q in the residual": ({"_residual": stale_q_residual}, by_law("gamma-2")),
    "p one position late": ({"_accepts": late_p_accepts}, by_law("gamma-2")),
    "correction one position early": ({"_row": row_before}, by_law("gamma-2")),
    "temperature not applied to q": ({"probabilities": q_at_temperature_one}, by_law("settings")),
    "filters not applied to q": ({"probabilities": q_without_filters}, by_law("settings")),
    "one-hot q treated as p": ({"_accepts": one_hot_as_p}, by_law("one-hot")),
    "one-hot residual keeps the rejected": ({"_residual": rejected_token_stays}, by_law("one-hot")),
    "accepted by p alone": ({"_accepts": q_forgotten}, by_law("gamma-1")),
    "draft lengths forgotten": ({"_leading": lengths_forgotten}, by_law("bfloat16")),
}


CAUGHT = "p-value|impossible|seldom|draft"


@pytest.mark.parametrize(("patches", "check"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(patches, check, monkeypatch):
    for name, mutant in patches.items():
        monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError, match=CAUGHT):
        check()


def test_a_draft_that_was_not_drawn_from_its_logits_is_caught(monkeypatch):
    """The check itself: were it blind to this, it would not see what the draft is drawn from."""

    def another_q(logits, rows, *, filtered):
        if logits.shape[1] == 1:
            logits = logits + 0.2 * jnp.arange(5.0)[None, None]
        return RIGHT["probabilities"](logits, rows, filtered=filtered)

    monkeypatch.setattr(module, "probabilities", another_q)
    with pytest.raises(AssertionError, match=CAUGHT):
        by_law("gamma-1")()
