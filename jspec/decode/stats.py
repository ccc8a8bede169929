"""Statistics of decoding that stay true at stop tokens, ragged drafts and rows that end early."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.decode.state import StepRecord


@dataclasses.dataclass(frozen=True)
class PositionRate:
    """Acceptance of one draft position: how often it was drafted, and accepted."""

    attempts: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.attempts if self.attempts else 0.0


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a generation did and how long it took; seconds are wall-clock.

    A *step* is one verification of one row. Draft tokens after a stop token or a stop text count
    nowhere. The time of the caller's callbacks, or between two steps of an engine, is part of
    ``decode_s`` while a chunk of steps runs.

    Attributes:
        rows: Requests.
        prompt_tokens: Prompt tokens that were prefilled.
        steps: Verification steps over all rows.
        drafted: Draft tokens.
        accepted: Accepted draft tokens.
        committed: Tokens that the caller got.
        acceptance_by_position: Acceptance of each draft position.
        steps_at_gamma: Pairs of a gamma and its steps; several with ``gamma="auto"``.
        compilations: Programs that were compiled.
        compile_s: Seconds of compiling, part of neither ``prefill_s`` nor ``decode_s``.
        prefill_s: Seconds of prefill.
        decode_s: Seconds of decode steps.
    """

    rows: int
    prompt_tokens: int
    steps: int
    drafted: int
    accepted: int
    committed: int
    acceptance_by_position: tuple[PositionRate, ...]
    steps_at_gamma: tuple[tuple[int, int], ...]
    compilations: int
    compile_s: float
    prefill_s: float
    decode_s: float

    @classmethod
    def merged(cls, parts: Sequence[Stats]) -> Stats:
        """The sum over several generations."""
        by_position = (p.acceptance_by_position for p in parts)
        positions = [
            PositionRate(sum(a.attempts for a in at), sum(a.accepted for a in at))
            for at in itertools.zip_longest(*by_position, fillvalue=PositionRate(0, 0))
        ]
        at_gamma = sum((Counter(dict(p.steps_at_gamma)) for p in parts), Counter[int]())
        sequences = {
            "acceptance_by_position": tuple(positions),
            "steps_at_gamma": tuple(sorted(at_gamma.items())),
        }
        counts = {
            f.name: sum(getattr(p, f.name) for p in parts)
            for f in dataclasses.fields(cls)
            if f.name not in sequences
        }
        return cls(**counts, **sequences)

    @property
    def mean_accepted_length(self) -> float:
        return self.committed / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.committed / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON, derived ones included."""
        derived = "mean_accepted_length acceptance_rate prefill_tokens_per_s decode_tokens_per_s"
        positions = [vars(p) | {"rate": p.rate} for p in self.acceptance_by_position]
        at_gamma = {str(gamma): steps for gamma, steps in self.steps_at_gamma}
        sequences = {"acceptance_by_position": positions, "steps_at_gamma": at_gamma}
        return vars(self) | {name: getattr(self, name) for name in derived.split()} | sequences


class Tally:
    """Adds up the records of chunks of steps with drafts of at most ``gamma`` tokens."""

    def __init__(self, gamma: int):
        self.committed, self.steps_at = 0, Counter[int]()
        self.attempts_at = np.zeros(gamma, np.int64)
        self.accepted_at = np.zeros(gamma, np.int64)

    def add(self, record: StepRecord, token_counts: np.ndarray) -> np.ndarray:
        """Add a chunk of which each row keeps only its first ``token_counts [B]`` tokens.

        A step of which a part is kept counts as one that a stop token ended there. A row that
        committed nothing was done, and took no step. Returns the steps of each row, int ``[B]``.
        """
        committed = np.asarray(record.committed)
        before = np.cumsum(committed, axis=0) - committed
        counted = np.clip(token_counts - before, 0, committed)
        is_cut, live = counted < committed, counted > 0
        drafted, accepted = (
            np.where(is_cut, counted, x)[live] for x in (record.drafted, record.accepted)
        )
        self.steps_at[record.tokens.shape[-1] - 1] += len(drafted)
        self.committed += int(counted.sum())
        position = np.arange(len(self.attempts_at))
        self.attempts_at += (drafted[:, None] > position).sum(axis=0)
        self.accepted_at += (accepted[:, None] > position).sum(axis=0)
        return live.sum(axis=0)

    def stats(self, **rest: Any) -> Stats:
        positions = zip(self.attempts_at.tolist(), self.accepted_at.tolist(), strict=True)
        return Stats(
            steps=self.steps_at.total(),
            drafted=int(self.attempts_at.sum()),
            accepted=int(self.accepted_at.sum()),
            committed=self.committed,
            acceptance_by_position=tuple(PositionRate(*p) for p in positions),
            steps_at_gamma=tuple(sorted((g, n) for g, n in self.steps_at.items() if n)),
            **rest,
        )
