"""The scheduler of an engine: its queue, and the order in which prompts are prefilled."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from jspec.decode.request import Request
from jspec.decode.runner import Runner
from jspec.decode.slot_prefill import MAX_REQUESTS, SlotPrefill
from jspec.decode.state import DecodeState
from jspec.typing import Array

LOOKAHEAD_REQUESTS = 64  # first requests of the queue among which short prompts may overtake
MAX_PIECES = 4  # most full pieces of an engine's step: decoding slots wait for them


class Scheduler:
    """Queues requests, and prefills their prompts for the slots of ``runner``.

    A step of the engine prefills up to ``prefill.pass_tokens`` for each free slot, for
    `MAX_PIECES` at most and for one in any case. One long prompt may take all of them.

    Prompts are prefilled in the order in which they came, except that a long one shares its steps:
    while more than a piece of it is left, every other step belongs to the short prompts of the
    queue, if a slot is free. So a long prompt takes at most twice as many steps, whatever comes,
    and short ones do not wait for its end.

    Attributes:
        admitted: Requests whose prompts were prefilled.
        prompt_tokens: Tokens that were prefilled for them, without those that a row had.
    """

    def __init__(self, runner: Runner, prefill: SlotPrefill) -> None:
        self.prefill = prefill
        self.admitted = self.prompt_tokens = 0
        self._runner = runner
        self._queue: OrderedDict[Request, None] = OrderedDict()
        self._incoming: Request | None = None  # whose prompt is in the row of ``prefill``
        self._was_overtaken = False  # in the last step

    @property
    def busy(self) -> bool:
        """Whether a request is not in a slot yet."""
        return bool(self._queue) or self._incoming is not None

    @property
    def can_prefill(self) -> bool:
        """Whether a step can prefill tokens of a request."""
        if self._incoming is not None:
            request, needs_slot = self._incoming, self.prefill.current_row.left == 0
        elif self._queue:
            request = next(iter(self._queue))
            needs_slot = self._is_short(request)
        else:
            return False
        return not needs_slot or (bool(self._runner.free) and self._fits(request))

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

    def resume(self, requests: Sequence[Request]) -> None:
        """Queue requests again, first of all, which have been in slots."""
        self.prefill.texts.freeze(requests)
        for request in reversed(requests):
            self._queue[request] = None
            self._queue.move_to_end(request, last=False)
        self.admitted -= len(requests)

    def restart(self) -> None:
        """Queue the request again, first of all, whose prompt is being prefilled."""
        if (request := self._incoming) is not None:
            # In this order, Ctrl-C between the two loses no request.
            self._queue[request] = None
            self._queue.move_to_end(request, last=False)
            self._incoming = None

    def close(self) -> None:
        """Remove all requests, and free the memory of the device."""
        self._queue.clear()
        self._incoming = None
        del self.prefill

    def prefill_prompts(self) -> Array:
        """Prefill prompts, up to the limit of tokens of a step; complete ones go into slots.

        The device does all of it after the chunk of decoding steps that is running. Returns an
        array to wait for, which is ready when all of it is done.
        """
        prefill, spent_tokens = self.prefill, 0
        token_limit = prefill.pass_tokens * min(MAX_PIECES, max(1, len(self._runner.free)))
        is_long = self._incoming is not None and prefill.current_row.left > prefill.chunk
        if is_long and not self._was_overtaken:
            spent_tokens = self._prefill_short(0, token_limit, overtaking=True)
        self._was_overtaken = spent_tokens > 0
        while True:
            if self._incoming is None:
                spent_tokens = self._prefill_short(spent_tokens, token_limit)
                if (request := self._begin_next()) is None:
                    break
            else:
                request = self._incoming
            while prefill.current_row.left > 0:
                piece = prefill.piece_of(prefill.current_row)
                # The first piece always fits: none has more than ``prefill.chunk`` tokens.
                if spent_tokens + piece > token_limit:
                    break
                spent_tokens += piece
                prefill.advance(prefill.current_row)
            if prefill.current_row.left > 0 or not self._runner.free:
                break
            if not self._fits(request):
                break
            slot = prefill.texts.by_age(self._runner.free)[0]
            self._runner.reserve([slot], [request], prefill.beginnings([slot], [request]))
            state = prefill.insert(self._runner.state, slot, request)
            self._fill(state, [slot], [request])
            self._incoming = None
        return prefill.completion_of(self._runner.state, prefill.current_row)

    def _prefill_short(
        self, spent_tokens: int, token_limit: int, *, overtaking: bool = False
    ) -> int:
        """Prefill the short prompts that are next in the queue, up to ``token_limit`` in all.

        ``spent_tokens``: tokens of the step by now, padding included; returns those after it.
        ``overtaking``: whether they may overtake long ones in the queue.
        """
        choose = filter if overtaking else itertools.takewhile
        while free := self.prefill.texts.by_age(self._runner.free):
            candidates = choose(self._is_short, itertools.islice(self._queue, LOOKAHEAD_REQUESTS))
            group = list(itertools.islice(candidates, min(len(free), MAX_REQUESTS)))
            beginnings = self.prefill.beginnings(free[: len(group)], group)
            group = group[: self._runner.fitting(group, beginnings)]
            if not group:
                break
            prompts = [request._known for request in group]
            count, rows, size = self.prefill.group(prompts)
            # The first pass always fits: none has more than ``prefill.pass_tokens``.
            if spent_tokens + rows * size > token_limit:
                break
            spent_tokens += rows * size
            group, slots, prompts = group[:count], free[:count], prompts[:count]
            self._runner.reserve(slots, group, beginnings[:count])
            state = self.prefill.fill(self._runner.state, rows, size, slots, group)
            self._fill(state, slots, group)
            different = {prompt.tobytes(): len(prompt) for prompt in prompts}
            self.prompt_tokens += sum(different.values())
        return spent_tokens

    def _begin_next(self) -> Request | None:
        """The next request of the queue, now being prefilled; None where it waits for a slot."""
        request = next(iter(self._queue), None)
        if request is None or self._is_short(request):
            return None
        # In this order, Ctrl-C between the two loses no request.
        self._incoming = request
        del self._queue[request]
        self.prompt_tokens += self.prefill.begin(
            request._known, self._runner.state, records=request._needs_prompt_record
        )
        return request

    def _fits(self, request: Request) -> bool:
        """Whether there are blocks for a request, if a slot is free."""
        slots = self._runner.free[:1]
        return bool(self._runner.fitting([request], self.prefill.beginnings(slots, [request])))

    def _is_short(self, request: Request) -> bool:
        return not request._needs_prompt_record and self.prefill.is_short(request._known)

    def _fill(self, state: DecodeState, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Move requests into slots, which ``state`` has."""
        # In this order, Ctrl-C between the two loses no request.
        self._runner.fill(state, slots, requests)
        for request in requests:
            self._queue.pop(request, None)  # gone if it was cancelled while a program compiled
        self.admitted += len(requests)
