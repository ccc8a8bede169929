"""An engine that serves many requests of all kinds needs no more memory at the end.

The run of 10,000: ``python -m pytest -n 0 -s -m slow tests/decode/test_engine_soak.py``.
"""

import dataclasses
import gc
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import SuffixDraft
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from jspec.decode.request import Request
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import MIXED
from tests.decode.conftest import COMPILED

LATEST = 200  # requests of each version that are compared with what they get alone
CAPACITY, VOCABULARY = 256, 41
STATM = Path("/proc/self/statm")


@dataclasses.dataclass
class Work:
    """A random mix of calls, and the requests that one version of the weights served.

    Attributes:
        engine: that serves them.
        models: whose weights take turns, by ``engine.version``.
        counts: of what was done.
        whole: prompt and request of the latest that no update came across, by the version.
    """

    engine: Engine
    models: list
    rng: np.random.Generator
    counts: Counter = dataclasses.field(default_factory=Counter)
    whole: dict[int, list[tuple[list[int], Request]]] = dataclasses.field(default_factory=dict)
    running: list[tuple[list[int], Request, int]] = dataclasses.field(default_factory=list)
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    prefix: list[int] = dataclasses.field(default_factory=list)

    def random(self, size: int) -> list[int]:
        return self.rng.integers(VOCABULARY, size=size).tolist()

    def prompt(self) -> list[int]:
        """A new text, one after a shared prefix, or one more turn of an earlier text."""
        kind, more = self.rng.random(), self.random(self.rng.integers(1, 40))
        if kind < 0.2 and self.texts:
            self.counts["turns"] += 1
            return [*self.texts[self.rng.integers(len(self.texts))], *more]
        if kind < 0.4 and self.prefix:
            self.counts["after a prefix"] += 1
            return [*self.prefix, *more]
        return self.random(self.rng.integers(40, 120)) if kind < 0.55 else more

    def params(self) -> SamplingParams:
        settings = MIXED[self.rng.integers(len(MIXED))]
        stops = tuple(self.random(self.rng.integers(3)))
        seed, new = int(self.rng.integers(2**32)), int(self.rng.integers(1, 24))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self.engine, name) is not None and self.rng.random() < 0.1:
                self.counts[name] += 1
                settings = settings | {name: 1}
        return SamplingParams(new, seed=seed, stop_tokens=stops, **settings)

    def submit(self, prompt: list[int]) -> None:
        params, on_tokens = self.params(), None
        if self.rng.random() < 0.05:
            self.counts["ended by a callback"] += 1
            on_tokens = all_but_one
        count = int(self.rng.integers(2, 9)) if self.rng.random() < 0.1 else 1
        self.counts["groups"] += count > 1
        group = self.engine.submit_group(prompt, params, n=count, on_tokens=on_tokens)
        self.counts["requests"] += count
        self.running += [(prompt, request, self.engine.version) for request in group]

    def update(self) -> None:
        way = ("keep", "recompute", "abort")[self.engine.version % 3]
        self.counts[f"updates, {way}"] += 1
        model = self.models[(self.engine.version + 1) % len(self.models)]
        self.engine.update(model, on_update=way)
        self.share()
        # Slots have these texts by the weights from before.
        for text in sorted(self.texts[-8:], key=len)[-3:]:
            self.submit([*text, *self.random(5)])

    def share(self) -> None:
        self.counts["prefixes"] += 1
        self.prefix = self.random(self.rng.integers(20, 100))
        self.engine.share_prefix(self.prefix)

    def step(self) -> None:
        """A step of the engine; sorts out what has ended."""
        self.engine.step()
        ended = [x for x in self.running if x[1].finished is not None]
        self.running = [x for x in self.running if x[1].finished is None]
        for prompt, request, version in ended:
            self.counts[request.finished] += 1
            if len(prompt) + len(request.tokens) < CAPACITY - 64:
                self.texts = [*self.texts[-15:], [*prompt, *request.tokens]]
            if set(request.versions) == {version} == {self.engine.version}:
                which = version % len(self.models)
                latest = self.whole.get(which, [])[1 - LATEST :]
                self.whole[which] = [*latest, (prompt, request)]

    def some(self, until: int) -> None:
        """Calls of all kinds until so many requests were queued, and all have ended."""
        self.share()
        middle = (self.counts["requests"] + until) // 2
        while self.counts["requests"] < until:
            for _ in range(self.rng.integers(8)):
                self.submit(self.prompt())
            event = self.rng.random()
            if self.counts["requests"] > middle:
                middle = 2 * until  # once
                self.update()
            elif event < 0.06:
                self.counts["releases"] += 1
                self.engine.release_cache()
                self.engine.restore_cache()
                self.prefix = []
            elif event < 0.12 and not self.prefix:
                self.share()
            elif event < 0.3 and self.running:
                self.running[self.rng.integers(len(self.running))][1].cancel()
            self.step()
            while len(self.running) > 2 * self.engine.slots:
                self.step()
        # After this one the row for prompts has no scores of another.
        self.engine.submit([0] * 80, SamplingParams(1, seed=0))
        while self.engine.busy:
            self.step()
        self.step()  # reads what ran ahead for nobody
        if self.prefix:
            self.engine.drop_prefix(self.prefix)
            self.prefix = []


def all_but_one(tokens: tuple[int, ...]) -> int:
    """A callback that ends a request before the last token of its first chunk."""
    return len(tokens) - 1


def resident_mib() -> float:
    return int(STATM.read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize(
    ("count", "part"),
    [
        pytest.param(300, 30, marks=pytest.mark.exhaustive),
        pytest.param(10_000, 100, marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(not STATM.exists(), reason="reads the memory of a process as Linux gives it")
def test_many_requests_leave_nothing(count, part):
    """The memory is looked at after each part of them, in the middle of which weights change."""
    models = [make_decoder(ONE_LAYER, seed=x, head=8.0) for x in (1, 7, 8)]
    engine = Engine(
        models[0],
        slots=8,
        capacity=CAPACITY,
        draft=SuffixDraft(min_match=1, other_rows=True),
        gamma=3,
        prefill_chunk=32,
        steps_per_chunk=4,
        logprobs=1 if count > 1000 else None,  # which twice as many programs serve
        prompt_logprobs=1,
    )
    engine.warm_up()
    compiled, work = len(COMPILED), Work(engine, models, np.random.default_rng(0))
    engine_programs, arrays, sizes, resident = engine.stats.compilations, [], [], []
    for until in range(0, count + 1, part):
        if until:
            work.some(until)
        gc.collect()
        live = jax.live_arrays()
        arrays.append(len(live))
        sizes.append(sum(x.nbytes for x in live))
        resident.append(resident_mib())
        del live
    stats = engine.stats
    print(f"{dict(work.counts)}, {stats.prompt_tokens} prompt tokens, {stats.committed} tokens")
    shown = [sorted(set(arrays)), sorted(set(sizes)), resident[:: len(resident) // 10]]
    print("live arrays {}, of {} bytes; resident {} MiB".format(*shown))
    assert len(COMPILED) == compiled
    assert stats.compilations == engine_programs
    for looks in (arrays, sizes):  # the first of them before the first request
        assert len(set(looks[1:])) == 1
        assert looks[1] <= looks[0]
    if count > 1000:  # before, the allocator has not got all that it will reuse
        early = resident[len(resident) // 5]
        assert resident[-1] - early < 0.02 * early
    counts = [len(pairs) for pairs in work.whole.values()]
    for which, pairs in work.whole.items():
        # As many of each, so that they share a program.
        pairs = [*pairs, *pairs[:1] * (max(counts) - len(pairs))]
        prompts = [prompt for prompt, _ in pairs]
        bare = {"logprobs": None, "prompt_logprobs": None}
        params = [dataclasses.replace(request.params, **bare) for _, request in pairs]
        alone = generate(models[which], prompts, params, draft=None)
        for (_, request), tokens, end in zip(pairs, alone.tokens, alone.finished, strict=True):
            assert request.tokens == tokens[: len(request.tokens)]
            if request.finished == "length":
                assert (request.tokens, request.finished) == (tokens, end)
    print(f"{sum(counts)} requests compared with what they get alone")
    assert sum(counts) > min(count // 4, 400)
