"""Block verification: its whole numbers, its law over several steps, and what it accepts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops import block
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.distribution import ONE
from jspec.ops.sample import Role, Sampling
from tests.ops.laws import SAMPLED, check_counts, filtered_law, sampling_of
from tests.ops.toys import block_law, draw, fresh_verify, make_toy, verify


def test_chances_are_rounded_down_once():
    """`min(chance * p / q, 1)` against Python's integers; seed 0."""
    rng = np.random.default_rng(0)
    numbers = [int(2 ** rng.uniform(0, 53)) for _ in range(3000)] + [0, 1, ONE - 1, ONE] * 50
    triples = [rng.permutation(np.array(numbers, np.uint64)) for _ in range(3)]
    with jax.enable_x64(True):
        got = jax.jit(block._chance)(*map(jnp.asarray, triples))
    for chance, p, q, value in zip(*(x.tolist() for x in triples), got.tolist(), strict=True):
        product = chance * p
        assert value == (min(product // q, ONE) if q else ONE if product else 0)


# --- several steps -----------------------------------------------------------------------------

LENGTH, GAMMA, SIZE = 4, 3, 3  # tokens of which the law is taken, draft tokens, vocabulary


@functools.cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits of target and draft after each token, float32 ``[V, V]``; seed 5."""
    rng = np.random.default_rng(5)
    return tuple(1.5 * rng.standard_normal((2, SIZE, SIZE)).astype(np.float32))


def decoded(count: int, verify) -> np.ndarray:
    """The first tokens after token 0 at position 0, ``[count, LENGTH]``, by steps of the block
    rule."""
    target, draft = tables()
    rows = sampling_of([SAMPLED] * count)
    tokens = np.zeros((count, LENGTH + GAMMA + 2), np.int32)
    known, every = np.ones(count, np.int32), np.arange(count)
    while known.min() <= LENGTH:
        drawing, drafted = rows.in_block(jnp.asarray(known)), [tokens[every, known - 1]]
        for t in range(GAMMA):
            logits, at = draft[drafted[-1]][:, None], known[:, None] + np.int32(t)
            drafted.append(np.asarray(draw(logits, drawing, at, Role.DRAFT, filtered=False))[:, 0])
        got = verify(
            np.stack(drafted[1:], 1),
            target[np.stack(drafted, 1)],
            np.full(count, GAMMA, np.int32),
            np.full((count, 1), -1, np.int32),
            rows,
            known,
            draft_logits=draft[np.stack(drafted[:-1], 1)],
            rule="block",
            filtered=False,
        )
        for t, committed in enumerate(np.asarray(got.tokens).T):
            goes_on = (committed >= 0) & (known + t < tokens.shape[1]) & (known <= LENGTH)
            tokens[every[goes_on], known[goes_on] + t] = committed[goes_on]
        known = np.where(known <= LENGTH, known + np.asarray(got.committed), known)
    return tokens[:, 1 : LENGTH + 1]


def check_steps(count: int, verify=verify) -> None:
    target = [filtered_law(logits, SAMPLED) for logits in tables()[0]]
    law = {
        path: float(np.prod([target[a][b] for a, b in itertools.pairwise((0, *path))]))
        for path in itertools.product(range(SIZE), repeat=LENGTH)
    }
    paths, counts = np.unique(decoded(count, verify), axis=0, return_counts=True)
    check_counts(dict(zip(map(tuple, paths.tolist()), counts.tolist(), strict=True)), law)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(vocabulary_module, "TILE", 4)


@pytest.mark.usefixtures("small_tiles")
def test_several_steps_have_the_law_of_the_target():
    """Chi-square over all first tokens of 20,000 requests; seeds 0, 1, ..."""
    check_steps(20_000)


@pytest.mark.usefixtures("small_tiles")
def test_numbers_keyed_by_position_alone_are_caught(monkeypatch):
    """What was rejected says something about the numbers of its positions."""

    def by_position(rows: Sampling, starts: jax.Array) -> Sampling:
        words = jnp.stack([jnp.zeros_like(rows.seeds), rows.seeds], axis=-1)
        return dataclasses.replace(rows, seeds=words)

    monkeypatch.setattr(Sampling, "in_block", by_position)
    with pytest.raises(AssertionError, match="p-value"):
        check_steps(20_000, fresh_verify())


# --- what is accepted ----------------------------------------------------------------------------


def mean_accepted(toy, rule: str) -> float:
    law = block_law(dataclasses.replace(toy, rule=rule), SAMPLED, toy.gamma)
    return sum((len(tokens) - 1) * mass for tokens, mass in law.items())


@pytest.mark.parametrize("like", [0.0, 0.5, 0.9])
def test_it_never_accepts_less_than_the_token_rule(like):
    """Enumerated over random targets and drafts, of gamma 1 to 4; with one token both are one."""
    for seed, gamma in itertools.product(range(3), (1, 2, 4)):
        toy = make_toy("random", vocabulary=3, gamma=gamma, seed=seed, like=like)
        token, whole = (mean_accepted(toy, rule) for rule in ("token", "block"))
        assert whole >= token - 1e-12
        assert gamma > 1 or whole == pytest.approx(token)
        assert gamma == 1 or whole > token + 1e-4
