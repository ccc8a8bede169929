"""Generation: prefill, chunks of steps, tokens streamed between chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, ModelDraft, NoDraft, SelfDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.programs import PROGRAMS
from jspec.decode.requests import one_each
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models, StepRecord
from jspec.decode.stats import Stats, Tally
from jspec.decode.step import decode_chunk
from jspec.dispatch import Backends
from jspec.typing import Model


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    ``tokens`` of each row; ``finished``: why each ended (``stop``, ``length`` or ``interrupted``);
    ``seeds``: of each row, also where none was given; ``stats``.
    """

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    seeds: tuple[int, ...]
    stats: Stats


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    draft: Drafter | None = SelfDraft(),
    gamma: int | None = None,
    draft_model: Model | None = None,
    steps_per_chunk: int | None = None,
    prefill_chunk: int | None = None,
    backends: Mapping[str, str] = Backends(),
    on_tokens: Callable[[int, tuple[int, ...]], bool | None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generation:
    """Decode a ragged batch of requests, each with its own settings.

    ``prompts`` are token ids, ``params`` one for all or one each. ``draft=None`` is ``NoDraft()``:
    plain decoding through the same code. ``gamma``, the most draft tokens of a step, defaults to
    what suits the drafter. Between chunks of ``steps_per_chunk`` steps (4 on a CPU, else 16) new
    tokens go to ``on_tokens(row, tokens)``, which may return True to end the row;
    ``on_prefill(done, total)`` hears of prompt tokens. ``backends`` names backends of operations,
    as in ``{"verify_greedy": "cuda"}``. A request with a seed gives the same tokens in any row,
    with any neighbours and any chunk size. Ctrl-C ends decoding with what was generated. Raises
    `ValueError` as `jspec.start_decoding` does.
    """
    params = one_each(params, len(prompts))
    draft = NoDraft() if draft is None else draft
    gamma = draft.usual_gamma if gamma is None else gamma
    config = StepConfig(gamma, draft, Backends(backends))
    if isinstance(draft, ModelDraft) == (draft_model is None):
        raise ValueError("draft=ModelDraft() and draft_model go together; pass both or neither")
    models = Models(model, draft_model)
    if steps_per_chunk is None:
        steps_per_chunk = 4 if jax.default_backend() == "cpu" else 16
    if steps_per_chunk < 1:
        raise ValueError(f"steps_per_chunk={steps_per_chunk} must be at least 1")

    compiled_before, begin = PROGRAMS.compile_s, time.perf_counter()
    state = start_decoding(
        models, prompts, params, config, chunk=prefill_chunk, on_prefill=on_prefill, run=PROGRAMS
    )
    jax.block_until_ready(state)
    prefill_s = time.perf_counter() - begin - (PROGRAMS.compile_s - compiled_before)

    run = _Run(models, config, steps_per_chunk, on_tokens, len(prompts))
    run.decode(state)
    return Generation(
        tokens=tuple(map(tuple, run.tokens)),
        finished=tuple(run.finished),
        seeds=tuple(p.seed for p in params if p.seed is not None),
        stats=run.tally.stats(
            rows=len(prompts),
            prompt_tokens=sum(map(len, prompts)),
            compile_s=PROGRAMS.compile_s - compiled_before,
            prefill_s=prefill_s,
            decode_s=run.decode_s,
        ),
    )


class _Run:
    """The host's side of decoding one batch."""

    def __init__(self, models, config, steps, on_tokens, rows):
        self.models, self.config, self.steps = models, config, steps
        self.on_tokens = on_tokens
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.finished = ["interrupted"] * rows
        self.tally = Tally(config.gamma)
        self.decode_s = 0.0

    def decode(self, state: DecodeState) -> None:
        stops, ended = np.array(state.stop_tokens), np.array(state.done)
        try:
            while not ended.all():
                state, record = self._chunk(state)
                done = np.array(state.done)
                new = self._take(record, ended)
                for row in np.flatnonzero(done & ~ended):
                    stopped = self.tokens[row][-1] in stops[row]
                    self.finished[row] = "stop" if stopped else "length"
                unwanted = self._hand_on(new) & ~done
                for row in np.flatnonzero(unwanted):
                    self.finished[row] = "stop"
                if unwanted.any():
                    done |= unwanted
                    state = dataclasses.replace(state, done=jax.numpy.asarray(done))
                ended = done
        except KeyboardInterrupt:
            return

    def _chunk(self, state: DecodeState) -> tuple[DecodeState, StepRecord]:
        compiled, begin = PROGRAMS.compile_s, time.perf_counter()
        args = (self.models, state)
        state, record = PROGRAMS(decode_chunk, *args, config=self.config, steps=self.steps)
        record = jax.device_get(record)
        self.decode_s += time.perf_counter() - begin - (PROGRAMS.compile_s - compiled)
        return state, record

    def _take(self, record: StepRecord, ended: np.ndarray) -> dict[int, tuple[int, ...]]:
        """Count a chunk's record; returns the new tokens of the rows that had not ended."""
        counts = (record.drafted, record.accepted, record.committed)
        self.tally.add(*map(np.asarray, counts))
        new = {}
        for row in np.flatnonzero(~ended).tolist():
            block = record.tokens[:, row]
            new[row] = tuple(block[block >= 0].tolist())
            self.tokens[row].extend(new[row])
        return new

    def _hand_on(self, new: dict[int, tuple[int, ...]]) -> np.ndarray:
        """Give new tokens to the caller; returns which rows it wants no more of, ``[B]``."""
        unwanted = np.zeros(len(self.tokens), bool)
        if self.on_tokens is not None:
            for row, tokens in new.items():
                unwanted[row] = bool(self.on_tokens(row, tokens))
        return unwanted
