"""Engines of one model that are made as requests need them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jspec.config import SamplingParams
from jspec.decode.checks import Prompt, asks_experts, logprobs_of, prompt_logprobs_of
from jspec.decode.engine import Engine, OnUpdate
from jspec.decode.options import DecodeOptions, ResolvedOptions
from jspec.decode.processors import completed
from jspec.decode.request import OnTokens, Request
from jspec.decode.rows import power_of_two, stops_of
from jspec.typing import Model

LEAST_ROOM = 512  # positions of an engine
STOP_TOKENS = 16  # of a request, that an engine has room for at least


class EnginePool:
    """Engines of several numbers of slots, replaced where requests need more room.

    Several requests share an engine that has as many slots or more. One request gets an engine of
    one slot, as idle slots cost a CPU time. Threads may share a pool: an engine is for one of them
    at a time. The slots of an engine share ``cache_blocks`` blocks, where it has several.

    Attributes:
        engines: by their slots.
    """

    def __init__(self, model: Model, options: DecodeOptions, cache_blocks: int | None = None):
        self.engines: dict[int, Engine] = {}
        self._model, self._options = model, options
        self._cache_blocks = cache_blocks
        self._lock = threading.RLock()

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        on_tokens: Sequence[OnTokens],
        *,
        slots: int,
    ) -> list[Request]:
        """Queue requests, which `check_request` accepts, at an engine; none where one is refused.

        Args:
            prompts: token ids of each.
            params: of each, with seeds.
            on_tokens: the callback of each.
            slots: of the engine, at least.
        """
        positions = max(len(x) + p.max_new_tokens for x, p in zip(prompts, params, strict=True))
        ends = self._model.config.stop_tokens
        stops = max(len(stops_of(p, ends)) for p in params)
        requests: list[Request] = []
        with self._lock:
            engine = self._with_room(slots, positions, stops, params)
            try:
                for ids, one, callback in zip(prompts, params, on_tokens, strict=True):
                    requests.append(engine.submit(ids, one, on_tokens=callback))
            except BaseException:
                self.cancel(requests)
                raise
        return requests

    def update(
        self,
        update: Callable[[], tuple[ResolvedOptions, DecodeOptions]],
        on_update: OnUpdate,
        blank: Model,
    ) -> None:
        """Replace the weights of all engines; ``on_update`` as in `Engine.update`.

        ``update()`` returns models with the new weights, and options with what was made of them. No
        engine has the earlier ones when it is called, but ``blank``, the model without arrays; if
        it raises, all engines end.
        """
        with self._lock, contextlib.ExitStack() as stack:
            self.engines = {size: x for size, x in self.engines.items() if not x.is_closed}
            del self._model
            for engine in self.engines.values():
                stack.enter_context(engine._device_work())
                engine._begin_update(on_update, blank)
            resolved, self._options = update()
            self._model = resolved.models.target
            for engine in self.engines.values():
                engine._end_update(resolved)

    def step(self, request: Request) -> None:
        """A step of the engine of a request, if it has not ended."""
        with self._lock:
            request.step()

    def cancel(self, requests: Sequence[Request]) -> None:
        """End those of the requests that have not ended."""
        with self._lock:
            for request in requests:
                request.cancel()

    def _with_room(
        self, slots: int, positions: int, stops: int, params: Sequence[SamplingParams]
    ) -> Engine:
        """An engine with so many slots or more, and room and processors for such requests.

        One of ``slots`` is made where there is none, in place of those that it can stand for and of
        those with old weights.
        """
        self.engines = {size: x for size, x in self.engines.items() if x.is_current}
        for size, engine in sorted(self.engines.items()):
            fits = size == slots or 1 < slots < size
            serves = completed(engine.processors, params) == engine.processors
            limits = asking(engine)
            serves &= recorded([*params, limits]) == recorded([limits])
            if fits and serves and engine.capacity >= positions and engine.stop_tokens >= stops:
                return engine
        processors, asked = self._options.get("processors", ()), list(params)
        if slots in self.engines:
            before = self.engines.pop(slots)
            positions, stops = max(positions, before.capacity), max(stops, before.stop_tokens)
            processors = before.processors
            asked.append(asking(before))
            del before  # its memory is free for the next one, unless requests decode in it
        capacity = room_for(positions)
        self.engines = {
            size: x
            for size, x in self.engines.items()
            if size == 1 or size > slots or x.capacity > capacity
        }
        options: DecodeOptions = {**self._options, "processors": completed(processors, params)}
        self.engines[slots] = Engine(
            self._model,
            slots=slots,
            capacity=capacity,
            stop_tokens=max(STOP_TOKENS, power_of_two(stops)),
            cache_blocks=self._cache_blocks if slots > 1 else None,
            **recorded(asked),
            **options,
        )
        return self.engines[slots]


def asking(engine: Engine) -> SamplingParams:
    """Parameters that ask for all that the engine can give."""
    return SamplingParams(
        logprobs=engine.logprobs,
        prompt_logprobs=engine.prompt_logprobs,
        routed_experts=engine.routed_experts,
    )


def recorded(params: Sequence[SamplingParams]) -> dict[str, Any]:
    """The arguments by which an `Engine` gives what ``params`` ask for."""
    return {
        "logprobs": logprobs_of(params),
        "prompt_logprobs": prompt_logprobs_of(params),
        "routed_experts": asks_experts(params),
    }


def room_for(positions: int) -> int:
    """Positions of an engine for requests of so many: at most a fourth more, and few sizes."""
    eighth = max(power_of_two(positions), LEAST_ROOM) // 8
    return -(-max(positions, LEAST_ROOM) // eighth) * eighth
