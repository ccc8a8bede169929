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
from jspec.decode.stats import Stats, Tally, clip_records
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

    Attributes:
        tokens: New tokens of each row.
        finished: Why each row ended: ``stop``, ``length`` or ``interrupted``.
        seeds: The seed of each row, also where the request had none.
        stats: Statistics of these tokens.
        steps: Verification steps of each row; ``len(tokens[row]) / steps[row]`` is the row's mean
            accepted length.
    """

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    seeds: tuple[int, ...]
    stats: Stats
    steps: tuple[int, ...]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `generate`; ``generation`` has the tokens decoded by then."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; .generation has the tokens that there were")
        self.generation = generation


class OutOfMemory(MemoryError):
    """A batch that does not fit into memory; ``what`` describes its size."""

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

    A request with a seed gives the same tokens in any row, with any other requests in the batch and
    with any chunk size, where the model's logits are the same. A sampled one may not with
    ``gamma="auto"``, which follows measured times. Where several processes share the model's
    devices, all of them must make the same call, and what ``on_tokens`` returns in process 0
    counts.

    Args:
        model: The target, whose tokens are decoded. A model of numpy arrays is put on the device
            first.
        prompts: Token ids of each request.
        params: Settings for all requests, or one per request.
        draft: Where draft tokens come from. None is ``NoDraft()``: plain decoding by the same code.
        gamma: Most draft tokens per step; None takes the drafter's usual number. ``"auto"`` chooses
            it for each chunk by measured times and acceptance (docs/drafting.md).
        draft_model: The second model, for ``ModelDraft()``.
        target: The policy by which the model itself reads the context when it decodes. Any but
            ``Dense()`` is not lossless, and needs ``draft=None``.
        rule: ``"token"`` or ``"block"``, as in `StepConfig`.
        policy_params: What `jspec.policies.prepare_params` made for a policy that needs parameters.
        steps_per_chunk: Steps between two calls of ``on_tokens``. None is 4 on a CPU, or where
            drafts take passes of a model and gamma is a number, else 16.
        prefill_chunk: Prompt tokens per row and prefill pass; None chooses by the batch.
        cache_dtype: Dtype of the target's keys and values; None is the model's.
        backends: Backends of operations by name, as in ``{"verify_greedy": "cuda"}``.
        exact: Whether greedy tokens are those of plain decoding bit for bit, also in bfloat16 and
            with any batch and draft, on an NVIDIA GPU (docs/exact.md).
        prefilled: A state that `jspec.start_decoding` made for these prompts, with any params and
            policy, in place of a prefill; with ``exact`` it must have been made with it. It is not
            donated, so that it serves several calls (`jspec.convert_state`).
        on_tokens: Called as ``on_tokens(row, tokens)`` with a row's new tokens after each chunk. It
            may return True to end the row after them, or a number to end it after so many of them;
            the rest is dropped and counts nowhere. Where chunks are short the next one runs
            meanwhile (docs/loops.md).
        on_prefill: Called as ``on_prefill(done, total)`` with prompt tokens per row.
        on_compile: Called as ``on_compile(True)`` before a program compiles, and with False after
            it.

    Returns:
        The tokens of each row, why each ended, and statistics.

    Raises:
        TypeError: For an argument of another kind.
        ValueError: As `jspec.start_decoding` does.
        MemoryError: Where the device has no room for the batch.
        Interrupted: On Ctrl-C: a `KeyboardInterrupt` with the generation so far.
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
    """Whether an error says that a device ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(
        "RESOURCE_EXHAUSTED"
    )


def tokens_to_keep(answer: Any, count: int) -> int | None:
    """How many of ``count`` new tokens a row keeps as its last ones; None where it goes on.

    Args:
        answer: What ``on_tokens`` returned.
        count: How many tokens it was called with.

    Raises:
        ValueError: For an answer that is no bool, None, or number up to ``count``.
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
    """The host's side of decoding one batch. Its counts are consistent whenever Ctrl-C comes."""

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
        """Positions of the longest row once all rows have ended."""
        pairs = zip(self.prompts, self.params, strict=True)
        return max(len(prompt) + params.max_new_tokens for prompt, params in pairs)

    def size(self) -> str:
        """The size of the batch, for an error message."""
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
        """Convert a state that has the prompts already, in place of `prefill`."""
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
        """Run chunks of steps until all rows have ended.

        The next chunk may run while one is read. What it decodes for rows that the caller ends
        meanwhile is dropped.
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
        """Whether to start the next chunk before the running one is read.

        Not where a row needs more capacity for both.
        """
        has_room = self._reach(ended, chunks=2) <= state.tokens.shape[1]
        return has_room and self.chunks.looks_ahead(self._left(ended))

    def _left(self, ended: np.ndarray) -> np.ndarray:
        """Most tokens that each row can still commit, int ``[B]``: 0 where it has ended."""
        left = [
            params.max_new_tokens - len(tokens)
            for params, tokens in zip(self.params, self.tokens, strict=True)
        ]
        return np.where(ended, 0, left)

    def _with_room(self, state: DecodeState, ended: np.ndarray) -> DecodeState:
        """``state`` with capacity for one more chunk in every live row."""
        present, reach = state.tokens.shape[1], self._reach(ended, chunks=1)
        if reach <= present:
            return state
        capacity = min(max(reach, 2 * present), self.needed)
        return grow_capacity(state, rounded_capacity(capacity), self.config)

    def _reach(self, ended: np.ndarray, chunks: int) -> int:
        """Positions of the longest live row after ``chunks`` more chunks."""
        known = (len(self.prompts[row]) + len(self.tokens[row]) for row in np.flatnonzero(~ended))
        new = chunks * self.chunks.options.steps * (self.config.gamma + 1)
        return min(max(known) + new, self.needed)

    def _take(
        self, record: StepRecord, ended: np.ndarray, done: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Pass on a chunk's tokens; returns which rows the caller ended, bool ``[B]``."""
        unwanted = np.zeros_like(ended)
        blocks = {row: record.tokens[:, row] for row in np.flatnonzero(~ended).tolist()}
        new_tokens = {row: tuple(block[block >= 0].tolist()) for row, block in blocks.items()}
        answers: Iterable[int | None] = (
            self._ask_callback(row, new) for row, new in new_tokens.items()
        )
        if self.is_shared and self.on_tokens is not None:
            answers = agreed(list(answers))
        for (row, new), keep_count in zip(new_tokens.items(), answers, strict=True):
            self.tokens[row].extend(new[:keep_count])
            unwanted[row] = keep_count is not None
            if unwanted[row] or done[row]:
                stopped = unwanted[row] or new[-1] in stops[row]
                self.finished[row] = "stop" if stopped else "length"
        return unwanted

    def _ask_callback(self, row: int, new: tuple[int, ...]) -> int | None:
        """How many of ``new`` the row keeps as its last ones; None where it goes on."""
        answer = None if self.on_tokens is None else self.on_tokens(row, new)
        return tokens_to_keep(answer, len(new))

    def generation(self) -> Generation:
        tally = Tally(self.config.gamma)
        steps = np.zeros(len(self.tokens), np.int64)
        if self.records:
            *counts, gammas = map(np.concatenate, zip(*self.records, strict=True))
            drafted, accepted, committed = clip_records(
                *counts, token_counts=np.array([len(row) for row in self.tokens])
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
