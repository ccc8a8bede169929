"""The scheduler of an engine: its queue, and the order in which prompts are prefilled."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.chunked_prefill import ChunkedPrefill
from jspec.decode.request import Request
from jspec.decode.runner import Runner
from jspec.decode.short_prompts import MAX_ROWS, ShortPrompts
from jspec.decode.state import DecodeState
from jspec.typing import Array

LOOKAHEAD_REQUESTS = 64  # first requests of the queue among which short prompts may overtake
PROMPTS = 4  # most pieces of an engine's step: decoding slots wait for them
PASSES = 2  # most large passes of an engine's step


class Scheduler:
    """Queues requests, and prefills their prompts for the slots of ``runner``.

    A step of the engine prefills up to ``chunk`` tokens for each free slot, for `PROMPTS` at most
    and for one in any case; where passes over short prompts are large, up to the tokens of `PASSES`
    of them. One long prompt may take all of them.

    Prompts are prefilled in the order in which they came, except that a long one shares its steps:
    while more than ``chunk`` tokens of it are left, every other step belongs to prompts of at most
    ``chunk`` tokens, if a slot is free. So a long prompt takes at most twice as many steps,
    whatever comes, and short ones do not wait for its end.

    Attributes:
        admitted: Requests whose prompts were prefilled.
        prompt_tokens: Their tokens, without those of shared prefixes.
    """

    def __init__(
        self, runner: Runner, prefill: ChunkedPrefill, short: ShortPrompts, chunk: int
    ) -> None:
        self.prefill, self.short = prefill, short
        self.admitted = self.prompt_tokens = 0
        self._runner, self._chunk = runner, chunk
        self._queue: OrderedDict[Request, None] = OrderedDict()
        self._incoming: Request | None = None  # whose prompt is being prefilled
        self._was_overtaken = False  # in the last step

    @property
    def busy(self) -> bool:
        """Whether a request is not in a slot yet."""
        return bool(self._queue) or self._incoming is not None

    @property
    def can_take_up(self) -> bool:
        """Whether a step can prefill tokens of a request."""
        if self._incoming is None:
            return bool(self._queue) and (not self._first_needs_no_row or bool(self._runner.free))
        return not self.prefill.ready or bool(self._runner.free)

    @property
    def requests(self) -> list[Request]:
        """All requests that are not in a slot."""
        incoming = [] if self._incoming is None else [self._incoming]
        return [*incoming, *self._queue]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request, if it is queued or being prefilled."""
        self._queue.pop(request, None)
        if self._incoming is request:
            self._incoming = None

    def close(self) -> None:
        """Remove all requests, and free the memory of the device."""
        self._queue.clear()
        self._incoming = None
        del self.prefill

    def warm(self) -> None:
        """Compile what any prompts may need. No request may be queued or in a slot."""
        self.prefill.warm()
        placeholder = SamplingParams(seed=0)
        state = self.prefill.insert(self._runner.state, 0, placeholder)
        self._runner.state = self.short.warmed(state)
        self.prefill.mark(self._runner.state)

    def take_up(self) -> Array:
        """Prefill pieces of prompts up to the limit of a step; complete prompts go into slots.

        All of it runs after the running chunk. Returns an array that is ready when it is done.
        """
        token_limit = self._chunk * min(PROMPTS, max(1, len(self._runner.free)))
        if self.short.has_large_passes:
            token_limit = PASSES * self.short.tokens
        spent = 0 if self._was_overtaken else self._overtake(token_limit)
        self._was_overtaken = spent > 0
        while True:
            group, size = self._together(self._queue) if self._incoming is None else ([], 0)
            if group:
                tokens = self.short.rows(size) * size
                if spent and spent + tokens > token_limit:
                    break
                spent += tokens
                self._take_up_together(group, size)
                continue
            if self._first_needs_no_row or (request := self._next()) is None:
                break
            while not self.prefill.ready:
                piece = self.prefill.piece
                if spent and spent + piece > token_limit:
                    break
                spent += piece
                self.prefill.advance()
            if not self.prefill.ready or not self._runner.free:
                break
            slot = self._runner.free[0]
            state = self.prefill.insert(self._runner.state, slot, request.params)
            self._runner.fill(state, [slot], [request])
            self._incoming = None
            self.admitted += 1
        return self.prefill.mark(self._runner.state)

    def _overtake(self, token_limit: int) -> int:
        """Prefill short prompts of up to ``token_limit`` tokens before a long one goes on.

        Returns their tokens, padding included.
        """
        spent = 0
        if self._incoming is None or self.prefill.left <= self._chunk:
            return spent
        while some := self._short_ones():
            group, size = self._together(some)
            if not group and (size := self._size_of(some[0])):
                group = some[:1]
            tokens = self.short.rows(size) * size if group else self._tokens_of(some[0])
            if spent and spent + tokens > token_limit:
                break
            spent += tokens
            if group:
                self._take_up_together(group, size)
            else:
                self._take_up_whole(some[0])
        return spent

    def _short_ones(self) -> list[Request]:
        """The first requests of the queue that may overtake, at most one per free slot."""
        candidates = itertools.islice(self._queue, LOOKAHEAD_REQUESTS)
        short = filter(lambda x: self._size_of(x) or self._tokens_of(x), candidates)
        return list(itertools.islice(short, len(self._runner.free)))

    def _size_of(self, request: Request) -> int:
        """The size of a pass that puts the prompt into a slot; 0 where none is large enough."""
        prompt = _prompt(request)
        return self.short.size_of(len(prompt)) if self.prefill.is_fresh(prompt) else 0

    def _tokens_of(self, request: Request) -> int:
        """Tokens of the pieces that prefill the prompt in a row, padding included.

        0 where the prompt is longer than a piece may be, or there is no row.
        """
        return self.prefill.tokens_of(_prompt(request)) if self.prefill.overtakes else 0

    def _together(self, waiting: Iterable[Request]) -> tuple[list[Request], int]:
        """The first requests whose prompts fit into one pass, and its size."""
        some = list(itertools.islice(waiting, min(len(self._runner.free), MAX_ROWS)))
        prompts = itertools.takewhile(self.prefill.is_fresh, map(_prompt, some))
        count, size = self.short.together([len(prompt) for prompt in prompts])
        return some[:count], size

    def _take_up_together(self, group: Sequence[Request], size: int) -> None:
        """Put requests into slots by one pass over their prompts."""
        slots = self._runner.free[: len(group)]
        prompts, params = [_prompt(x) for x in group], [x.params for x in group]
        state = self.short.take_up(self._runner.state, size, slots, prompts, params)
        self._fill(state, slots, group)
        self.prompt_tokens += sum(map(len, prompts))

    def _take_up_whole(self, request: Request) -> None:
        """Put a request into a slot while another prompt is being prefilled."""
        slot, prompt = self._runner.free[0], _prompt(request)
        self.prompt_tokens += self.prefill.tokens_after_prefix(prompt)
        state = self.prefill.overtake(self._runner.state, slot, prompt, request.params)
        self._fill(state, [slot], [request])

    def _fill(self, state: DecodeState, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Move requests of the queue into slots, which ``state`` has."""
        # In this order, Ctrl-C between the two loses no request.
        self._runner.fill(state, slots, requests)
        for request in requests:
            self._queue.pop(request, None)  # gone if it was cancelled while a program compiled
        self.admitted += len(requests)

    @property
    def _first_needs_no_row(self) -> bool:
        """Whether nothing is being prefilled, and one pass can put the next prompt into a slot."""
        is_next = self._incoming is None and self.short.has_large_passes and bool(self._queue)
        return is_next and self._size_of(next(iter(self._queue))) > 0

    def _next(self) -> Request | None:
        """The request that is being prefilled; the next one of the queue begins if none is."""
        if self._incoming is None and self._queue:
            # In this order, Ctrl-C between the two loses no request.
            self._incoming = next(iter(self._queue))
            del self._queue[self._incoming]
            prompt = _prompt(self._incoming)
            self.prompt_tokens += self.prefill.tokens_after_prefix(prompt)
            self.prefill.begin(prompt)
        return self._incoming


def _prompt(request: Request) -> np.ndarray:
    """The prompt of a request that has not ended."""
    assert request._prompt is not None
    return request._prompt
