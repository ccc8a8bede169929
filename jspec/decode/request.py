"""A request: its prompt, its settings, and the tokens that its caller reads."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.logprobs import Logprobs, TokenScores
from jspec.decode.state import PromptRecord

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
            callback raised ``error``), ``aborted`` (by an update of the weights) or ``interrupted``
            (the engine ended).
        error: What its callback raised, or what ended the engine.
        prompt_tokens: Tokens of its prompt.
        steps: Verification steps of its tokens.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        stops: tuple[int, ...],
        on_tokens: OnTokens | None,
        engine: Engine | None = None,  # None in `jspec.generate`, which drives itself
    ) -> None:
        if on_tokens is not None and not callable(on_tokens):
            raise TypeError(f"on_tokens={shown(on_tokens)} must be callable, or None")
        self.params = params
        self.finished: str | None = None
        self.error: BaseException | None = None
        self.prompt_tokens = len(prompt)
        self._engine = engine
        self._prompt: Any = prompt  # int32 ``[n]``, None once it has ended
        self._stops, self._on_tokens = frozenset(stops), on_tokens
        self._tokens: list[int] = []
        self._versions: list[int] = []  # of the weights that made each token
        self._version = 0  # of the weights that make its next tokens
        # What it asked for of the tokens of each chunk, those after its last one included:
        # log-probabilities and experts.
        self._scores: list[tuple[Any, Any]] = []
        self._new_scores: Any = None  # the same of the chunk that is read
        # Of its prompt, as `Row` has it, until its first tokens; None before its prefill.
        self._prompt_record: Any = None
        self._offered: tuple[int, ...] = ()  # what the running callback was called with
        self.steps = 0

    def __repr__(self) -> str:
        state = self.finished or "in the engine"
        return f"Request({self.prompt_tokens} prompt tokens, {len(self._tokens)} new, {state})"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._tokens)

    @property
    def versions(self) -> tuple[int, ...]:
        """For each token, the `Engine.version` of the weights that made it."""
        return tuple(self._versions)

    @property
    def _known(self) -> np.ndarray:
        """Its prompt and tokens, int32 ``[n]``, which prefill takes."""
        new = np.array(self._tokens, np.int32)
        return np.append(self._prompt, new) if len(new) else self._prompt

    @property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of the tokens so far, numpy arrays; None unless ``params`` ask."""
        count = self.params.logprobs
        if count is None:
            return None
        whole = Logprobs.joined([logprobs for logprobs, _ in self._scores], count)
        return jax.tree.map(lambda x: x[: len(self._tokens)], whole)

    @property
    def prompt_logprobs(self) -> TokenScores | None:
        """Log-probabilities of its prompt's tokens but the first, numpy arrays.

        None before its prompt is prefilled, and unless ``params`` ask.
        """
        return self._of_prompt().logprobs

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts of its prompt's tokens and its tokens so far, but the last.

        An int32 array ``[n - 1, mixtures, c]`` of numpy: of each token those that it took in each
        mixture, best first. None before its prompt is prefilled, and unless ``params`` ask.
        """
        of_prompt = self._of_prompt().routed_experts
        if of_prompt is None:
            return None
        whole = np.concatenate([of_prompt, *(experts for _, experts in self._scores)])
        return whole[: len(of_prompt) + len(self._tokens)]

    def _of_prompt(self) -> PromptRecord:
        """What it asked for of its prompt, off the device; nothing before it is prefilled."""
        if isinstance(self._prompt_record, list):
            self._prompt_record = PromptRecord.joined(self._prompt_record, 0).asked(self.params)
        return self._prompt_record or PromptRecord()

    @property
    def _needs_prompt_record(self) -> bool:
        """Whether its prompt must be prefilled, whatever rows have."""
        asks = self.params.prompt_logprobs is not None or self.params.routed_experts
        return asks and self._prompt_record is None

    @property
    def _length(self) -> int:
        """Positions of its prompt and tokens."""
        return self.prompt_tokens + len(self._tokens)

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
            self.step()
        if self.error is not None:
            raise self.error

    def step(self) -> None:
        """`Engine.step`, unless the request has ended."""
        if self._engine is not None:
            self._engine.step()

    def result(self) -> tuple[int, ...]:
        """All tokens; drives the engine until the request has ended.

        Raises what its callback raised.
        """
        collections.deque(self, maxlen=0)
        return self.tokens

    def cancel(self) -> None:
        """End the request; it keeps the tokens that it has, and those of the running callback.

        One that has ended stays as it is.
        """
        if self._engine is not None:
            self._append(self._offered)
            self._engine._remove(self)
            self._end("cancelled")

    def _ask(self, new: tuple[int, ...]) -> int | None:
        """How many of ``new`` tokens are its last ones, by its callback; None where it goes on."""
        if self._on_tokens is None:
            return None
        self._offered = new
        try:
            answer = self._on_tokens(new)
        finally:
            self._offered = ()
        if answer is None or isinstance(answer, (bool, np.bool_)):
            return len(new) if answer else None
        keep_count = whole_number(answer)
        if keep_count is None or not 0 <= keep_count <= len(new):
            raise ValueError(
                f"on_tokens returned {shown(answer)} for {len(new)} tokens; return how many of "
                "them the row keeps as its last ones, True for all, or None to go on"
            )
        return keep_count

    def _take(self, new: tuple[int, ...], keep_count: int | None, *, is_last: bool) -> None:
        """Append the first ``keep_count`` of ``new`` tokens, None for all, and end where they say.

        ``is_last``: whether a stop token or the limit ended it on the device.
        """
        self._append(new[:keep_count])
        if self.error is not None:
            self._end("error")
        elif keep_count is not None:
            self._end("stop")
        elif is_last:
            self._end("stop" if new[-1] in self._stops else "length")

    def _append(self, new: tuple[int, ...]) -> None:
        if new:
            self._of_prompt()  # frees memory of the device, where this is ready by now
        self._tokens.extend(new)
        self._versions.extend([self._version] * len(new))
        if new and self._new_scores is not None:
            self._scores.append(self._new_scores)

    def _end(self, why: str) -> None:
        # A request may outlive the engine: it must not hold it, nor what its callback holds.
        self.finished, self._engine, self._prompt, self._on_tokens = why, None, None, None
        self._new_scores = None
