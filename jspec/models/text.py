"""The text of a row while it is decoded: complete characters only, cut before a stop text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jspec.config import SamplingParams
from jspec.models.tokenizer import Tokenizer


class RowText:
    """Converts the tokens of a row to text piece by piece.

    The texts of the prompt and of the row, joined, are the text of all tokens. A stop text is
    matched in the text that is shown; one that contains a special token is matched in the text with
    special tokens written out. Text that may be the beginning of a stop text stays pending until
    later tokens decide.

    Args:
        tokenizer: the model's tokenizer.
        stop: texts that end the row.
        hidden: tokens that are not shown, in addition to special ones: those that end the row.
        prompt: token ids before the row.

    Attributes:
        text: the text so far.
        tokens: the tokens so far.
        stopped: whether a stop text ended the row.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        hidden: Iterable[int] = (),
        prompt: Iterable[int] = (),
    ):
        self._decode = tokenizer.stream(prompt)
        self._special = tokenizer.special_ids
        self._hidden = frozenset(hidden)
        self._stop = [
            (text, any(special in text for special in self._special.values())) for text in stop
        ]
        self._spells_special = any(has_special for _, has_special in self._stop)
        self._pending = ""
        self._is_shown: list[bool] = []  # for each character of the pending text
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
            special = self._special.get(token)
            is_shown = special is None and token not in self._hidden
            if is_shown or self._spells_special:
                text = self._decode([token], False) if special is None else special
                shown += self._add(text, is_shown=is_shown)
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
        return rest if self.stopped else rest + self._release(len(self._pending))

    def _add(self, text: str, *, is_shown: bool = True) -> str:
        """Append ``text``; returns what can no longer be part of a stop text."""
        self._pending += text
        self._is_shown += [is_shown] * len(text)
        every = range(len(self._pending))
        shown_at = [at for at in every if self._is_shown[at]]
        shown = "".join(self._pending[at] for at in shown_at)
        begins, cuts = [], [len(self._pending)]
        for stop, has_special in self._stop:
            whole, at = (self._pending, every) if has_special else (shown, shown_at)
            begin = whole.find(stop)
            if begin >= 0:
                begins.append(at[begin])
            elif overlap := _overlap(whole, stop):
                cuts.append(at[-overlap])
        self.stopped = bool(begins)
        ready = self._release(min(begins or cuts))
        if self.stopped:
            self._pending, self._is_shown = "", []
        return ready

    def _release(self, count: int) -> str:
        """Move the first ``count`` pending characters to the text; returns those that are shown."""
        ready = "".join(
            character
            for character, is_shown in zip(
                self._pending[:count], self._is_shown[:count], strict=True
            )
            if is_shown
        )
        self._pending, self._is_shown = self._pending[count:], self._is_shown[count:]
        self.text += ready
        return ready


def with_stops(params: SamplingParams, stop: Sequence[str], tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with the stop texts that are a token: these end a row in the step itself.

    Others are found by `RowText` between chunks.
    """
    single = {token for text in stop if (token := tokenizer.token_of(text)) is not None}
    return dataclasses.replace(params, stop_tokens=tuple(sorted({*params.stop_tokens, *single})))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
