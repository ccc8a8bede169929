"""The scheduler of an engine: its queue, and the order in which prompts are prefilled."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.batch import Batch
from jspec.decode.chunked_prefill import ChunkedPrefill
from jspec.decode.request import Request
from jspec.decode.short_prompts import MOST_ROWS, ShortPrompts
from jspec.decode.state import DecodeState
from jspec.typing import Array

SEEN = 64  # requests of the queue among which short prompts are looked for
PROMPTS = 4  # pieces of a turn at most: slots that are taken wait for as many
PASSES = 2  # wide passes of a turn at most


class Scheduler:
    """Queues requests, and prefills their prompts for the slots of ``batch``.

    A turn has ``chunk`` tokens for each slot that is free, up to `PROMPTS`, and for one in any
    case; where passes over short prompts are wide, it has those of `PASSES`. One long prompt may
    take all of them.

    In the order in which they came, but a long prompt shares turns: while more than ``chunk`` is
    left of it, every other turn belongs to prompts of at most ``chunk`` tokens, if a slot is free.
    So it takes twice as many turns at most, whatever comes, and keeps no short one waiting for its
    end.

    ``admitted``: requests whose prompts were taken up; ``prompt_tokens``: their tokens, without
    those of shared prefixes.
    """

    def __init__(
        self, batch: Batch, prefill: ChunkedPrefill, short: ShortPrompts, chunk: int
    ) -> None:
        self.prefill, self.short = prefill, short
        self.admitted = self.prompt_tokens = 0
        self._batch, self._chunk = batch, chunk
        self._queue: OrderedDict[Request, None] = OrderedDict()
        self._incoming: Request | None = None  # whose prompt is at work
        self._was_overtaken = False  # in the last turn

    @property
    def busy(self) -> bool:
        """Whether a request is in no slot yet."""
        return bool(self._queue) or self._incoming is not None

    @property
    def can_take_up(self) -> bool:
        """Whether one of them would get on in a turn."""
        if self._incoming is None:
            return bool(self._queue) and (not self._first_needs_no_row or bool(self._batch.free))
        return not self.prefill.ready or bool(self._batch.free)

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        own = [] if self._incoming is None else [self._incoming]
        return [*own, *self._queue]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue[request] = None

    def remove(self, request: Request) -> None:
        """Let go of a request, if it is here."""
        self._queue.pop(request, None)
        if self._incoming is request:
            self._incoming = None

    def close(self) -> None:
        """Let go of all, and free the memory of the device."""
        self._queue.clear()
        self._incoming = None
        del self.prefill

    def warm(self) -> None:
        """Compile what any prompts may need. Nobody may be here or in a slot."""
        self.prefill.warm()
        nobody = SamplingParams(seed=0)
        state = self.prefill.insert(self._batch.state, 0, nobody)
        self._batch.state = self.short.warmed(state)
        self.prefill.mark(self._batch.state)

    def take_up(self) -> Array:
        """Pieces of prompts up to the limit of a turn; those that are whole go into slots.

        All of it comes behind the chunk at work. Returns an array that is there when it is done.
        """
        most = self._chunk * min(PROMPTS, max(1, len(self._batch.free)))
        if self.short.is_wide:
            most = PASSES * self.short.tokens
        spent = 0 if self._was_overtaken else self._overtake(most)
        self._was_overtaken = spent > 0
        while True:
            group, size = self._together(self._queue) if self._incoming is None else ([], 0)
            if group:
                tokens = self.short.rows(size) * size
                if spent and spent + tokens > most:
                    break
                spent += tokens
                self._take_up_together(group, size)
                continue
            if self._first_needs_no_row or (request := self._next()) is None:
                break
            while not self.prefill.ready:
                piece = self.prefill.piece
                if spent and spent + piece > most:
                    break
                spent += piece
                self.prefill.advance()
            if not self.prefill.ready or not self._batch.free:
                break
            slot = self._batch.free[0]
            state = self.prefill.insert(self._batch.state, slot, request.params)
            self._batch.fill(state, [slot], [request])
            self._incoming = None
            self.admitted += 1
        return self.prefill.mark(self._batch.state)

    def _overtake(self, most: int) -> int:
        """Take up short prompts of ``most`` tokens ahead of a long one at work; their tokens,
        padding included."""
        spent = 0
        if self._incoming is None or self.prefill.left <= self._chunk:
            return spent
        while some := self._short_ones():
            group, size = self._together(some)
            if not group and (size := self._size_of(some[0])):
                group = some[:1]
            tokens = self.short.rows(size) * size if group else self._tokens_of(some[0])
            if spent and spent + tokens > most:
                break
            spent += tokens
            if group:
                self._take_up_together(group, size)
            else:
                self._take_up_whole(some[0])
        return spent

    def _short_ones(self) -> list[Request]:
        """The first requests of the queue that may overtake, as many as may go in."""
        seen = itertools.islice(self._queue, SEEN)
        short = filter(lambda x: self._size_of(x) or self._tokens_of(x), seen)
        return list(itertools.islice(short, len(self._batch.free)))

    def _size_of(self, request: Request) -> int:
        """The size of a pass that puts the prompt into a slot; 0 where none does."""
        prompt = _prompt(request)
        return self.short.size_of(len(prompt)) if self.prefill.is_fresh(prompt) else 0

    def _tokens_of(self, request: Request) -> int:
        """Tokens of the pieces that take up the prompt in a row, padding included; 0 where it is
        longer than a piece may be, or there is no row."""
        return self.prefill.tokens_of(_prompt(request)) if self.prefill.overtakes else 0

    def _together(self, waiting: Iterable[Request]) -> tuple[list[Request], int]:
        """The first requests whose prompts go into one pass, and its size."""
        some = list(itertools.islice(waiting, min(len(self._batch.free), MOST_ROWS)))
        prompts = itertools.takewhile(self.prefill.is_fresh, map(_prompt, some))
        count, size = self.short.together([len(prompt) for prompt in prompts])
        return some[:count], size

    def _take_up_together(self, group: Sequence[Request], size: int) -> None:
        """Put requests into slots by one pass over their prompts."""
        slots = self._batch.free[: len(group)]
        prompts, params = [_prompt(x) for x in group], [x.params for x in group]
        state = self.short.take_up(self._batch.state, size, slots, prompts, params)
        self._fill(state, slots, group)
        self.prompt_tokens += sum(map(len, prompts))

    def _take_up_whole(self, request: Request) -> None:
        """Put a request into a slot while another prompt is at work."""
        slot, prompt = self._batch.free[0], _prompt(request)
        self.prompt_tokens += self.prefill.behind_prefix(prompt)
        state = self.prefill.overtake(self._batch.state, slot, prompt, request.params)
        self._fill(state, [slot], [request])

    def _fill(self, state: DecodeState, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Move requests of the queue into slots, which ``state`` has."""
        # In this order, Ctrl-C between the two loses nobody.
        self._batch.fill(state, slots, requests)
        for request in requests:
            self._queue.pop(request, None)  # gone if it was cancelled while a program compiled
        self.admitted += len(requests)

    @property
    def _first_needs_no_row(self) -> bool:
        """Whether no prompt is at work, and the next one goes in by a pass once a slot is free."""
        is_next = self._incoming is None and self.short.is_wide and bool(self._queue)
        return is_next and self._size_of(next(iter(self._queue))) > 0

    def _next(self) -> Request | None:
        """The request whose prompt is at work, or is from now on."""
        if self._incoming is None and self._queue:
            # In this order, Ctrl-C between the two loses nobody.
            self._incoming = next(iter(self._queue))
            del self._queue[self._incoming]
            prompt = _prompt(self._incoming)
            self.prompt_tokens += self.prefill.behind_prefix(prompt)
            self.prefill.begin(prompt)
        return self._incoming


def _prompt(request: Request) -> np.ndarray:
    """The prompt of a request that has not ended."""
    assert request._prompt is not None
    return request._prompt
