"""Generation: prefill, chunks of steps, tokens streamed between chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.checks import Prompt, as_ids, check_requests
from jspec.decode.chunks import Chunk, Chunks, counts_of
from jspec.decode.convert_state import convert_state
from jspec.decode.draft import Drafter, SelfDraft
from jspec.decode.growth import first_capacity, grow_capacity
from jspec.decode.prefill import room_of, rounded_capacity, start_decoding, state_of
from jspec.decode.programs import OnCompile
from jspec.decode.resolved_options import Gamma, ResolvedOptions
from jspec.decode.state import DecodeState, StepRecord
from jspec.decode.stats import Stats, Tally, kept_of
from jspec.decode.together import agreed, is_shared, rows_of
from jspec.dispatch import Backends
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, Policy
from jspec.sharding import explicit_mesh_sharding, place, put
from jspec.typing import Model

OnTokens = Callable[[int, tuple[int, ...]], bool | int | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    ``tokens`` of each row; ``finished``: why each ended (``stop``, ``length`` or ``interrupted``);
    ``seeds``: of each row, also where none was given; ``stats`` of these tokens; ``steps``: how
    many verification steps each row took, so that ``len(tokens[row]) / steps[row]`` is its mean
    accepted length.
    """

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    seeds: tuple[int, ...]
    stats: Stats
    steps: tuple[int, ...]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `generate`; ``generation`` is what there was by then."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; .generation has the tokens that there were")
        self.generation = generation


class OutOfMemory(MemoryError):
    """A batch that does not fit; ``what`` says how large it is."""

    def __init__(
        self,
        what: str,
        way_out: str = "give fewer prompts at a time, shorten them, lower max_new_tokens",
    ):
        self.what = what
        super().__init__(f"{what}; {way_out}, or pass cache_dtype='bfloat16'")


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    draft: Drafter | None = SelfDraft(),
    gamma: Gamma = None,
    draft_model: Model | None = None,
    target: Policy = Dense(),
    rule: Rule = "token",
    policy_params: Any = None,
    steps_per_chunk: int | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: DTypeLike | None = None,
    backends: Mapping[str, str] = Backends(),
    exact: bool = False,
    prefilled: DecodeState | None = None,
    on_tokens: OnTokens | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    on_compile: OnCompile | None = None,
) -> Generation:
    """Decode a ragged batch of requests, each with its own settings.

    ``prompts`` are token ids, ``params`` one for all or one each. ``draft=None`` is ``NoDraft()``:
    plain decoding through the same code. ``gamma``, the most draft tokens of a step, defaults to
    what suits the drafter; ``"auto"`` chooses it again and again by measured times and acceptance
    (docs/drafting.md). ``target=Quest()`` or another policy has the model itself read a
    selection of the context, with ``draft=None``: not lossless. ``rule`` as in `StepConfig`.
    ``policy_params`` are what `jspec.prepare` makes for a policy that needs something.
    ``cache_dtype`` as in `jspec.start_decoding`. ``backends`` names backends of operations, as in
    ``{"verify_greedy": "cuda"}``. ``exact``: greedy tokens are those of plain decoding bit for bit,
    in bfloat16 too, at any batch, neighbours and draft, on an NVIDIA GPU (docs/exact.md). A model
    of numpy arrays is put on the device first.
    ``prefilled``: what `jspec.start_decoding` gave for these prompts, with any params and policy,
    in place of a prefill, and for ``exact`` with it; it stays as it is, and serves several calls
    (`jspec.convert_state`).

    Behind each chunk of ``steps_per_chunk`` steps (4 on a CPU, or where drafts take passes of a
    model and gamma is a number, else 16) new tokens go to ``on_tokens(row, tokens)``. It may return
    True to end the row behind them, or a number to end it behind so many of them: what follows is
    dropped and counts nowhere. Where chunks are short the next one runs meanwhile (docs/loops.md).
    ``on_prefill(done, total)`` hears of prompt tokens, ``on_compile(begins)`` of a program's
    compiling, before and after it.

    A request with a seed gives the same tokens in any row, with any neighbours and any chunk size,
    where the model's logits do; where it is sampled, with ``gamma="auto"`` it may not, as times
    have a part in it. Where several processes share the model's devices, all of them call this
    alike, and what ``on_tokens`` answers in process 0 counts. Ctrl-C raises `Interrupted`, a
    `KeyboardInterrupt` with the generation so far. Raises `TypeError` for arguments of another
    kind, `ValueError` as `jspec.start_decoding` does, and `MemoryError` where the device has no
    room for the batch.
    """
    ids = as_ids(prompts)
    options = ResolvedOptions.of(
        model,
        draft=draft,
        gamma=gamma,
        draft_model=draft_model,
        target=target,
        rule=rule,
        policy_params=policy_params,
        steps_per_chunk=steps_per_chunk,
        backends=backends,
        exact=exact,
    )
    rows = rows_of(
        options.models, ids, params, (options.config, gamma, options.steps, prefill_chunk)
    )
    run = _Run(options, ids, rows, on_tokens, on_compile)
    try:
        settings = {"chunk": prefill_chunk, "cache_dtype": cache_dtype, "on_prefill": on_prefill}
        state = run.prefill(**settings) if prefilled is None else run.take_up(prefilled)
        run.decode(state)
    except KeyboardInterrupt:
        raise Interrupted(run.generation()) from None
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(run.size()) from error
    return run.generation()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room for what was asked of it."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(
        "RESOURCE_EXHAUSTED"
    )


def wanted_of(answer: Any, count: int) -> int | None:
    """How many of ``count`` new tokens a row keeps as its last ones; None where it goes on.

    ``answer``: what ``on_tokens`` returned. Raises `ValueError` for one that says nothing.
    """
    if answer is None or isinstance(answer, (bool, np.bool_)):
        return count if answer else None
    keep = whole_number(answer)
    if keep is None or not 0 <= keep <= count:
        raise ValueError(
            f"on_tokens returned {shown(answer)} for {count} tokens; return how many of them the "
            "row keeps as its last ones, True for all, or None to go on"
        )
    return keep


class _Run:
    """The host's side of decoding one batch. What it counts is right whenever Ctrl-C comes."""

    def __init__(self, options: ResolvedOptions, prompts, params, on_tokens, on_compile):
        self.models, self.config = options.models, options.config
        self.prompts, self.params, self.on_tokens = prompts, params, on_tokens
        self.is_shared = is_shared(options.models.target)
        self.chunks = Chunks(options, on_compile, together=True)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = ["interrupted"] * len(prompts)
        self.records: list[tuple[np.ndarray, ...]] = []
        self.prompt_tokens = 0

    @property
    def needed(self) -> int:
        """Positions of the longest row in the end."""
        pairs = zip(self.prompts, self.params, strict=True)
        return max(len(prompt) + params.max_new_tokens for prompt, params in pairs)

    def size(self) -> str:
        """What does not fit, where the device has no room."""
        return (
            f"the device is out of memory with {len(self.prompts)} prompts at a time, the longest "
            f"of {self.needed} tokens with max_new_tokens"
        )

    def prefill(self, **settings: Any) -> DecodeState:
        with self.chunks.clock("prefill_s"):
            first = first_capacity(max(map(len, self.prompts)), self.needed)
            settings = settings | {"run": self.chunks.programs, "grows": True}
            settings["capacity"] = rounded_capacity(first)
            state = start_decoding(self.models, self.prompts, self.params, self.config, **settings)
            jax.block_until_ready(state)
        self.prompt_tokens = sum(map(len, self.prompts))
        return state

    def take_up(self, prefilled: DecodeState) -> DecodeState:
        """In place of `prefill`, a state that has the prompts already."""
        tokens, lengths = jax.device_get((prefilled.tokens, prefilled.lengths))
        rows = [line[:length].tolist() for line, length in zip(tokens, lengths, strict=True)]
        if rows != [np.asarray(prompt).tolist() for prompt in self.prompts]:
            raise ValueError(
                f"prefilled has {len(rows)} rows of {[len(row) for row in rows]!r:.80} tokens, "
                f"which are not the {len(self.prompts)} prompts; pass what start_decoding gave for "
                "them"
            )
        check_requests(self.models, self.prompts, self.params)
        with self.chunks.clock("prefill_s"):
            state = convert_state(self.models, prefilled, self.config)
            ends = self.models.target.config.stop_tokens
            row = (tokens, lengths, self.params, ends, room_of(self.params, ends))
            fresh = state_of(*row, state.cache, state.draft, exact=state.exact)
            return jax.block_until_ready(place(fresh, explicit_mesh_sharding(self.models)))

    def decode(self, state: DecodeState) -> None:
        """Chunks of steps until all rows have ended.

        While one is read the next one may be at work. What that one decodes of rows that the caller
        ends meanwhile is dropped.
        """
        stops, ended = np.array(state.stop_tokens), np.array(state.done)
        done = ended  # rows that the device has ended
        running: Chunk | None = None
        while not ended.all():
            if running is None:
                if (ended != done).any():
                    state = dataclasses.replace(state, done=put(ended, state.done.sharding))
                    done = ended
                with self.chunks.clock("decode_s"):
                    state = self._with_room(state, ended)
                state, running = self.chunks.start(state, self._left(ended))
            ahead: Chunk | None = None
            if (ended == done).all() and self._looks_ahead(state, ended):
                state, ahead = self.chunks.start(state, self._left(ended))
            record = self.chunks.finish(running)
            done = np.asarray(record.done[-1])
            self.records.append(counts_of(record))
            ended = ended | done | self._take(record, ended, done, stops)
            running = ahead

    def _looks_ahead(self, state: DecodeState, ended: np.ndarray) -> bool:
        """Whether to start the next chunk before the one at work is read.

        Not where a row needs more room for both.
        """
        has_room = self._reach(ended, chunks=2) <= state.tokens.shape[1]
        return has_room and self.chunks.looks_ahead(self._left(ended))

    def _left(self, ended: np.ndarray) -> np.ndarray:
        """Most tokens that each row commits yet, int ``[B]``: 0 where it has ended."""
        left = [
            params.max_new_tokens - len(tokens)
            for params, tokens in zip(self.params, self.tokens, strict=True)
        ]
        return np.where(ended, 0, left)

    def _with_room(self, state: DecodeState, ended: np.ndarray) -> DecodeState:
        """``state`` with room for a chunk in every row that goes on."""
        present, most = state.tokens.shape[1], self._reach(ended, chunks=1)
        if most <= present:
            return state
        capacity = min(max(most, 2 * present), self.needed)
        return grow_capacity(state, rounded_capacity(capacity), self.config)

    def _reach(self, ended: np.ndarray, chunks: int) -> int:
        """Positions of the longest row that goes on, behind so many ``chunks`` more."""
        known = (len(self.prompts[row]) + len(self.tokens[row]) for row in np.flatnonzero(~ended))
        new = chunks * self.chunks.options.steps * (self.config.gamma + 1)
        return min(max(known) + new, self.needed)

    def _take(
        self, record: StepRecord, ended: np.ndarray, done: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Hand on a chunk's tokens; returns which rows the caller ended, bool ``[B]``."""
        unwanted = np.zeros_like(ended)
        blocks = {row: record.tokens[:, row] for row in np.flatnonzero(~ended).tolist()}
        found = {row: tuple(block[block >= 0].tolist()) for row, block in blocks.items()}
        answers: Iterable[int | None] = (self._wanted(row, new) for row, new in found.items())
        if self.is_shared and self.on_tokens is not None:
            answers = agreed(list(answers))
        for (row, new), wanted in zip(found.items(), answers, strict=True):
            self.tokens[row].extend(new[:wanted])
            unwanted[row] = wanted is not None
            if unwanted[row] or done[row]:
                stopped = unwanted[row] or new[-1] in stops[row]
                self.finished[row] = "stop" if stopped else "length"
        return unwanted

    def _wanted(self, row: int, new: tuple[int, ...]) -> int | None:
        """How many of ``new`` the row keeps as its last ones; None where it goes on."""
        answer = None if self.on_tokens is None else self.on_tokens(row, new)
        return wanted_of(answer, len(new))

    def generation(self) -> Generation:
        tally = Tally(self.config.gamma)
        steps = np.zeros(len(self.tokens), np.int64)
        if self.records:
            *counts, gammas = map(np.concatenate, zip(*self.records, strict=True))
            drafted, accepted, committed = kept_of(
                *counts, kept=np.array([len(row) for row in self.tokens])
            )
            tally.add(drafted, accepted, committed, gammas=gammas)
            steps = (committed > 0).sum(axis=0)
        return Generation(
            tokens=tuple(map(tuple, self.tokens)),
            finished=tuple(self.finished),
            seeds=tuple(p.seed for p in self.params if p.seed is not None),
            steps=tuple(steps.tolist()),
            stats=tally.stats(
                rows=len(self.prompts),
                prompt_tokens=self.prompt_tokens,
                compilations=self.chunks.programs.compilations,
                compile_s=self.chunks.programs.compile_s,
                **self.chunks.seconds,
            ),
        )
