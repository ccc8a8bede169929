"""What the tests of chunks that run ahead share: who starts and finishes them, and when."""

import dataclasses
import itertools

import pytest

from jspec.decode.chunks import Chunks
from jspec.decode.state import StepRecord

# What statistics count, apart from times and programs.
COUNTS = (
    "rows prompt_tokens steps drafted accepted committed acceptance_by_position steps_at_gamma"
).split()

START, FINISH = Chunks.start, Chunks.finish


@dataclasses.dataclass
class Watched:
    """What `Chunks` was asked for: "start" and "finish" in ``calls``, and the records read."""

    calls: list[str] = dataclasses.field(default_factory=list)
    records: list[StepRecord] = dataclasses.field(default_factory=list)

    @property
    def at_work(self) -> list[int]:
        """Chunks that were started and not finished, after each call."""
        return list(itertools.accumulate({"start": 1, "finish": -1}[call] for call in self.calls))


def watched(monkeypatch: pytest.MonkeyPatch, host: float) -> Watched:
    """What is started and read from now on, where the host takes ``host`` seconds for a chunk."""
    observed = Watched()

    def started(self, state, left):
        observed.calls.append("start")
        return START(self, state, left)

    def finished(self, chunk):
        observed.calls.append("finish")
        observed.records.append(FINISH(self, chunk))
        return observed.records[-1]

    host_takes(monkeypatch, host)
    monkeypatch.setattr(Chunks, "start", started)
    monkeypatch.setattr(Chunks, "finish", finished)
    return observed


def host_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The host takes ``seconds`` for a chunk from now on, however long it takes."""
    monkeypatch.setattr(Chunks, "_host_seconds", lambda self: seconds)
