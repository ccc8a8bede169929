"""The text of a row while it is decoded: complete characters only, cut before a stop text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jspec.config import SamplingParams
from jspec.models.tokenizer import Tokenizer


class RowText:
    """Converts the tokens of a row to text piece by piece.

    Text that may be the beginning of a stop text stays pending until later tokens decide.

    Attributes:
        text: the text so far.
        tokens: the tokens so far.
        stopped: whether a stop text ended the row.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], special: frozenset[int]):
        self._decode = tokenizer.stream()
        self._stop = stop
        self._special = special
        self._pending = ""
        self.text = ""
        self.tokens: list[int] = []
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """New text of ``tokens``, which were committed in this order."""
        shown = ""
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            if token not in self._special:
                shown += self._add(self._decode([token], False))
        return shown

    def take(self, tokens: Sequence[int]) -> tuple[str, int | None]:
        """`feed`, and after how many of ``tokens`` the row ends; None where it goes on."""
        before = len(self.tokens)
        text = self.feed(tokens)
        return text, len(self.tokens) - before if self.stopped else None

    def close(self) -> str:
        """The pending text, after the last token."""
        if self.stopped:
            return ""
        rest = self._add(self._decode([], True))
        if not self.stopped:
            rest += self._pending
            self.text += self._pending
            self._pending = ""
        return rest

    def _add(self, new: str) -> str:
        self._pending += new
        stop_positions = [at for at in (self._pending.find(stop) for stop in self._stop) if at >= 0]
        if stop_positions:
            self.stopped = True
            ready, self._pending = self._pending[: min(stop_positions)], ""
        else:
            keep = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
            cut = len(self._pending) - keep
            ready, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += ready
        return ready


def with_stops(params: SamplingParams, stop: Sequence[str], tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with the stop texts that are a token: these end a row in the step itself.

    Longer ones are found by `RowText` between chunks.
    """
    encoded = [tokenizer.encode(text, special=False) for text in stop]
    single = {ids[0] for ids in encoded if len(ids) == 1}
    return dataclasses.replace(params, stop_tokens=tuple(sorted({*params.stop_tokens, *single})))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
