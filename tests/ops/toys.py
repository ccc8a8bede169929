"""Toys whose blocks of tokens can be enumerated, their laws, and the checks against them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec.cuda_ffi.stochastic
import jspec.triton.stochastic  # noqa: F401 - both take TILE, which `run_blocks` patches
from jspec.config import SamplingParams
from jspec.ops import stochastic as stochastic_module
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.sample import Role, greedy, sample
from jspec.ops.stochastic import Rule, verify_stochastic
from tests.ops.laws import (
    GREEDY,
    SAMPLED,
    check_counts,
    filtered_law,
    probabilities,
    sampling_of,
    to_uint64,
)


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
    leaves the draft's first position, and the target's last one after token 1, no finite
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
    """`verify` by one backend, traced again, so that it sees a patched internal."""
    return jax.jit(
        lambda *args, **settings: verify_stochastic(
            *args, **settings, implementation=implementation
        ),
        static_argnames=("rule", "filtered"),
    )


def run_blocks(toy: Toy, groups: list[Group], *, seed: int = 0, verify=verify) -> np.ndarray:
    """Draft and verify one block in each row of all groups, in one batch; ``tokens [N, gamma+1]``.

    Draft tokens are drawn one by one, each from the logits after those before it, as
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
            of_token, at = draft_logits[:, t : t + 1], first[:, None] + np.int32(t)
            drafted[:, t] = draw(of_token, drawing, at, Role.DRAFT, filtered=filtered)[:, 0]
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


def check_forced(toy: Toy, *numbers: int) -> None:
    """Outcomes where every random number is one of ``numbers``, 0 or `LAST_NUMBER`, against Python.

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

    @jax.jit
    def run(every, draft_logits, *args):
        with pytest.MonkeyPatch.context() as patch:
            numbers = lambda seeds, at, role: jnp.broadcast_to(every, at.shape)  # noqa: E731
            patch.setattr(stochastic_module, "number", numbers)
            settings = {"filtered": False, "implementation": "xla"}
            return verify_stochastic(*args, draft_logits=draft_logits, **settings)

    args = (
        *(None if toy.one_hot else draft_logits, drafts, target_logits),
        *(np.full(count, gamma, np.int32), np.full((count, 1), -1, np.int32)),
        *(rows, np.zeros(count, np.int32)),
    )
    for number in numbers:
        got = jax.device_get(run(to_uint64(number), *args))
        for row, draft in enumerate(drafts):
            accepted, following = certain_outcome(number, p[row], q[row], draft)
            assert got.accepted[row] == accepted, f"draft {draft}"
            assert got.next_token[row] == following, f"draft {draft}"


def certain_outcome(number: int, p, q, draft) -> tuple[int, int]:
    """Accepted tokens of ``draft`` and the token after them, by ``p [gamma+1, V]``, ``q``."""
    accepted = 0
    while accepted < len(draft):
        token = draft[accepted]
        if p[accepted][token] == 0 or (number > 0 and p[accepted][token] < q[accepted][token]):
            break
        accepted += 1
    weights = p[accepted]
    if accepted < len(draft):
        weights = np.maximum(weights - q[accepted], 0)
    possible = np.flatnonzero(weights)
    return accepted, possible[0] if number == 0 else possible[-1]
