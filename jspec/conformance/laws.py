"""The laws, each a problem whose outcome is enumerated, and what a failure of each says."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from jspec.conformance.statistics import binomial_test, g_test
from jspec.conformance.verifier import Floats, Integers, Verifier

ALARM = 1e-9  # a right verifier shows a smaller p-value once in a thousand million laws
START = 5  # position of a request's first block
SALT = 0x5EED_0F_1A75  # or a verifier's own ``default_rng(0)`` draws the suite's numbers
Doubles = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one law: the p-value over ``rows`` requests, and the seconds it took."""

    law: str
    p_value: float
    rows: int
    seconds: float

    @property
    def holds(self) -> bool:
        return self.p_value >= ALARM


@dataclasses.dataclass(frozen=True)
class Problem:
    """A sampling problem whose logits depend on the position alone.

    Attributes:
        target: target logits float32 ``[T, V]``.
        draft: draft logits float32 ``[T, V]``.
        gamma: draft tokens of a block.
        length: tokens whose joint distribution is tested.
        temperature: of target and draft.
        top_p: of target and draft.
        steps: whether further blocks follow until ``length`` tokens are known. Otherwise one block
            is completed by draws from the target distribution.
    """

    target: Floats
    draft: Floats
    gamma: int
    length: int
    temperature: float = 1.0
    top_p: float = 1.0
    steps: bool = False


def problem(
    *,
    seed: int,
    vocabulary: int,
    gamma: int,
    spread: float = 1.2,
    offset: float = 0.0,
    length: int = 0,
    **settings,
) -> Problem:
    """Random logits around ``offset``; around 0 multiples of 1/8, which are exact in bfloat16."""
    rng = np.random.default_rng(seed)
    length = length or gamma + 1
    logits = spread * rng.standard_normal((2, length + gamma + 1, vocabulary)) + offset
    logits = (logits if offset else np.round(logits * 8) / 8).astype(np.float32)
    return Problem(*logits, gamma=gamma, length=length, **settings)


def law_of(logits: Floats, temperature: float, top_p: float) -> Doubles:
    """Temperature, then top-p with its threshold's ties kept, of ``logits [T, V]``."""
    scaled = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    weights = np.exp((scaled - scaled.max(axis=-1, keepdims=True)) / temperature)
    law = weights / weights.sum(axis=-1, keepdims=True)
    if top_p < 1:
        falling = -np.sort(-law, axis=-1)
        last = (np.cumsum(falling, axis=-1) < top_p).sum(axis=-1, keepdims=True)
        law = np.where(law >= np.take_along_axis(falling, last, axis=-1), law, 0)
        law /= law.sum(axis=-1, keepdims=True)
    return law


def decoded(
    problem: Problem, verifier: Verifier, rows: int, seed: int
) -> tuple[Integers, Integers]:
    """The first tokens of each request ``[rows, length]``, and how many its first block had."""
    every = np.arange(rows)
    tokens = np.full((rows, problem.length + problem.gamma + 1), -1)
    known, first = np.zeros(rows, np.int64), None
    seeds = (seed * rows + every).astype(np.uint32)
    while first is None or (problem.steps and known.min() < problem.length):
        # Rows that are done run again at the end, so that all calls have one shape.
        start = np.minimum(known, problem.length)
        at = start[:, None] + np.arange(problem.gamma + 1)
        block = verifier(
            problem.draft[at[:, :-1]],
            problem.target[at],
            temperature=problem.temperature,
            top_p=problem.top_p,
            seeds=seeds,
            positions=(START + start).astype(np.int32),
        )
        block = _checked(np.asarray(block), problem, rows)
        counts = (block >= 0).sum(axis=1)
        first = counts if first is None else first
        for i in range(problem.gamma + 1):
            goes_on = (block[:, i] >= 0) & (known < problem.length)
            tokens[every[goes_on], known[goes_on] + i] = block[goes_on, i]
        known = np.where(known < problem.length, known + counts, known)
    law = law_of(problem.target, problem.temperature, problem.top_p)
    rng = np.random.default_rng([SALT, seed])
    for i in range(problem.length):
        drawn = rng.choice(law.shape[-1], rows, p=law[i])
        tokens[:, i] = np.where(i < known, tokens[:, i], drawn)
    return tokens[:, : problem.length], first


def _checked(block: Integers, problem: Problem, rows: int) -> Integers:
    """Check the output of a verifier; raises `ValueError` where it is no valid block."""
    shape, size = (rows, problem.gamma + 1), problem.target.shape[-1]
    if block.shape != shape or not np.issubdtype(block.dtype, np.integer):
        raise ValueError(f"the verifier gave {block.dtype}{block.shape}, not integers {shape}")
    inside = (block >= -1) & (block < size)
    ended = np.minimum.accumulate(block >= 0, axis=1) == (block >= 0)
    if not (inside & ended).all() or (block[:, 0] < 0).any():
        raise ValueError(
            f"each row of the verifier's must be 1 to {problem.gamma + 1} ids below {size}, then -1"
        )
    return block


def joint(problem: Problem, verifier: Verifier, rows: int, seed: int) -> tuple[Integers, Doubles]:
    """The outcome of each request, and the probability of each outcome.

    An outcome is all of the first ``problem.length`` tokens, as one number.
    """
    tokens, _ = decoded(problem, verifier, rows, seed)
    law = law_of(problem.target[: problem.length], problem.temperature, problem.top_p)
    whole = functools.reduce(np.multiply.outer, law)
    place = whole.shape[0] ** np.arange(problem.length)[::-1]
    return tokens @ place, whole.ravel()


def accepted(
    problem: Problem, verifier: Verifier, rows: int, seed: int
) -> tuple[Integers, Doubles]:
    """The outcome of each request, and the probability of each outcome.

    An outcome is the draft token where it is accepted, with probability min(p, q), or one more for
    a rejection.
    """
    tokens, counts = decoded(problem, verifier, rows, seed)
    settings = problem.temperature, problem.top_p
    p, q = (law_of(logits[:1], *settings)[0] for logits in (problem.target, problem.draft))
    law = np.append(np.minimum(p, q), 1 - np.minimum(p, q).sum())
    return np.where(counts == 2, tokens[:, 0], p.size), law


@dataclasses.dataclass(frozen=True)
class Law:
    """``outcomes`` of a problem, compared with their law."""

    problem: Problem
    outcomes: Callable[[Problem, Verifier, int, int], tuple[Integers, Doubles]] = joint

    def p_value(self, verifier: Verifier, rows: int, seed: int) -> float:
        outcomes, law = self.outcomes(self.problem, verifier, rows, seed)
        return g_test(np.bincount(outcomes, minlength=law.size), law)


TAIL = 2**17  # tokens: all but the last have the probability 0.8 x 2^-24
TAIL_ROWS = 8192
AT_ONCE = 128


class Tail:
    """How often tokens are drawn that random numbers of 23 bits cannot reach, of 8,192 draws."""

    def p_value(self, verifier: Verifier, rows: int, seed: int) -> float:
        share = 0.8 * 2.0**-24
        logits = np.full(TAIL, np.log(share / (1 - share * (TAIL - 1))), np.float32)
        logits[-1] = 0
        law = law_of(logits[None], 1.0, 1.0)[0]
        unreached = np.diff(np.ceil(np.cumsum(law) * 2**23), prepend=0) == 0
        target = np.broadcast_to(logits, (AT_ONCE, 1, TAIL))
        drawn = []
        for begin in range(0, TAIL_ROWS, AT_ONCE):
            seeds = (seed * TAIL_ROWS + begin + np.arange(AT_ONCE)).astype(np.uint32)
            block = verifier(
                target[:, :0],
                target,
                temperature=1.0,
                top_p=1.0,
                seeds=seeds,
                positions=np.full(AT_ONCE, START, np.int32),
            )
            drawn.append(np.asarray(block)[:, 0])
        drawn = np.concatenate(drawn)
        sets = (unreached, np.arange(TAIL) < TAIL - 1)
        return min(binomial_test(int(s[drawn].sum()), TAIL_ROWS, float(law[s].sum())) for s in sets)


ONE = problem(seed=1, vocabulary=4, gamma=1)
# Two tokens, of which the draft proposes one a little too often: an acceptance that is 2 % too high
# changes its share, 0.97, by 0.018, which 10,000 requests show below `ALARM`.
NEARLY = Problem(
    *(np.tile(np.array([logit, 0], np.float32), (4, 1)) for logit in (3.5, 4.5)), gamma=1, length=2
)
ROWS = 200_000
LAWS: dict[str, Law | Tail] = {
    "greedy": Law(problem(seed=7, vocabulary=5, gamma=2, temperature=0.0)),
    "one draft token": Law(ONE),
    "accepted tokens": Law(ONE, accepted),
    "acceptance": Law(NEARLY),
    "top-p": Law(dataclasses.replace(ONE, temperature=1.3, top_p=0.7)),
    "rounding": Law(problem(seed=10, vocabulary=6, gamma=1, offset=100.0)),
    "block": Law(problem(seed=10, vocabulary=3, gamma=3, spread=3.0)),
    "steps": Law(problem(seed=17, vocabulary=3, gamma=3, length=5, steps=True)),
    "tail": Tail(),
}


# What the first law that fails says, in this order.
FAULTS = {
    "greedy": "greedy rows do not commit the target's largest logits",
    "accepted tokens": "what is accepted depends on how the draft was drawn: shared random numbers",
    "one draft token": "a wrong residual after a rejected token",
    "acceptance": "the chance of acceptance is not min(1, p/q), by a small factor",
    "top-p": "top-p is applied to one of draft and target alone",
    "rounding": "the draft was drawn from another law than the one that it is judged by: rounding",
    "block": "a wrong residual after several draft tokens, or positions mixed up",
    "steps": "random numbers of rejected positions are used again",
    "tail": "random numbers of too few bits",
}


def with_needed(laws: tuple[str, ...]) -> tuple[str, ...]:
    """``laws``, with "one draft token" before "accepted tokens", which depends on it."""
    if "accepted tokens" not in laws or "one draft token" in laws:
        return laws
    return "one draft token", *laws


def check(
    verifier: Verifier, laws: tuple[str, ...] = tuple(LAWS), *, rows: int = ROWS, seed: int = 0
) -> Iterator[Finding]:
    """Test a verifier.

    Args:
        verifier: the verifier.
        laws: names of `LAWS`; "accepted tokens" also runs "one draft token".
        rows: requests of each law.
        seed: seeds the requests.

    Yields:
        The finding of each law.
    """
    for name in with_needed(laws):
        begin = time.perf_counter()
        p_value = LAWS[name].p_value(verifier, rows, seed)
        count = TAIL_ROWS if name == "tail" else rows
        yield Finding(name, p_value, count, time.perf_counter() - begin)


def accepts_less(findings: Sequence[Finding]) -> bool:
    """Whether a verifier with the right distribution accepts fewer tokens than it could."""
    holds = {finding.law: finding.holds for finding in findings}
    return holds.get("one draft token", False) and not holds.get("accepted tokens", True)


def diagnosis(findings: Sequence[Finding]) -> str | None:
    """Describe the most likely fault of a verifier from its findings; None if all laws hold."""
    failed = {finding.law for finding in findings if not finding.holds}
    if accepts_less(findings):
        failed.discard("accepted tokens")  # no fault of the law
    return next((fault for law, fault in FAULTS.items() if law in failed), None)
