"""The blocks of an engine's cache: which slots have them, as the host knows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from jspec.cache.layout import BLOCK
from jspec.config import positive, shown
from jspec.decode.draft import Chain, Drafter, GuidedDraft, SelfDraft
from jspec.decode.on_mesh import is_on_mesh
from jspec.decode.options import ResolvedOptions
from jspec.decode.state import DecodeState
from jspec.policies import Dense, Streaming
from jspec.sharding import put


class Beginning(NamedTuple):
    """How the text of a slot begins: with the first ``tokens`` of what another ``slot`` has.

    ``is_new``: whether that one is filled together with it, and first.
    """

    slot: int = 0
    tokens: int = 0
    is_new: bool = False


class Blocks:
    """Which blocks the slots of a batch have, from their first positions on.

    Slots whose texts begin alike share whole blocks of that, which no slot writes again.
    The blocks of a slot without a request are taken where others need them, those first whose slot
    was filled longest ago: until then its text can be found by prompts that begin alike.

    Args:
        slots: Slots of the batch.
        capacity: Positions of a slot, a multiple of `BLOCK`.
        count: Blocks of all slots.
        on_release: Called with a slot whose blocks are taken.
    """

    def __init__(
        self, slots: int, capacity: int, count: int, on_release: Callable[[int], None]
    ) -> None:
        self._on_release = on_release
        self._table = np.full((slots, capacity // BLOCK), -1, np.int32)
        self._numbers = [0] * slots  # of blocks of each slot
        self._users = np.zeros(count, np.int32)  # slots that have each block
        self._free = list(range(count))
        self._begun: dict[int, int] = {}  # blocks of others that slots begin with, just filled
        self._order: dict[int, None] = {}  # slots, the one that was filled last at the end
        self._is_placed = True  # on the device, where a new table has no block either

    def unused(self, idle: Collection[int]) -> int:
        """Blocks that no slot has but ``idle`` ones."""
        users = self._users.copy()
        for slot in idle:
            users[self._blocks(slot)] -= 1
        return int(np.count_nonzero(users == 0))

    def missing(self, slot: int, positions: int) -> int:
        """How many blocks a slot lacks for so many positions."""
        return max(blocks_of(positions) - self._numbers[slot], 0)

    def newest(self, slots: Collection[int]) -> int:
        """The one of ``slots`` that was filled last."""
        return next(slot for slot in reversed(self._order) if slot in slots)

    def fill(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        beginnings: Sequence[Beginning],
        idle: Collection[int],
    ) -> None:
        """`reserve` for other requests, in place of what ``slots`` had.

        Until `placed` is called twice, the first time `hiding` what they share with others.
        """
        # Before any slot is released, so that what is shared stays.
        shared = [None if x.is_new else self._share(x) for x in beginnings]
        for slot in slots:
            self.release(slot)
        self._begun = {}
        each = zip(slots, positions, beginnings, shared, strict=True)
        for slot, count, beginning, blocks in each:
            blocks = self._share(beginning) if blocks is None else blocks
            self._order[slot], self._numbers[slot] = None, len(blocks)
            self._table[slot, : len(blocks)] = blocks
            self._begun[slot] = len(blocks)
            self.reserve(slot, count, idle)

    def _share(self, beginning: Beginning) -> np.ndarray:
        """The whole blocks of a beginning, counted for one slot more."""
        blocks = self._blocks(beginning.slot)[: beginning.tokens // BLOCK].copy()
        self._users[blocks] += 1
        return blocks

    def _blocks(self, slot: int) -> np.ndarray:
        return self._table[slot, : self._numbers[slot]]

    def reserve(self, slot: int, positions: int, idle: Collection[int]) -> None:
        """Give a slot the blocks that it lacks for so many positions.

        There must be as many: ``idle`` slots lose theirs where too few are free.
        """
        missing, number = self.missing(slot, positions), self._numbers[slot]
        while len(self._free) < missing:
            self.release(next(x for x in self._order if x in idle and x != slot))
        if missing:
            new = [self._free.pop() for _ in range(missing)]
            self._table[slot, number : number + missing] = new
            self._numbers[slot] += missing
            self._users[new] = 1
            self._is_placed = False

    def release(self, slot: int) -> None:
        """Take the blocks of a slot, which others may have."""
        self._order.pop(slot, None)
        if self._numbers[slot]:
            blocks = self._blocks(slot).copy()
            self._users[blocks] -= 1
            self._free.extend(blocks[self._users[blocks] == 0].tolist())
            self._table[slot], self._numbers[slot] = -1, 0
            self._is_placed = False
            self._on_release(slot)

    def placed(self, state: DecodeState, *, hiding: bool = False) -> DecodeState:
        """``state`` with this block table on the device.

        ``hiding``: without the blocks that slots have just begun to share, so that what fills these
        slots does not write them.
        """
        if self._is_placed:
            return state
        # A copy: an array on a CPU may share memory with what it was made of.
        table = self._table.copy()
        self._is_placed = not (hiding and any(self._begun.values()))
        if hiding:
            for slot, count in self._begun.items():
                table[slot, :count] = -1
        table = put(table, state.done.sharding)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, table=table))


def blocks_of(positions: int) -> int:
    """Blocks of so many positions."""
    return -(-positions // BLOCK)


def check_blocks(options: ResolvedOptions, count: int, capacity: int) -> None:
    """Raise `ValueError` unless requests of ``capacity`` can decode in ``count`` blocks."""
    config = options.config
    count, reason = positive("cache_blocks", count), None
    if (needed := blocks_of(capacity)) > count:
        raise ValueError(
            f"cache_blocks={count} of {BLOCK} positions must be at least {needed}, so that a "
            f"request of capacity={capacity} fits"
        )
    if is_on_mesh(options.models):
        reason = "the model is on a mesh, whose devices share rows in one piece"
    elif config.exact:
        reason = f'exact="{config.exact}" reads rows in one piece'
    elif config.is_lossy:
        reason = f"target={shown(config.target)} reads the keys of a row in one piece"
    else:
        reason = _refuses(config.draft)
    if reason is not None:
        raise ValueError(f"cache_blocks={count}: {reason}; leave out cache_blocks (docs/cache.md)")


def _refuses(draft: Drafter) -> str | None:
    """Why drafts, or what verification collects for them, need keys in one piece, or None."""
    if isinstance(draft, Chain):
        return _refuses(draft.first) or _refuses(draft.second)
    if isinstance(draft, GuidedDraft):
        policy = draft.policy
        if policy.score == "weight" or policy.needs_verdict or policy.refresh:
            return (
                f"guided drafts with score={policy.score!r}, collect={policy.collect!r} and "
                f"refresh={policy.refresh} score keys again, which must be in one piece"
            )
    elif isinstance(draft, SelfDraft) and not isinstance(draft.policy, Dense | Streaming):
        return f"policy={shown(draft.policy)} reads the keys of a row in one piece"
    return f"draft={shown(draft)} drafts trees" if draft.traits.branches else None
