"""How many tokens a step would commit with drafts that branch, counted on the model's own answers.

Candidates of a tree do not depend on the target's token, which is drawn with the position's own
random number, so that a step commits the path that the plain answer follows and one token more. So
steps can be counted from plain answers, without verifying a tree. *chain* drafters propose as many
tokens as a tree has nodes, one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jspec
from bench.cases import Case, product
from bench.drafters import RATIO, SAMPLING, params_of
from bench.point import Row, row
from bench.settings import Settings, bar
from bench.suite import Benchmark
from bench.texts import model_and_prompts
from jspec.cache import Cache
from jspec.decode.draft.lookup import agreement, continuations
from jspec.decode.prefill import start_decoding
from jspec.decode.state import Models
from jspec.policies import Dense, Policy, Streaming
from jspec.policies.attend import run_selected

Tokens = NDArray[np.int64]
Draft = frozenset[tuple[int, ...]]  # the path of every node, from the last token of the text

# texts: prompts of S tokens, B of them decoded together; nodes: of a draft.
DEFAULT: Case = {"S": 1024, "texts": 12, "B": 12, "new": 192, "nodes": 16, "sampling": "greedy"}
LONGEST = 16  # tokens of a context that are compared, as `jspec.NgramDraft` does
LEAST = 3  # of a match that drafts, as of `jspec.NgramDraft` and `jspec.SuffixDraft`
FACTOR = 4  # of `jspec.SuffixDraft`


# Drafts from earlier text


def agreements(text: Tokens, limit: int = LONGEST) -> Tokens:
    """How many tokens up to each position but the last equal the last ones of the text."""
    last = len(text) - 1
    agreed, running = np.zeros(last, int), np.ones(last, bool)
    for back in range(min(limit, last)):
        running[:back] = False
        running[back:] &= text[: last - back] == text[last - back]
        if not running.any():
            break
        agreed += running
    return agreed


def latest_match(
    text: Tokens, nodes: int, *, limit: int, factor: float, least: int = LEAST
) -> Draft:
    """A chain: what followed the longest earlier match, the latest of equals, in a circle.

    A match of m tokens, at least ``least``, drafts at most ``factor`` times m.
    """
    agreed = agreements(text, limit)
    longest = int(agreed.max(initial=0))
    if longest < least:
        return frozenset()
    end = int(np.flatnonzero(agreed == longest)[-1])
    count = int(min(nodes, factor * longest))
    path = text[end + 1 + np.arange(count) % (len(text) - 1 - end)].tolist()
    return frozenset(tuple(path[: i + 1]) for i in range(count))


def next_tokens(text: Tokens) -> dict[int, float]:
    """Probabilities of the next token, by counts after all earlier matches of the text's end.

    Longer contexts come first, and leave to shorter ones a share for tokens that did not follow
    them (PPM, method C: Moffat 1990).
    """
    agreed = agreements(text)
    (places,) = np.nonzero(agreed)
    lengths, followers = agreed[places], text[places + 1]
    left, shares = 1.0, Counter[int]()
    for length in range(int(lengths.max(initial=0)), 0, -1):
        tokens, counts = np.unique(followers[lengths >= length], return_counts=True)
        total = int(counts.sum()) + len(tokens)
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
            shares[token] += left * count / total
        left *= len(tokens) / total
    return dict(shares)


def likeliest_chain(text: Tokens, nodes: int) -> Draft:
    """A chain of the likeliest token by `next_tokens`, then the likeliest one after it."""
    path: tuple[int, ...] = ()
    draft = []
    while len(draft) < nodes and (shares := next_tokens(np.append(text, path).astype(int))):
        path += (max(shares, key=lambda token: shares[token]),)
        draft.append(path)
    return frozenset(draft)


def likeliest_tree(text: Tokens, nodes: int) -> Draft:
    """The ``nodes`` likeliest paths by `next_tokens`."""
    draft: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(draft) <= nodes:
        negative, path = heapq.heappop(waiting)
        draft.append(path)
        for token, share in next_tokens(np.append(text, path).astype(int)).items():
            heapq.heappush(waiting, (negative * share, (*path, token)))
    return frozenset(draft[1:])


BRANCHES = 16  # of `jspec.NgramDraft`


def ngram_tree(text: Tokens, nodes: int) -> Draft:
    """The draft of ``jspec.NgramDraft(min_match=1, branches=BRANCHES)``."""
    padded = np.full((1, 1 << len(text).bit_length()), -1, np.int32)
    padded[0, : len(text)] = text
    drafted = jax.device_get(_ngram_tree(padded, np.array([len(text)], np.int32), nodes))
    paths: list[tuple[int, ...]] = [()]
    for index in range(drafted.lengths[0]):
        parent = paths[drafted.parents[0, index]]
        paths.append((*parent, int(drafted.tokens[0, index])))
    return frozenset(paths[1:])


@functools.partial(jax.jit, static_argnames="nodes")
def _ngram_tree(text: jax.Array, ends: jax.Array, nodes: int) -> jspec.Drafted:
    agreed = agreement(text, jnp.zeros_like(ends), ends, LONGEST)
    return continuations(text, ends, agreed, nodes, BRANCHES)


LOOKUPS: dict[str, Callable[[Tokens, int], Draft]] = {
    "ngram": functools.partial(latest_match, limit=LONGEST, factor=np.inf),
    "ngram-1": functools.partial(latest_match, limit=LONGEST, factor=np.inf, least=1),
    "ngram-tree": ngram_tree,
    "suffix": functools.partial(latest_match, limit=2**31, factor=FACTOR),
    "counts": likeliest_chain,
    "counts-tree": likeliest_tree,
}


# What any number of branches after earlier matches would commit, by the least length of a match.
EVERY = {"every-match-3": LEAST, "every-match-1": 1}


def follows(draft: Draft, answer: Sequence[int]) -> int:
    """Nodes of the draft on the path that the answer takes."""
    count = 0
    while count < len(answer) and tuple(answer[: count + 1]) in draft:
        count += 1
    return count


def every_match(text: Tokens, answer: Sequence[int], nodes: int, least: int) -> int:
    """Tokens that follow some earlier match of ``least`` tokens: a bound of all that branch there.

    ``nodes``: the depth of the branches, of which there may be any number.
    """
    agreed = agreements(text)
    (ends,) = np.nonzero(agreed >= least)
    whole = np.append(text, answer[:nodes]).astype(int)
    count = 0
    while count < min(nodes, len(answer)):
        ends = ends[whole[ends + 1 + count] == answer[count]]
        if not len(ends):
            break
        count += 1
    return count


def steps_of(answer: Sequence[int], accepted: Callable[[int], int]) -> int:
    """Steps that decode an answer.

    ``accepted(i)``: draft tokens that a step accepts after ``i`` tokens of the answer.
    """
    at, steps = 0, 0
    while at < len(answer):
        at += accepted(at) + 1
        steps += 1
    return steps


def lookup_steps(name: str, prompt: Sequence[int], answer: Sequence[int], nodes: int) -> int:
    """Steps of an answer with a drafter of `LOOKUPS`, or a bound of `EVERY`."""
    whole = np.array([*prompt, *answer])

    def accepted(at: int) -> int:
        text, rest = whole[: len(prompt) + at], answer[at:]
        if name in EVERY:
            return every_match(text, rest, nodes, EVERY[name])
        return follows(LOOKUPS[name](text, nodes), rest[:nodes])

    return steps_of(answer, accepted)


# Drafts by the model itself


@dataclasses.dataclass(frozen=True)
class Ranked:
    """What a pass of a drafter says of each token of an answer.

    Attributes:
        ranks: tokens that it prefers, int ``[n]``.
        probabilities: of the token, float ``[n]``.
    """

    ranks: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def ranked(
    model: jspec.Decoder,
    policy: Policy,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    temperature: float,
) -> list[Ranked]:
    """What the model says of the tokens of each answer where ``policy`` selects what it reads.

    Passes go from the last token back, so that each reads keys and values of ordinary passes.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    params = jspec.SamplingParams(max_new_tokens=1, ignore_eos=True)
    config = jspec.StepConfig(1, jspec.SelfDraft(policy))
    state = start_decoding(Models(model), rows, [params] * len(rows), config)
    whole = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, tokens in enumerate(rows):
        whole[index, : len(tokens)] = tokens
    lengths = np.array(list(map(len, rows)))
    firsts = np.array(list(map(len, prompts)))
    # int32 [n, B]: the position whose pass says what follows, -1 where the prompt is.
    positions = lengths - 2 - np.arange((lengths - firsts).max())[:, None]
    positions = np.where(positions >= firsts - 1, positions, -1).astype(np.int32)
    of_passes = _passes(model, policy, state.cache, whole, positions, temperature or 1.0)
    ranks, probabilities = (np.asarray(x)[::-1] for x in of_passes)
    asked = positions[::-1] >= 0
    return [
        Ranked(ranks[asked[:, i], i].astype(int), probabilities[asked[:, i], i].astype(float))
        for i in range(len(rows))
    ]


@functools.partial(jax.jit, static_argnames="policy")
def _passes(
    model: jspec.Decoder,
    policy: Policy,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Rank and probability ``[n, B]`` of the token after each of ``positions [n, B]``."""

    def one(cache: Cache, positions: jax.Array) -> tuple[Cache, tuple[jax.Array, jax.Array]]:
        lengths = jnp.maximum(positions, 0)
        token = jnp.take_along_axis(tokens, lengths[:, None], 1)
        following = jnp.take_along_axis(tokens, lengths[:, None] + 1, 1)
        before = dataclasses.replace(cache, lengths=lengths)
        hidden, cache, _ = run_selected(
            *(model, token, positions[:, None], before, lengths, 1), policy=policy
        )
        logits = model.logits(hidden)[:, 0].astype(jnp.float32)
        logit = jnp.take_along_axis(logits, following, 1)
        share = jnp.exp(logit[:, 0] / temperature - jax.nn.logsumexp(logits / temperature, 1))
        return cache, ((logits > logit).sum(axis=1), share)

    return jax.lax.scan(one, cache, positions)[1]


def rank_tree(ranks: Sequence[NDArray[np.int64]], nodes: int) -> Draft:
    """The likeliest ``nodes`` paths of ranks, were ranks independent, as frequent as ``ranks``."""
    counts = Counter(np.concatenate(ranks).tolist())
    total = sum(counts.values())
    shares = {rank: count / total for rank, count in counts.items() if rank < nodes}
    draft: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(draft) <= nodes:
        negative, path = heapq.heappop(waiting)
        draft.append(path)
        for rank, share in shares.items():
            heapq.heappush(waiting, (negative * share, (*path, rank)))
    return frozenset(draft[1:])


def self_chain_steps(draft: Ranked, plain: Ranked, nodes: int, sampled: bool, seed: int) -> int:
    """Steps of an answer whose drafts are a chain; sampled ones are accepted by chance.

    Of a token that was decoded, a draft is accepted with probability min(1, q / p).
    """
    chance = np.minimum(draft.probabilities / np.maximum(plain.probabilities, 1e-30), 1)
    drawn = np.random.default_rng(seed).random(len(chance))
    right = drawn < chance if sampled else draft.ranks == 0
    wrong = np.append(np.flatnonzero(~right), len(right))

    def accepted(at: int) -> int:
        return int(min(wrong[np.searchsorted(wrong, at)] - at, nodes))

    return steps_of(range(len(right)), accepted)


def self_tree_steps(draft: Ranked, tree: Draft) -> int:
    """Steps of an answer whose drafts are trees of one shape of ranks."""
    ranks = draft.ranks.tolist()
    return steps_of(ranks, lambda at: follows(tree, ranks[at:]))


# The rows


SELF = {"streaming": Streaming(window=RATIO)}
NAMES = (*LOOKUPS, *EVERY, *(name for base in SELF for name in (base, f"{base}-tree")))


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each drafter, on the same answers."""
    of_model = {"model": settings.model.stem if settings.model else "bundled", **case}
    _, prompts, answers = answers_of(settings.model, *map(case.get, ANSWERS))
    nodes, sampled = case["nodes"], case["sampling"] != "greedy"
    tokens = list(map(len, answers))

    def figures(name: str, steps: list[int], **rest: Any) -> Row:
        length = {"length": sum(tokens) / sum(steps)}
        return row(
            "trees", of_model, name, checked=None, **length, tokens=tokens, steps=steps, **rest
        )

    lookups = [name for name in (*LOOKUPS, *EVERY) if settings.wants(name)]
    with bar("lookups", len(lookups)) as advance:
        for name in lookups:
            pairs = zip(prompts, answers, strict=True)
            yield figures(name, [lookup_steps(name, *pair, nodes) for pair in pairs])
            advance()
    for name, policy in SELF.items():
        if not (settings.wants(name) or settings.wants(f"{name}-tree")):
            continue
        asked = settings.model, *map(case.get, ANSWERS)
        drafts = ranks_of(policy, *asked)
        plain = ranks_of(Dense(), *asked) if sampled else drafts
        if settings.wants(name):
            pairs = enumerate(zip(drafts, plain, strict=True))
            steps = [self_chain_steps(*pair, nodes, sampled, seed) for seed, pair in pairs]
            yield figures(name, steps, passes=nodes)
        # The shape for the answers of even rows is that of odd ones, and the other way round.
        shapes = [rank_tree([x.ranks for x in drafts[i::2]], nodes) for i in (1, 0)]
        if settings.wants(f"{name}-tree"):
            steps = [self_tree_steps(x, shapes[i % 2]) for i, x in enumerate(drafts)]
            depth = max((len(path) for shape in shapes for path in shape), default=0)
            yield figures(f"{name}-tree", steps, passes=depth)


ANSWERS = ("S", "texts", "B", "new", "sampling")  # what the answers of a case depend on


@functools.cache
def answers_of(
    path: Path | None, size: int, count: int, batch: int, new: int, sampling: str
) -> tuple[jspec.Decoder, list[list[int]], list[list[int]]]:
    """The model, prompts of ``size`` tokens and plain answers."""
    model, _, prompts = model_and_prompts(path, count, size)
    answers = []
    params = params_of(sampling, new, count)
    with bar("answers", count) as advance:
        for begin in range(0, count, batch):
            part = slice(begin, begin + batch)
            result = jspec.generate(model, prompts[part], params[part], draft=None)
            answers += map(list, result.tokens)
            for _ in prompts[part]:
                advance()
    return model, prompts, answers


@functools.cache
def ranks_of(
    policy: Policy, path: Path | None, size: int, count: int, batch: int, new: int, sampling: str
) -> list[Ranked]:
    """`ranked` of all answers of a case, ``batch`` rows at a time."""
    model, prompts, answers = answers_of(path, size, count, batch, new, sampling)
    temperature, result = SAMPLING[sampling].get("temperature", 0.0), []
    with bar(f"ranks by {type(policy).__name__.lower()}", len(prompts)) as advance:
        for begin in range(0, len(prompts), batch):
            part = slice(begin, begin + batch)
            result += ranked(model, policy, prompts[part], answers[part], temperature)
            for _ in prompts[part]:
                advance()
    return result


TREES = Benchmark(
    name="trees",
    default=DEFAULT,
    choices={"sampling": tuple(SAMPLING)},
    gpu=product(nodes=(8, 16), sampling=("greedy", "t0.8")),
    quick=["S=512,texts=4,B=4,new=64,nodes=8"],
    cpu=["S=256,texts=2,B=2,new=12,nodes=8", *product(nodes=(8, 16), sampling=("greedy", "t0.8"))],
    names=NAMES,
    rows=rows,
)
