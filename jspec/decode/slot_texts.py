"""Which text each slot of a running batch has, so that prompts that begin alike need no prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec.decode.request import Request

SHARED = 64  # tokens of a prefix from which on it is looked for: fewer are not worth a copy


class SlotText(NamedTuple):
    """The request whose keys and values a slot has, until another one takes the slot.

    Attributes:
        prompt: int32 ``[n]``: its prompt.
        first: The bytes of the prompt's first `SHARED` tokens, which are fast to compare.
        tokens: Its tokens, a list that grows while it decodes.
        prefilled: How many of both were prefilled, and not decoded.
    """

    prompt: np.ndarray
    first: bytes
    tokens: list[int]
    prefilled: int

    def cached(self, *, only_prefilled: bool) -> np.ndarray:
        """The tokens whose keys and values are in the slot and those of a prefill, int32 ``[n]``.

        The last token is fed by the next step. ``only_prefilled``: whether decoding computes others
        than a prefill.
        """
        if only_prefilled or not self.tokens:
            return np.append(self.prompt, np.array(self.tokens, np.int32))[: self.prefilled - 1]
        return np.append(self.prompt, np.array(self.tokens[:-1], np.int32))


class SlotTexts:
    """The texts of the slots of a running batch, those of requests that have ended included.

    Args:
        unit: A prompt starts from a multiple of so many tokens: of whole pages of the cache.
        only_prefilled: Whether decoding computes other keys and values than a prefill, as it does
            where it reads a selection of the context.
    """

    def __init__(self, unit: int, *, only_prefilled: bool) -> None:
        self._unit, self._only_prefilled = unit, only_prefilled
        self._texts: dict[int, SlotText] = {}  # by slot, the one that was filled last at the end

    def clear(self) -> None:
        """Forget all texts."""
        self._texts.clear()

    def forget(self, slot: int) -> None:
        """The slot has no text any more."""
        self._texts.pop(slot, None)

    def freeze(self, requests: Sequence[Request]) -> None:
        """The requests have left their slots, whose texts no longer grow with their tokens."""
        lists = {id(request._tokens) for request in requests}
        for slot, text in self._texts.items():
            if id(text.tokens) in lists:
                self._texts[slot] = text._replace(tokens=list(text.tokens))

    def fill(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """The ``requests`` are in ``slots`` from now on."""
        for slot, request in zip(slots, requests, strict=True):
            self._texts.pop(slot, None)
            prompt, first = request._prompt, request._prompt[:SHARED].tobytes()
            self._texts[slot] = SlotText(prompt, first, request._tokens, request._length)

    def by_age(self, slots: Sequence[int]) -> list[int]:
        """``slots``, those first that were filled longest ago: their texts are needed least."""
        order = {slot: at for at, slot in enumerate(self._texts)}
        return sorted(slots, key=lambda slot: order.get(slot, -1))

    def slot_with(self, prompt: np.ndarray) -> tuple[int, int]:
        """The slot that has the most first tokens of ``prompt``, and how many."""
        only, first = self._only_prefilled, prompt[:SHARED].tobytes()
        # Most texts begin otherwise, which is known without looking at their tokens.
        alike = ((slot, x) for slot, x in self._texts.items() if first.startswith(x.first))
        texts = ((slot, x.cached(only_prefilled=only)) for slot, x in alike)
        shared = ((slot, self.shared_tokens(prompt, text)) for slot, text in texts)
        return max(shared, key=lambda pair: pair[1], default=(0, 0))

    def shared_tokens(self, prompt: np.ndarray, cached: np.ndarray) -> int:
        """How many first tokens of ``prompt`` a row has that has ``cached``; 0 if they are few."""
        # One token at least is left, whose query selects what a guided draft reads.
        size = min(len(prompt) - 2, len(cached))
        if size < SHARED:
            return 0
        differ = prompt[:size] != cached[:size]
        count = int(differ.argmax()) if differ.any() else size
        # The page after them may summarise positions that the prompt does not have.
        count -= count % self._unit
        return count if count >= SHARED else 0
