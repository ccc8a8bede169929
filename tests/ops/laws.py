"""Laws written from their definitions in float64 numpy, and the checks against them.

The checks are plain functions, so that the mutants in `tests.ops.test_mutants` face exactly what
the library faces. Every seed is fixed; a check fails below ``P_VALUE``, which a correct program
does once in 10,000 checks, and then always, since nothing here is drawn anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jspec.cuda_ffi.stochastic  # noqa: F401 - it takes TILE, which `run_blocks` patches
from jspec.config import SamplingParams
from jspec.ops import stochastic as stochastic_module
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.distribution import ONE, distribution
from jspec.ops.law import law, rate_of
from jspec.ops.sample import Role, Sampling, greedy, sample, settings_of
from jspec.ops.stochastic import Rule, verify_stochastic
from jspec.ops.uint64 import in_64_bits
from jspec.ops.vocabulary import Vocabulary

P_VALUE = 1e-4
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0)
LAST_NUMBER = 2**64 - 1


def sampling_of(params: list[SamplingParams], seeds=None) -> Sampling:
    """The `Sampling` of ``params``, one each, with ``seeds`` 0, 1, ... unless given."""
    seeds = np.arange(len(params)) if seeds is None else seeds

    def column(name, dtype):
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

    return Sampling(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        jnp.asarray(seeds, jnp.uint32),
    )


@functools.partial(jax.jit, static_argnames="filtered")
def _probabilities(logits, rows: Sampling, *, filtered: bool) -> jax.Array:
    vocabulary = Vocabulary(logits.shape[-1])
    return distribution(logits, settings_of(rows), vocabulary, filtered=filtered).probabilities()


def probabilities(logits, rows: Sampling, *, filtered: bool) -> np.ndarray:
    """What each row samples from, float64 ``[B, T, V]``, of ``logits [B, T, V]``."""
    size = logits.shape[-1]
    whole = np.asarray(_probabilities(logits, rows, filtered=filtered))
    return whole.reshape(*logits.shape[:2], -1)[..., :size] / ONE


@in_64_bits
def to_uint64(x, shape: tuple[int, ...] = ()) -> jax.Array:
    """Integers below 2**64, those of one value in the shape given."""
    x = np.broadcast_to(np.asarray(x, np.uint64), np.shape(x) or shape)
    return jnp.asarray(x)


def filtered_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law of one token, ``[V]`` to ``[V]``: temperature, top-k, top-p, min-p, ties kept."""
    logits = np.asarray(logits, np.float64)
    if params.temperature == 0:
        return np.eye(logits.size)[np.nan_to_num(logits, nan=-np.inf, posinf=np.inf).argmax()]
    scaled = logits * np.float64(rate_of(params.temperature)) * np.log(2)
    keep = np.isfinite(scaled)
    if not keep.any():
        return np.eye(1, logits.size)[0]
    if params.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(params.top_k, scaled.size) - 1]
    law = _softmax(scaled, keep)
    if params.top_p < 1:
        descending = np.sort(law)[::-1]
        count = np.argmax(np.cumsum(descending) >= params.top_p * (1 - 1e-9))
        keep &= law >= descending[count]
        law = _softmax(scaled, keep)
    if params.min_p > 0:
        keep &= law >= params.min_p * law.max() * (1 - 1e-9)
    return _softmax(scaled, keep)


def _softmax(scaled: np.ndarray, keep: np.ndarray) -> np.ndarray:
    weights = np.where(keep, np.exp(scaled - scaled[keep].max()), 0)
    return weights / weights.sum()


def check_counts(observed: dict, law: dict) -> None:
    """Chi-square of counts against probabilities that sum to 1; outcomes seldom expected share a
    cell, and an outcome of probability 0 must not occur at all."""
    total = sum(observed.values())
    np.testing.assert_allclose(sum(law.values()), 1, rtol=1e-9)
    impossible = {key: n for key, n in observed.items() if law.get(key, 0) == 0}
    assert not impossible, f"impossible outcomes were seen: {impossible}"
    common = [key for key, p in law.items() if p * total >= 10]
    got = np.array([observed.get(key, 0) for key in common], float)
    wanted = np.array([law[key] for key in common]) * total
    seldom, rest = total - got.sum(), total - wanted.sum()
    if rest >= 10:
        got, wanted = np.append(got, seldom), np.append(wanted, rest)
    elif seldom:
        assert stats.poisson.sf(seldom - 1, rest) > P_VALUE, f"{seldom} seldom outcomes"
    if len(wanted) > 1:
        statistic = ((got - wanted) ** 2 / wanted).sum()
        p = stats.chi2.sf(statistic, len(wanted) - 1)
        assert p > P_VALUE, f"p-value {p:.1e} over {len(wanted)} outcomes of {total} draws"


def gaussian_logits(vocabulary: int, spread: float = 3.0) -> np.ndarray:
    """Float32 ``[V]``, seed 0."""
    return (spread * np.random.default_rng(0).standard_normal(vocabulary)).astype(np.float32)


@functools.cache
def unreachable() -> tuple[np.ndarray, np.ndarray]:
    """Where each token ends, in 0..1, and which no number of 24 bits can draw: V = 128256."""
    ends = np.cumsum(law(gaussian_logits(128256), SAMPLED))
    return ends, np.diff(np.floor(ends * 2**24), prepend=-1) == 0


def check_tail(numbers: np.ndarray) -> None:
    """Numbers uint64 draw tokens that take more than 24 bits as often as they should."""
    ends, tail = unreachable()
    tokens = np.searchsorted(ends, numbers / 2.0**64, side="right")
    share = np.diff(ends, prepend=0)[tail].sum()
    p = stats.binomtest(int(tail[tokens].sum()), numbers.size, share).pvalue
    assert p > P_VALUE, f"p-value {p:.1e} of the tail's share {share:.1e}"


@dataclasses.dataclass(frozen=True)
class Toy:
    """A target and a draft as tables: ``target[t]``, ``draft[t]`` float32 ``[V] * t + [V]`` hold
    the logits of token t after each prefix of t tokens. A ``one_hot`` draft takes its largest logit
    and says that it was certain. ``rule``: by which the draft is verified."""

    name: str
    target: tuple[np.ndarray, ...]
    draft: tuple[np.ndarray, ...]
    one_hot: bool = False
    dtype: str = "float32"
    rule: Rule = "token"

    @property
    def gamma(self) -> int:
        return len(self.draft)

    @property
    def vocabulary(self) -> int:
        return self.target[0].size

    def draft_law(self, prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
        logits = self.draft[len(prefix)][prefix]
        return filtered_law(logits, GREEDY if self.one_hot else params)

    def target_law(self, prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
        return filtered_law(self.target[len(prefix)][prefix], params)


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of one batch that share settings and a draft length."""

    params: SamplingParams
    length: int
    rows: int


def make_toy(
    name: str,
    *,
    vocabulary: int,
    gamma: int,
    seed: int,
    spread: float = 1.5,
    like: float = 0.0,
    zeros: float = 0.0,
    disjoint: bool = False,
    empty: bool = False,
    one_hot: bool = False,
    dtype: str = "float32",
    rule: Rule = "token",
) -> Toy:
    """Random tables. ``like`` in [0, 1] mixes the target into the draft, ``zeros`` is the share of
    logits at -inf in both, ``disjoint`` leaves target and draft no token in common, ``empty``
    leaves the draft's first position, and the target's last one behind token 1, no finite
    logit."""
    rng = np.random.default_rng(seed)

    def table(t: int) -> np.ndarray:
        drawn = spread * rng.standard_normal([vocabulary] * (t + 1)).astype(np.float32)
        # Multiples of 1/8 are exact in bfloat16, and so make ties.
        return np.round(drawn * 8) / 8

    target = [table(t) for t in range(gamma + 1)]
    draft = [like * target[t] + (1 - like) * table(t) for t in range(gamma)]

    def with_holes(x: np.ndarray) -> np.ndarray:
        holes = rng.random(x.shape) < zeros
        holes[..., rng.integers(vocabulary)] = False
        return np.where(holes, -np.inf, x)

    target, draft = [with_holes(x) for x in target], [with_holes(x) for x in draft]
    if disjoint:
        odd = np.arange(vocabulary) % 2 == 1
        target = [np.where(odd, -np.inf, x) for x in target]
        draft = [np.where(odd, x, -np.inf) for x in draft]
    if empty:
        draft[0] = np.where(np.arange(vocabulary) % 2 == 1, -np.inf, np.nan)
        target[-1][..., 1, :] = np.nan
    draft = [x.astype(jnp.dtype(dtype)).astype(np.float32) for x in draft]
    return Toy(
        name,
        tuple(x.astype(np.float32) for x in target),
        tuple(draft),
        one_hot=one_hot,
        dtype=dtype,
        rule=rule,
    )


def block_law(toy: Toy, params: SamplingParams, length: int) -> dict[tuple, float]:
    """The law of the committed block under ideal rejection sampling, enumerated.

    A draft token d is accepted with probability min(1, p(d) / q(d)) and was drawn with q(d):
    together min(p(d), q(d)). The first that is rejected is replaced by r with probability, drawn
    and rejected and redrawn together, of max(p(r) - q(r), 0); the bonus token follows p.
    """
    if toy.rule == "block" and not toy.one_hot:
        return law_of_the_paper(toy, params, length)
    law: dict[tuple, float] = {}

    def walk(prefix: tuple[int, ...], mass: float) -> None:
        p = toy.target_law(prefix, params)
        if len(prefix) == length:
            ends = p
        else:
            q = toy.draft_law(prefix, params)
            ends = np.maximum(p - q, 0)
            for token in np.flatnonzero(np.minimum(p, q)):
                walk((*prefix, int(token)), mass * np.minimum(p, q)[token])
        for token in np.flatnonzero(ends):
            law[(*prefix, int(token))] = law.get((*prefix, int(token)), 0.0) + mass * ends[token]

    # A block says how much of it was accepted: all of it but its last token.
    walk((), 1.0)
    return law


def law_of_the_paper(toy: Toy, params: SamplingParams, length: int) -> dict[tuple, float]:
    """Block verification as Sun et al. write it (arXiv 2403.10444, algorithm 2), draft by draft."""
    law: dict[tuple, float] = {}
    for draft in itertools.product(range(toy.vocabulary), repeat=length):
        prefixes = [draft[:i] for i in range(length + 1)]
        p = [toy.target_law(prefix, params) for prefix in prefixes]
        q = [toy.draft_law(prefix, params) for prefix in prefixes[:length]]
        drawn = np.prod([q[i][draft[i]] for i in range(length)])
        if drawn == 0:
            continue
        chance = [1.0]
        for i, token in enumerate(draft):
            chance.append(min(chance[-1] * p[i][token] / q[i][token], 1.0))
        # From the longest on: none longer was accepted.
        left = drawn
        for i in range(length, -1, -1):
            if i == length:
                share, ends = chance[i], p[i]
            else:
                over = np.maximum(chance[i] * p[i] - q[i], 0)
                mass = over.sum() + 1 - chance[i]
                share = over.sum() / mass if mass > 1e-12 else 1.0
                ends = over / over.sum() if over.sum() > 1e-12 else p[i]
            for token in np.flatnonzero(ends):
                block = (*prefixes[i], int(token))
                law[block] = law.get(block, 0.0) + left * share * ends[token]
            left *= 1 - share
    return {block: mass for block, mass in law.items() if mass > 0}


def completed(toy: Toy, params: SamplingParams, law: dict[tuple, float]) -> dict[tuple, float]:
    """The law of gamma + 1 tokens: blocks of ``law``, continued by the target itself."""
    full: dict[tuple, float] = {}

    def extend(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == toy.gamma + 1:
            full[prefix] = full.get(prefix, 0.0) + mass
            return
        p = toy.target_law(prefix, params)
        for token in np.flatnonzero(p):
            extend((*prefix, int(token)), mass * p[token])

    for block, mass in law.items():
        extend(block, mass)
    return full


# Tiles of 4 save memory, and a vocabulary of 5 has two of them; kernels have tiles of their own.
draw = jax.jit(
    functools.partial(sample, implementation="xla"), static_argnames=("role", "filtered")
)
verify = jax.jit(
    functools.partial(verify_stochastic, implementation="xla"),
    static_argnames=("rule", "filtered", "implementation"),
)


def fresh_verify(implementation: str = "xla"):
    """`verify` by one backend, traced anew, so that it sees a patched internal."""
    return jax.jit(
        lambda *args, **settings: verify_stochastic(
            *args, **settings, implementation=implementation
        ),
        static_argnames=("rule", "filtered"),
    )


def run_blocks(toy: Toy, groups: list[Group], *, seed: int = 0, verify=verify) -> np.ndarray:
    """Draft and verify one block in each row of all groups, in one batch; ``tokens [N, gamma+1]``.

    Draft tokens are drawn one by one, each from the logits behind those before it, as
    `jspec.decode.draft` does.
    """
    sizes = [group.rows for group in groups]
    count = sum(sizes)
    each = sampling_of([group.params for group in groups])
    rows = jax.tree.map(lambda x: np.repeat(np.asarray(x), sizes), each)
    rows = dataclasses.replace(rows, seeds=np.uint32(seed * 10_000_019 + np.arange(count)))
    lengths = np.repeat([group.length for group in groups], sizes).astype(np.int32)
    filtered = any(group.params.mode == "filtered" for group in groups)
    first = (np.arange(count) % 50).astype(np.int32)
    drawing = rows.in_block(first) if toy.rule == "block" else rows
    drafted = np.zeros((count, toy.gamma), np.int32)
    draft_logits = np.zeros((count, toy.gamma, toy.vocabulary), jnp.dtype(toy.dtype))
    target_logits = np.zeros((count, toy.gamma + 1, toy.vocabulary), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "TILE", 4)
        for t in range(toy.gamma + 1):
            prefix = tuple(drafted[:, :t].T)
            target_logits[:, t] = toy.target[t][prefix]
            if t == toy.gamma:
                break
            draft_logits[:, t] = toy.draft[t][prefix]
            if toy.one_hot:
                drafted[:, t] = greedy(draft_logits[:, t])
                continue
            here, at = draft_logits[:, t : t + 1], first[:, None] + np.int32(t)
            drafted[:, t] = draw(here, drawing, at, Role.DRAFT, filtered=filtered)[:, 0]
        verified = verify(
            drafted,
            target_logits,
            lengths,
            np.full((count, 1), -1, np.int32),
            rows,
            first,
            draft_logits=None if toy.one_hot else draft_logits,
            rule=toy.rule,
            filtered=filtered,
        )
    verified = jax.device_get(verified)
    np.testing.assert_array_equal(verified.committed, verified.accepted + 1)
    np.testing.assert_array_equal((verified.tokens >= 0).sum(axis=1), verified.committed)
    return verified.tokens


def check_block_law(toy: Toy, groups: list[Group], *, seed: int = 0, verify=verify) -> None:
    """The joint law of (accepted, committed tokens) in every group against its enumeration."""
    tokens = run_blocks(toy, groups, seed=seed, verify=verify)
    bounds = np.cumsum([0] + [group.rows for group in groups])
    for group, (begin, end) in zip(groups, itertools.pairwise(bounds), strict=True):
        blocks, counts = np.unique(tokens[begin:end], axis=0, return_counts=True)
        observed = {
            tuple(t for t in block.tolist() if t >= 0): int(n)
            for block, n in zip(blocks, counts, strict=True)
        }
        check_counts(observed, block_law(toy, group.params, group.length))


def check_forced(toy: Toy, number: int) -> None:
    """Outcomes where every random number is ``number``, 0 or `LAST_NUMBER`, against Python.

    At 0 all that is possible is accepted and the first possible token is drawn; at the last number
    only what the target likes at least as much as the draft is accepted, and the last possible
    token is drawn. Every draft is tried, those included that the draft model cannot make.
    """
    vocabulary, gamma = toy.vocabulary, toy.gamma
    drafts = np.array(list(itertools.product(range(vocabulary), repeat=gamma)), np.int32)
    count = len(drafts)
    rows = sampling_of([SAMPLED] * count)
    target_logits = np.stack(
        [toy.target[t][tuple(drafts[:, :t].T)] * np.ones((count, 1)) for t in range(gamma + 1)], 1
    ).astype(np.float32)
    draft_logits = np.stack(
        [toy.draft[t][tuple(drafts[:, :t].T)] * np.ones((count, 1)) for t in range(gamma)], 1
    ).astype(np.float32)
    p = probabilities(target_logits, rows, filtered=False)
    q = probabilities(draft_logits, rows, filtered=False)
    if toy.one_hot:
        q = np.eye(vocabulary)[drafts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stochastic_module,
            "number",
            lambda seeds, at, role: to_uint64(number, at.shape),
        )
        got = fresh_verify()(
            drafts,
            target_logits,
            np.full(count, gamma, np.int32),
            np.full((count, 1), -1, np.int32),
            rows,
            np.zeros(count, np.int32),
            draft_logits=None if toy.one_hot else draft_logits,
            filtered=False,
        )
    for row, draft in enumerate(drafts):
        accepted = 0
        while accepted < gamma:
            here, token = (row, accepted), draft[accepted]
            if p[here][token] == 0 or (number > 0 and p[here][token] < q[here][token]):
                break
            accepted += 1
        weights = p[row, accepted]
        if accepted < gamma:
            weights = np.maximum(weights - q[row, accepted], 0)
        possible = np.flatnonzero(weights)
        following = possible[0] if number == 0 else possible[-1]
        assert got.accepted[row] == accepted, f"draft {draft}"
        assert got.next_token[row] == following, f"draft {draft}"
