"""How much of an engine's cache its requests use.

Counted, not timed, with a model of one small layer: rows depend on no machine. Two traces, whose
lengths are shares of S, the positions of a slot. *rollouts*: groups of 16 answers to a prompt, of
log-normal lengths: their median is S/8, and one in 40 reaches the limit of 7 S/8. *conversations*:
half as many users again as slots, who share a system prompt of S/8 tokens. Each takes eight turns
at most, the next one as soon as the answer has ended; messages are short, answers log-normal.

Each trace also runs in engines with their cache in blocks: with as many slots in half of the
memory, and with four times as many slots in all of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from flax import nnx

import jspec
from bench.cases import Case
from bench.point import Row, row
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.cache.layout import BLOCK

ANSWERS = 8  # of a rollout, for each slot
GROUP = 16  # of them to a prompt
TURNS = 8  # of a conversation
DEFAULT: Case = {"trace": "rollouts", "B": 64, "S": 4096}
ONE, TWO, HALF, FOURFOLD = "one-engine", "two-engines", "half-in-blocks", "four-times-the-slots"


@dataclasses.dataclass(eq=False)
class Text:
    """A text that grows, and the blocks that it fills.

    Attributes:
        request: whose prompt and tokens it is.
        prompt: of the request.
        keys: for each block that is full, a number that follows from all tokens up to its end.
        watched: tokens of the request at the end of the turn before.
    """

    request: jspec.Request
    prompt: list[int]
    keys: list[int] = dataclasses.field(default_factory=list)
    watched: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.request.tokens)

    def fill(self) -> list[int]:
        """The keys, with those of blocks that are full by now."""
        if self.length // BLOCK > len(self.keys):
            tokens = [*self.prompt, *self.request.tokens]
            for begin in range(len(self.keys) * BLOCK, self.length - BLOCK + 1, BLOCK):
                before = self.keys[-1] if self.keys else 0
                self.keys.append(hash((before, *tokens[begin : begin + BLOCK])))
        return self.keys


def positions_in_blocks(texts: Iterable[Text]) -> int:
    """Positions of the blocks of all texts; texts that begin alike share the blocks of that."""
    keys, open_blocks = set[int](), 0
    for text in texts:
        keys.update(text.fill())
        open_blocks += text.length % BLOCK > 0
    return (len(keys) + open_blocks) * BLOCK


@dataclasses.dataclass
class Usage:
    """Positions in use after each turn of an engine, of ``positions`` that its cache has.

    Attributes:
        positions: of all rows.
        requests: that got tokens in the turn.
        used: by the texts of requests in slots.
        blocks: that these would take in blocks.
        is_full: whether all slots were taken.
    """

    positions: int
    requests: list[int] = dataclasses.field(default_factory=list)
    used: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    is_full: list[bool] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, engine: jspec.Engine) -> Usage:
        """Of all rows or blocks of an engine, the row for a long prompt included."""
        blocks = engine.cache_blocks
        whole = engine.slots * engine.capacity if blocks is None else blocks * BLOCK
        return cls(whole + engine.capacity)

    def watch(self, engine: jspec.Engine, texts: Sequence[Text]) -> None:
        """Record ``texts`` of all requests that have not ended; those without new tokens wait."""
        running = [text for text in texts if len(text.request.tokens) > text.watched]
        for text in running:
            text.watched = len(text.request.tokens)
        self.requests.append(len(running))
        self.used.append(sum(text.length for text in running))
        self.blocks.append(positions_in_blocks(running))
        self.is_full.append(len(running) == engine.slots)

    def figures(self) -> Row:
        """Shares of the cache: unused ones and those in blocks, means and extremes."""
        full = [x for x, is_full in zip(self.used, self.is_full, strict=True) if is_full]
        return {
            "positions": self.positions,
            "turns": len(self.used),
            "requests": statistics.mean(self.requests),
            "most_requests": max(self.requests),
            "unused": 1 - statistics.mean(self.used) / self.positions,
            "unused_while_full": 1 - statistics.mean(full or self.used) / self.positions,
            "least_unused": 1 - max(self.used) / self.positions,
            "blocks": statistics.mean(self.blocks) / self.positions,
            "most_blocks": max(self.blocks) / self.positions,
        }


def engine_of(
    model: jspec.Decoder, slots: int, capacity: int, blocks: int | None = None
) -> jspec.Engine:
    return jspec.Engine(model, slots=slots, capacity=capacity, cache_blocks=blocks, draft=None)


def in_blocks(model: jspec.Decoder, case: Case, name: str) -> jspec.Engine:
    """The engine of a row with its cache in blocks; ONE: that with its slots in one piece."""
    slots, size = case["B"], case["S"]
    blocks = {ONE: None, HALF: slots * size // BLOCK // 2, FOURFOLD: slots * size // BLOCK}[name]
    return engine_of(model, 4 * slots if name == FOURFOLD else slots, size, blocks)


def answer_lengths(rng: np.random.Generator, count: int, median: int, most: int) -> list[int]:
    """Log-normal lengths, the deviation of their logarithm 1, cut at ``most``."""
    lengths = median * np.exp(rng.standard_normal(count))
    return np.clip(lengths.astype(int), 1, most).tolist()


def answered(
    engine: jspec.Engine, usage: Usage, prompts: Mapping[int, list[int]], lengths: Mapping[int, int]
) -> dict[int, list[int]]:
    """Texts by their seeds: prompts, all queued at once, and answers of ``lengths`` tokens."""
    texts = {
        seed: Text(engine.submit(prompt, params_of(lengths[seed], seed)), prompt)
        for seed, prompt in prompts.items()
    }
    while engine.busy:
        engine.step()
        usage.watch(engine, [x for x in texts.values() if x.request.finished is None])
    return {seed: [*text.prompt, *text.request.tokens] for seed, text in texts.items()}


def params_of(length: int, seed: int) -> jspec.SamplingParams:
    return jspec.SamplingParams(max_new_tokens=length, temperature=1, seed=seed, ignore_eos=True)


def rollouts(model: jspec.Decoder, case: Case) -> Iterator[Row]:
    """Rows of one engine, and of two that share half of its memory, one after the other.

    The first of these ends an answer where its slots do, which are a fourth as long. The second one
    has half as many slots of full length, in which the longer answers go on.
    """
    rng, size, count = np.random.default_rng(0), case["S"], ANSWERS * case["B"]
    drawn = answer_lengths(rng, count, size // 8, size - size // 8)
    starts = rng.integers(size // 64, size // 8 + 1, -(-count // GROUP))
    groups = [rng.integers(model.config.vocab_size, size=n).tolist() for n in starts]
    prompts = {seed: groups[seed // GROUP] for seed in range(count)}
    lengths = dict(enumerate(drawn))
    engine = engine_of(model, case["B"], size)
    usage = Usage.of(engine)
    whole = answered(engine, usage, prompts, lengths)
    yield usage.figures() | {"name": ONE, "checked": None}
    del engine

    def same(texts: dict[int, list[int]]) -> Row:
        """Whether all texts are those of one engine, and how many of them."""
        # A prefill may round the keys that it computes again in another way: a text differs.
        share = sum(texts[seed] == text for seed, text in whole.items()) / count
        return {"checked": texts == whole, "same_texts": share}

    for name in (HALF, FOURFOLD):
        engine = in_blocks(model, case, name)
        usage = Usage.of(engine)
        texts = answered(engine, usage, prompts, lengths)
        yield usage.figures() | {"name": name, **same(texts)}
        del engine

    engine = engine_of(model, case["B"], size // 4)
    usage = Usage.of(engine)
    first = {seed: min(n, size // 4 - len(prompts[seed])) for seed, n in lengths.items()}
    texts = answered(engine, usage, prompts, first)
    turns = len(usage.used)
    del engine
    rest = {seed: n - first[seed] for seed, n in lengths.items() if n > first[seed]}
    engine = engine_of(model, case["B"] // 2, size)
    usage = Usage.of(engine)
    texts |= answered(engine, usage, {seed: texts[seed] for seed in rest}, rest)
    figures = usage.figures()
    figures["turns"] += turns
    yield figures | {"name": TWO, **same(texts)}


def conversations(model: jspec.Decoder, case: Case) -> Iterator[Row]:
    """Rows of one engine, and of those in blocks."""
    for name in (ONE, HALF, FOURFOLD):
        yield {"name": name, "checked": None, **conversed(in_blocks(model, case, name), case)}


def conversed(engine: jspec.Engine, case: Case) -> Row:
    """The figures of conversations with an engine."""
    rng, size = np.random.default_rng(0), case["S"]
    vocabulary = engine.model.config.vocab_size
    system = rng.integers(vocabulary, size=size // 8).tolist()
    usage = Usage.of(engine)
    users = list(range(case["B"] * 3 // 2))
    histories, turns = [system] * len(users), [0] * len(users)
    texts: dict[int, Text] = {}
    begun = 0
    while users:
        for user in [x for x in users if x not in texts]:
            message = rng.integers(vocabulary, size=rng.integers(16, size // 32 + 1)).tolist()
            prompt = [*histories[user], *message]
            (length,) = answer_lengths(rng, 1, size // 32, size // 4)
            if turns[user] == TURNS or len(prompt) + length > size:
                users.remove(user)
                continue
            texts[user] = Text(engine.submit(prompt, params_of(length, user)), prompt)
            turns[user] += 1
            begun += len(prompt)
        engine.step()
        running = {user: x for user, x in texts.items() if x.request.finished is None}
        usage.watch(engine, list(running.values()))
        for user in texts.keys() - running.keys():
            histories[user] = [*texts[user].prompt, *texts[user].request.tokens]
        texts = running
    return usage.figures() | {"prefilled": engine.stats.prompt_tokens / begun}


TRACES = {"rollouts": rollouts, "conversations": conversations}


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """Rows of a trace, by a model of one small layer."""
    config = jspec.ModelConfig.uniform(
        vocab_size=256,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        max_context=case["S"],
    )
    model = jspec.Decoder(config, rngs=nnx.Rngs(0))
    for figures in TRACES[case["trace"]](model, case):
        name, checked = figures.pop("name"), figures.pop("checked")
        if settings.wants(name):
            yield row("memory", case, name, checked=checked, **figures)


GRID = [f"trace={trace}" for trace in TRACES]
MEMORY = Benchmark(
    name="memory",
    default=DEFAULT,
    choices={"trace": tuple(TRACES)},
    gpu=[],
    quick=[],
    cpu=GRID,
    names=(ONE, TWO, HALF, FOURFOLD),
    rows=rows,
)
