"""A request of an engine, and what its caller reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from jspec.config import SamplingParams
from jspec.decode.generation import tokens_to_keep

if TYPE_CHECKING:
    from jspec.decode.engine import Engine

OnTokens = Callable[[tuple[int, ...]], bool | int | None]


class Request:
    """A prompt that `Engine.submit` queued, and the tokens generated for it.

    Iterating gives its tokens one by one, and drives the engine while it waits for the next. A
    request keeps all of its tokens, so that they can be read late and by several readers.

    Attributes:
        params: The request's settings; they have a seed also where none was given.
        finished: Why it ended, None until then: ``stop``, ``length``, ``cancelled``, ``error`` (its
            callback raised ``error``) or ``interrupted`` (the engine ended).
        error: What its callback raised, or what ended the engine.
        prompt_tokens: Tokens of its prompt.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: np.ndarray,
        params: SamplingParams,
        stops: tuple[int, ...],
        on_tokens: OnTokens | None,
    ) -> None:
        self.params = params
        self.finished: str | None = None
        self.error: BaseException | None = None
        self.prompt_tokens = len(prompt)
        self._engine: Engine | None = engine
        self._prompt: np.ndarray | None = prompt
        self._stops, self._on_tokens = frozenset(stops), on_tokens
        self._tokens: list[int] = []

    def __repr__(self) -> str:
        state = self.finished or "in the engine"
        return f"Request({self.prompt_tokens} prompt tokens, {len(self._tokens)} new, {state})"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._tokens)

    @property
    def _left(self) -> int:
        """Tokens that it may still get."""
        return self.params.max_new_tokens - len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        at = 0
        while True:
            while at < len(self._tokens):
                yield self._tokens[at]
                at += 1
            if self._engine is None:
                break
            self._engine.step()
        self._raise()

    def result(self) -> tuple[int, ...]:
        """All tokens; drives the engine until the request has ended.

        Raises what its callback raised.
        """
        while self._engine is not None:
            self._engine.step()
        self._raise()
        return self.tokens

    def cancel(self) -> None:
        """End the request; it keeps the tokens that it has. One that has ended stays as it is."""
        if self._engine is not None:
            self._engine._remove(self)
            self._end("cancelled")

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _take(self, new: tuple[int, ...], *, is_last: bool) -> int:
        """Append the ``new`` tokens of a chunk; returns how many of them count."""
        if self._engine is None:  # cancelled by a callback of this chunk
            return 0
        keep_count = None
        if self._on_tokens is not None:
            try:
                keep_count = tokens_to_keep(self._on_tokens(new), len(new))
            except Exception as error:
                if self._engine is None:
                    return 0
                self.error = error
        if self._engine is None:
            return 0
        new = new[:keep_count]
        self._tokens.extend(new)
        if self.error is not None:
            self._end("error")
        elif keep_count is not None:
            self._end("stop")
        elif is_last:
            self._end("stop" if new[-1] in self._stops else "length")
        return len(new)

    def _end(self, why: str) -> None:
        # A request may outlive the engine: it must not hold it, nor what its callback holds.
        self.finished, self._engine, self._prompt, self._on_tokens = why, None, None, None
