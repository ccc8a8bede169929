"""Wrong verifications that the checks of `tests.ops.test_block_law` must tell from the right one.

Each mutant replaces one internal of `jspec.ops.stochastic` and faces the check named in its entry.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops import stochastic as module
from jspec.ops.distribution import ONE, total
from jspec.ops.sample import Role
from jspec.ops.vocabulary import NO_TOKEN
from tests.ops.laws import LAST_NUMBER
from tests.ops.test_block_law import FORCED, LAWS
from tests.ops.toys import check_block_law, check_forced, fresh_verify
from tests.parameters import default_run

RIGHT = {
    name: getattr(module, name)
    for name in ("number", "draw", "distribution", "_accepts", "_residual", "_row")
}


def check_mutant(name: str, verify) -> None:
    """The chi-square check of one of the toys."""
    toy, groups = next((t, g) for t, g in LAWS if t.name == name)
    check_block_law(toy, groups, verify=verify)


def by_law(name: str) -> Callable[[], None]:
    return lambda: check_mutant(name, fresh_verify())


def by_forced(name: str, number: int) -> Callable[[], None]:
    """The check of certain outcomes."""
    return lambda: check_forced(FORCED[name], number)


def roles(**instead: Role):
    """Random numbers of one role spent on another."""

    def number(seeds, positions, role):
        return RIGHT["number"](seeds, positions, instead.get(role.name, role))

    return {"number": number}


def or_equal(u, p, q, tokens, vocabulary):
    # At u = 0 alone can u * q <= p differ from u * q < p where p = 0.
    return RIGHT["_accepts"](u, p, q, tokens, vocabulary) | (u == 0)


def without_normalising(weights, shift, number, vocabulary):
    """Draws from a residual with ``u`` itself instead of ``u`` times its total: the last token gets
    the rest."""
    ids = vocabulary.ids_like(weights)
    possible = jnp.where((weights > 0) & (ids < NO_TOKEN), ids, -1)
    is_last = ids == possible.max(axis=(-2, -1), keepdims=True)
    mass = total(weights, shift, vocabulary)
    rest = (ONE - jnp.minimum(mass, ONE))[..., None]
    is_residual = (shift == 0).all(axis=-1)[..., None, None]
    whole = weights + jnp.where(is_residual & is_last, rest, 0)
    return RIGHT["draw"](whole, shift, number, vocabulary)


def target_for_residual(p_next, q, tokens, accepted, vocabulary):
    return p_next


def stale(q):
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), q)


def stale_q_accepts(u, p, q, tokens, vocabulary):
    return RIGHT["_accepts"](u, p, stale(q), tokens, vocabulary)


def stale_q_residual(p_next, q, tokens, accepted, vocabulary):
    return RIGHT["_residual"](p_next, stale(q), tokens, accepted, vocabulary)


def late_p_accepts(u, p, q, tokens, vocabulary):
    return RIGHT["_accepts"](u, jax.tree.map(lambda x: x[:, 1:], p), q, tokens, vocabulary)


def row_before(rows, index):
    return RIGHT["_row"](rows, jnp.maximum(index - 1, 0))


def q_at_temperature_one(logits, settings, vocabulary, *, filtered):
    if logits.shape[1] == 2:  # gamma of the toy "settings"; the target has one more
        one = jnp.float32(np.log2(np.e))
        settings = settings._replace(rate=jnp.where(settings.rate > 0, one, 0))
    return RIGHT["distribution"](logits, settings, vocabulary, filtered=filtered)


def q_without_filters(logits, settings, vocabulary, *, filtered):
    filtered = filtered and logits.shape[1] == 3
    return RIGHT["distribution"](logits, settings, vocabulary, filtered=filtered)


def one_hot_as_p(u, p, q, tokens, vocabulary):
    q = jax.tree.map(lambda x: x[:, : tokens.shape[1]], p) if q is None else q
    return RIGHT["_accepts"](u, p, q, tokens, vocabulary)


def rejected_token_stays(p_next, q, tokens, accepted, vocabulary):
    return p_next if q is None else RIGHT["_residual"](p_next, q, tokens, accepted, vocabulary)


def q_forgotten(u, p, q, tokens, vocabulary):
    return RIGHT["_accepts"](u, p, None, tokens, vocabulary)


def lengths_forgotten(accepts, lengths):
    return jnp.cumprod(accepts.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def empty_without_mass(logits, settings, vocabulary, *, filtered):
    """As 0.1.0: a row without a finite logit has no mass, and q of its token is 0."""
    rows = RIGHT["distribution"](logits, settings, vocabulary, filtered=filtered)
    some = jnp.isfinite(logits).any(axis=-1)[..., None, None]
    return rows._replace(weights=jnp.where(some, rows.weights, 0))


MUTANTS: dict[str, tuple[dict, Callable[[], None]]] = {
    "one number for all roles": (
        roles(ACCEPT=Role.DRAFT, RESIDUAL=Role.DRAFT, BONUS=Role.DRAFT),
        by_law("gamma-2"),
    ),
    "accept shares with draft": (roles(ACCEPT=Role.DRAFT), by_law("gamma-1")),
    "residual shares with draft": (roles(RESIDUAL=Role.DRAFT), by_law("gamma-2")),
    "residual shares with accept": (roles(RESIDUAL=Role.ACCEPT), by_law("gamma-2")),
    "<= for <": ({"_accepts": or_equal}, by_forced("mixed", 0)),
    "<= for <, disjoint": ({"_accepts": or_equal}, by_forced("disjoint", 0)),
    "<= for <, one-hot": ({"_accepts": or_equal}, by_forced("one-hot", 0)),
    "residual not normalised": ({"draw": without_normalising}, by_law("gamma-2")),
    "residual is the target, near-equal": (
        {"_residual": target_for_residual},
        by_law("near-equal"),
    ),
    "residual is the target, forced": (
        {"_residual": target_for_residual},
        by_forced("mixed", LAST_NUMBER),
    ),
    "stale q": (
        {"_accepts": stale_q_accepts, "_residual": stale_q_residual},
        by_law("gamma-3"),
    ),
    "stale q in the residual": ({"_residual": stale_q_residual}, by_law("gamma-2")),
    "p one position late": ({"_accepts": late_p_accepts}, by_law("gamma-2")),
    "correction one position early": ({"_row": row_before}, by_law("gamma-2")),
    "temperature not applied to q": ({"distribution": q_at_temperature_one}, by_law("settings")),
    "filters not applied to q": ({"distribution": q_without_filters}, by_law("settings")),
    "empty rows without mass": ({"distribution": empty_without_mass}, by_law("empty")),
    "one-hot q treated as p": ({"_accepts": one_hot_as_p}, by_law("one-hot")),
    "one-hot residual keeps the rejected": ({"_residual": rejected_token_stays}, by_law("one-hot")),
    "accepted by p alone": ({"_accepts": q_forgotten}, by_law("gamma-1")),
    "draft lengths forgotten": ({"leading": lengths_forgotten}, by_law("bfloat16")),
}


BLOCK = {name: getattr(module.block, name) for name in ("_masses", "residual", "_chance")}


def residual_of_the_token_rule(p_next, q_next, chance):
    return BLOCK["residual"](p_next, q_next, jnp.full_like(chance, ONE))


def masses_of_the_token_rule(chance, p, q, vocabulary):
    return BLOCK["_masses"](jnp.full_like(chance, ONE), p, q, vocabulary)


def chance_beyond_one(chance, p, q):
    """A chance that is forgotten: each token counts by itself."""
    return BLOCK["_chance"](jnp.full_like(chance, ONE), p, q)


MUTANTS_OF_BLOCK = {
    "residual of the token rule": ("residual", residual_of_the_token_rule),
    "masses of the token rule": ("_masses", masses_of_the_token_rule),
    "chances of single tokens": ("_chance", chance_beyond_one),
}


CAUGHT = "p-value|impossible|seldom|draft"


FIRST = "accept shares with draft"
# The others show each check by one.
REPEATED = (
    "one number for all roles",
    "residual shares with draft",
    "residual shares with accept",
    "<= for <, disjoint",
    "<= for <, one-hot",
    "residual is the target, near-equal",
    "residual is the target, forced",
    "stale q",
    "p one position late",
    "correction one position early",
    "temperature not applied to q",
    "one-hot q treated as p",
    "masses of the token rule",
    "chances of single tokens",
)


def marked(mutants: dict[str, tuple]) -> list:
    return default_run(
        mutants,
        *({FIRST} & mutants.keys()),
        slow=[name for name in REPEATED if name in mutants],
    )


@pytest.mark.parametrize(("patches", "check"), marked(MUTANTS))
def test_a_mutant_is_caught(patches, check, monkeypatch):
    for name, mutant in patches.items():
        monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError, match=CAUGHT):
        check()


@pytest.mark.parametrize(("name", "mutant"), marked(MUTANTS_OF_BLOCK))
def test_a_mutant_of_the_block_rule_is_caught(name, mutant, monkeypatch):
    monkeypatch.setattr(module.block, name, mutant)
    with pytest.raises(AssertionError, match=CAUGHT):
        by_law("block")()


@pytest.mark.exhaustive
def test_a_draft_that_was_not_drawn_from_its_logits_is_caught(monkeypatch):
    """The check itself: were it blind to this, it would not see what the draft is drawn from."""

    def another_q(logits, settings, vocabulary, *, filtered):
        if logits.shape[1] == 1:
            logits = logits + 0.2 * jnp.arange(5, dtype=jnp.float32)[None, None]
        return RIGHT["distribution"](logits, settings, vocabulary, filtered=filtered)

    monkeypatch.setattr(module, "distribution", another_q)
    with pytest.raises(AssertionError, match=CAUGHT):
        by_law("gamma-1")()
