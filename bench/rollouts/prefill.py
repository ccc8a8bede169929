"""What requests that begin alike share: a group of answers to a prompt, and conversations.

*shared*: as they come. *apart*: each prompt, or each turn, begins with a token of its own, so that
an engine finds nothing that it has. Greedy answers of a fixed length to real texts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

import jspec
from bench.cases import Case
from bench.decode.running import device_bytes
from bench.point import Row, row
from bench.real import check
from bench.rollouts.speed import loaded
from bench.settings import Settings
from bench.suite import Benchmark
from bench.texts import texts
from jspec.cli.compile_cache import keep_programs
from jspec.decode.prefill import rounded_capacity

SHARED, APART = "shared", "apart"
NAMES = (SHARED, APART)
# B: answers to a prompt of S tokens; new: tokens of an answer.
GROUP_CASE: Case = {"B": 16, "S": 4096, "new": 128}
# B: users, each with a slot; S: tokens of a system prompt that all have; message, new: of a turn.
CONVERSATIONS_CASE: Case = {"B": 20, "turns": 8, "S": 512, "message": 64, "new": 64}


@dataclasses.dataclass
class Asked:
    """A request for an answer to ``prompt``, and the times of its tokens after ``begin``."""

    prompt: list[int]
    params: jspec.SamplingParams
    engine: dataclasses.InitVar[jspec.Engine]
    times: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self, engine: jspec.Engine) -> None:
        self.begin = time.perf_counter()
        self.request = engine.submit(self.prompt, self.params, on_tokens=self._record)

    def _record(self, tokens: Sequence[int]) -> None:
        self.times.append(time.perf_counter() - self.begin)

    @property
    def first_ms(self) -> float:
        return 1e3 * self.times[0]

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.request.tokens]


A = TypeVar("A", bound=Asked)


def params_of(new: int) -> jspec.SamplingParams:
    return jspec.SamplingParams(max_new_tokens=new, ignore_eos=True)


def long_texts(tokenizer: jspec.Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Texts of ``tokens`` tokens, also by vocabularies whose tokens are long."""
    return [x[:tokens] for x in texts(tokenizer, range(count), 3 * tokens)]


def begun_with(index: int, model: jspec.Model, prompt: list[int]) -> list[int]:
    """A prompt after a token that no prompt with another index begins with."""
    return [index % model.config.vocab_size, *prompt[1:]]


def checked(model: jspec.Decoder, asked: Sequence[Asked]) -> Row:
    """Whether the first answers are those of plain decoding alone, but for near ties."""
    first = asked[: check.ROWS]
    prompts, params = [x.prompt for x in first], [x.params for x in first]
    alone = [jspec.generate(model, [x.prompt], x.params, draft=None).tokens[0] for x in first]
    scorer = check.scorer_of(model, prompts, params)
    result = check.greedy(scorer, [x.request.tokens for x in first], alone, exact=False)
    return {"checked": result["checked"], "check": result}


def cache_bytes(model: jspec.Decoder, rows: int, capacity: int) -> int:
    """Bytes of the keys and values of ``rows`` of ``capacity`` positions, as an engine has them."""
    layers = model.config.layers
    of_position = sum(x.kv_heads * (x.key_size + x.value_size) for x in layers)
    return rows * rounded_capacity(capacity) * of_position * model.dtype.itemsize


def measured(engine: jspec.Engine, call: Callable[[], Sequence[A]]) -> tuple[Sequence[A], Row]:
    """The requests of a call, and figures of it; it runs once before, in which programs compile."""
    call()
    engine.release_cache()  # with all prompts and texts of the first call
    engine.restore_cache()
    before, begin = engine.stats, time.perf_counter()
    asked = call()
    seconds, after = time.perf_counter() - begin, engine.stats
    return asked, {
        "prefilled": after.prompt_tokens - before.prompt_tokens,
        "prefilled_share": (after.prompt_tokens - before.prompt_tokens)
        / sum(len(x.prompt) for x in asked),
        "first_token_ms": statistics.median(x.first_ms for x in asked),
        "tokens_per_s": sum(len(x.request.tokens) for x in asked) / seconds,
        "compilations": after.compilations - before.compilations,
        "seconds": seconds,
    }


def group(case: Case, settings: Settings) -> Iterator[Row]:
    """All answers to one prompt, and to as many prompts of the same length."""
    keep_programs()
    model, tokenizer = loaded(settings)
    prompt = long_texts(tokenizer, 1, case["S"])[0]
    capacity, params = case["S"] + case["new"], params_of(case["new"])
    for name in filter(settings.wants, NAMES):
        before = device_bytes("bytes_in_use")
        engine = jspec.Engine(model, slots=case["B"], capacity=capacity, draft=None)
        memory: Row = {"cache_bytes": cache_bytes(model, case["B"] + 1, capacity)}
        if before is not None:
            memory["engine_bytes"] = (device_bytes("bytes_in_use") or 0) - before
        prompts = [prompt] * case["B"]
        if name == APART:
            prompts = [begun_with(i, model, x) for i, x in enumerate(prompts)]
        asked, figures = measured(engine, partial(answered, engine, prompts, params))
        figures["last_begun_ms"] = max(x.first_ms for x in asked)
        del engine
        figures |= memory | checked(model, asked)
        yield row("group", named(case, settings), name, **figures)
        gc.collect()  # the engine's memory, before the next one takes it


def answered(
    engine: jspec.Engine, prompts: Sequence[list[int]], params: jspec.SamplingParams
) -> list[Asked]:
    """The requests of ``prompts``, queued at once, when all have ended."""
    asked = [Asked(prompt, params, engine) for prompt in prompts]
    engine.run()
    return asked


def conversations(case: Case, settings: Settings) -> Iterator[Row]:
    """Users who send the next message as soon as they have the answer."""
    keep_programs()
    model, tokenizer = loaded(settings)
    users, turns, message = case["B"], case["turns"], case["message"]
    whole = long_texts(tokenizer, users + 1, max(case["S"], turns * message))
    capacity = case["S"] + turns * (message + case["new"])
    for name in filter(settings.wants, NAMES):
        engine = jspec.Engine(model, slots=users, capacity=capacity, draft=None)
        call = partial(conversed, engine, whole, case, apart=name == APART)
        asked, figures = measured(engine, call)
        of_turn = [[x.first_ms for x in asked if x.turn == turn] for turn in range(turns)]
        figures |= {
            "first_turn_ms": statistics.median(of_turn[0]),
            "later_turns_ms": statistics.median(itertools.chain.from_iterable(of_turn[1:])),
            "p90_ms": float(np.percentile([x.first_ms for x in asked], 90)),
            "by_turn_ms": [statistics.median(x) for x in of_turn],
        }
        del engine, call
        figures |= checked(model, [x for x in asked if x.turn == turns - 1])
        yield row("conversations", named(case, settings), name, **figures)
        gc.collect()  # the engine's memory, before the next one takes it


@dataclasses.dataclass
class Turn(Asked):
    """A request of a conversation; ``turn`` counts from 0."""

    turn: int = 0


def conversed(
    engine: jspec.Engine, whole: Sequence[list[int]], case: Case, *, apart: bool
) -> list[Turn]:
    """All turns; ``whole[0]`` has the system prompt, and the others the messages of each user."""
    size, params = case["message"], params_of(case["new"])
    histories = dict.fromkeys(range(case["B"]), whole[0][: case["S"]])
    running: dict[int, Turn] = {}
    asked: list[Turn] = []
    while histories or running:
        for user, history in histories.items():
            turn = 1 + running.pop(user).turn if user in running else 0
            if turn < case["turns"]:
                prompt = [*history, *whole[1 + user][turn * size : (turn + 1) * size]]
                if apart:
                    prompt = begun_with(len(asked), engine.model, prompt)
                running[user] = Turn(prompt, params, engine, turn=turn)
                asked.append(running[user])
        engine.step()
        ended = {user: x for user, x in running.items() if x.request.finished}
        histories = {user: x.text for user, x in ended.items()}
    return asked


def named(case: Case, settings: Settings) -> dict[str, Any]:
    return {"model": settings.model.stem if settings.model else "bundled", **case}


GROUP = Benchmark(
    name="group",
    names=NAMES,
    rows=group,
    default=GROUP_CASE,
    gpu=[""],
    quick=[""],
    cpu=["B=4,S=300,new=16"],
)
CONVERSATIONS = Benchmark(
    name="conversations",
    names=NAMES,
    rows=conversations,
    default=CONVERSATIONS_CASE,
    gpu=[""],
    quick=[""],
    cpu=["B=2,turns=3,S=280,message=16,new=8"],
)
