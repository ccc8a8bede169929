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

PARTS = 10  # looks at the memory
LATEST = 150  # requests of each version that are compared with what they get alone
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
            if self.rng.random() < 0.1:
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
        self.prefix = []
        # Slots have these texts by the weights from before.
        for text in sorted(self.texts[-8:], key=len)[-3:]:
            self.submit([*text, *self.random(5)])

    def collect(self) -> None:
        """Sort out what has ended."""
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
        while self.counts["requests"] < until:
            for _ in range(self.rng.integers(8)):
                self.submit(self.prompt())
            event = self.rng.random()
            if event < 0.07:
                self.update()
            elif event < 0.1:
                self.counts["releases"] += 1
                self.engine.release_cache()
                self.engine.restore_cache()
                self.prefix = []
            elif event < 0.16 and not self.prefix:
                self.counts["prefixes"] += 1
                self.prefix = self.random(self.rng.integers(20, 100))
                self.engine.share_prefix(self.prefix)
            elif event < 0.36 and self.running:
                self.running[self.rng.integers(len(self.running))][1].cancel()
            self.engine.step()
            self.collect()
        # After this one the row for prompts has no scores of another.
        self.engine.submit([0] * 80, SamplingParams(1, seed=0))
        self.engine.run()
        self.engine.step()  # reads what ran ahead for nobody
        self.collect()
        if self.prefix:
            self.engine.drop_prefix(self.prefix)
            self.prefix = []


def all_but_one(tokens: tuple[int, ...]) -> int:
    """A callback that ends a request before the last token of its first chunk."""
    return len(tokens) - 1


def resident_mib() -> float:
    return int(STATM.read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.skipif(not STATM.exists(), reason="reads the memory of a process as Linux gives it")
def test_many_requests_leave_nothing(count):
    models = [make_decoder(ONE_LAYER, seed=x, head=8.0) for x in (1, 7, 8)]
    engine = Engine(
        models[0],
        slots=8,
        capacity=CAPACITY,
        draft=SuffixDraft(min_match=1, other_rows=True),
        gamma=3,
        prefill_chunk=32,
        steps_per_chunk=4,
        logprobs=1,
        prompt_logprobs=1,
    )
    engine.warm_up()
    compiled, work = len(COMPILED), Work(engine, models, np.random.default_rng(0))
    engine_programs, arrays, sizes, resident = engine.stats.compilations, [], [], []
    for until in range(count // PARTS, count + 1, count // PARTS):
        work.some(until)
        gc.collect()
        live = jax.live_arrays()
        arrays.append(len(live))
        sizes.append(sum(x.nbytes for x in live))
        resident.append(resident_mib())
        del live
    stats = engine.stats
    print(f"{dict(work.counts)}, {stats.prompt_tokens} prompt tokens, {stats.committed} tokens")
    print(f"live arrays {arrays}, of {sizes} bytes; resident {resident} MiB")
    assert len(COMPILED) == compiled
    assert stats.compilations == engine_programs
    assert len(set(arrays)) == 1
    assert len(set(sizes)) == 1
    if count > 1000:  # before, the allocator has not got all that it will reuse
        assert resident[-1] - resident[1] < 0.02 * resident[1]
    fewest = min(map(len, work.whole.values()))
    for which, pairs in work.whole.items():
        pairs = pairs[-fewest:]  # as many of each, so that they share a program
        prompts = [prompt for prompt, _ in pairs]
        bare = {"logprobs": None, "prompt_logprobs": None}
        params = [dataclasses.replace(request.params, **bare) for _, request in pairs]
        alone = generate(models[which], prompts, params, draft=None)
        for (_, request), tokens, end in zip(pairs, alone.tokens, alone.finished, strict=True):
            assert request.tokens == tokens[: len(request.tokens)]
            if request.finished == "length":
                assert (request.tokens, request.finished) == (tokens, end)
    print(f"{3 * fewest} requests compared with what they get alone")
    assert 3 * fewest > min(count // 10, 400)
