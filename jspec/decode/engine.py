"""Generation: prefill, chunks of steps, tokens streamed between chunks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.auto import Gammas
from jspec.decode.draft import CATCH_UP, Drafter, NoDraft, SelfDraft
from jspec.decode.growth import first_capacity, grow
from jspec.decode.on_mesh import mesh_model
from jspec.decode.prefill import rounded_capacity, start_decoding
from jspec.decode.programs import PROGRAMS, OnCompile
from jspec.decode.requests import Prompt, as_ids, check_models, one_each
from jspec.decode.settings import StepConfig, check_draft
from jspec.decode.state import DecodeState, Models, StepRecord
from jspec.decode.stats import Stats, Tally, kept_of
from jspec.decode.step import catch_up, decode_chunk
from jspec.decode.switch import switch
from jspec.dispatch import Backends
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, Policy
from jspec.policies.prepare import prepare
from jspec.typing import Model

Gamma = int | Literal["auto"] | None
OnTokens = Callable[[int, tuple[int, ...]], bool | int | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    ``tokens`` of each row; ``finished``: why each ended (``stop``, ``length`` or ``interrupted``);
    ``seeds``: of each row, also where none was given; ``stats`` of these tokens.
    """

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    seeds: tuple[int, ...]
    stats: Stats


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `generate`; ``generation`` is what there was by then."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; .generation has the tokens that there were")
        self.generation = generation


class OutOfMemory(MemoryError):
    """A batch that does not fit; ``what`` says how large it is."""

    def __init__(self, what: str):
        self.what = what
        super().__init__(
            f"{what}; give fewer prompts at a time, shorten them, lower max_new_tokens, or pass "
            "cache_dtype='bfloat16'"
        )


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
    policy_arrays: Any = None,
    steps_per_chunk: int | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: DTypeLike | None = None,
    backends: Mapping[str, str] = Backends(),
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
    ``policy_arrays`` are what `jspec.prepare` makes for a policy that needs something.
    ``cache_dtype`` as in `jspec.start_decoding`. ``backends`` names backends of operations, as in
    ``{"verify_greedy": "cuda"}``. A model of numpy arrays is put on the device first.
    ``prefilled``: what `jspec.start_decoding` gave for these prompts and params, with any policy,
    in place of a prefill; it stays as it is, and serves several calls (`jspec.switch`).

    Between chunks of ``steps_per_chunk`` steps (4 on a CPU, else 16) new tokens go to
    ``on_tokens(row, tokens)``. It may return True to end the row behind them, or a number to end it
    behind so many of them: what follows is dropped and counts nowhere. ``on_prefill(done, total)``
    hears of prompt tokens, ``on_compile(begins)`` of a program's compiling, before and after it.

    A request with a seed gives the same tokens in any row, with any neighbours and any chunk size,
    where the model's logits do; where it is sampled, with ``gamma="auto"`` it may not, as times
    have a part in it. Ctrl-C raises `Interrupted`, a `KeyboardInterrupt` with the
    generation so far. Raises `TypeError` for arguments of another kind, `ValueError` as
    `jspec.start_decoding` does, and `MemoryError` where the device has no room for the batch.
    """
    models = Models(model, draft_model, policy_arrays)
    check_models(models)
    ids = as_ids(prompts)
    rows = one_each(params, len(ids))
    draft = NoDraft() if draft is None else draft
    check_draft(draft)
    most = draft.usual_gamma if gamma is None or gamma == "auto" else gamma
    config = StepConfig(most, draft, backends, target, rule)
    gammas = Gammas(config) if gamma == "auto" else None
    config = config if gammas is None else gammas.longest
    if config.keeps.needs_arrays and policy_arrays is None:
        models = models._replace(policy=prepare(config.keeps, model))
    on_mesh = mesh_model(model)
    models = models if on_mesh is None else on_mesh.placed(models)
    models = draft.prepare(models)
    if (models.draft is None) == draft.takes_model:
        raise ValueError(
            "draft=ModelDraft() and draft_model go together; pass both or neither. SelfDraft takes "
            "one with quantized=, and makes it where there is none"
        )
    if steps_per_chunk is None:
        steps_per_chunk = 4 if jax.default_backend() == "cpu" else 16
    if (whole_number(steps_per_chunk) or 0) < 1:
        raise ValueError(f"steps_per_chunk={shown(steps_per_chunk)} must be at least 1")

    run = _Run(_on_device(models), config, ids, rows, on_tokens, on_compile, gammas)
    try:
        settings = {"chunk": prefill_chunk, "cache_dtype": cache_dtype, "on_prefill": on_prefill}
        state = run.prefill(**settings) if prefilled is None else run.take_up(prefilled)
        run.decode(state, steps_per_chunk)
    except KeyboardInterrupt:
        raise Interrupted(run.generation()) from None
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise OutOfMemory(run.size()) from error
    return run.generation()


def _on_device(models: Models) -> Models:
    """``models`` with arrays of JAX for those of numpy, which each call would copy anew."""
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(models)):
        return models
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, models)


class _Run:
    """The host's side of decoding one batch. What it counts is right whenever Ctrl-C comes."""

    def __init__(self, models, config, prompts, params, on_tokens, on_compile, gammas):
        self.models, self.config, self.prompts, self.params = models, config, prompts, params
        self.on_tokens, self.gammas = on_tokens, gammas
        self.programs = PROGRAMS.timed(on_compile)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = ["interrupted"] * len(prompts)
        self.records: list[tuple[np.ndarray, ...]] = []
        self.prompt_tokens = 0
        self.rested = 0  # steps since the drafter last drafted
        self.seconds = {"prefill_s": 0.0, "decode_s": 0.0}

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

    @contextlib.contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to ``seconds``, less that of compiling."""
        compiled, begin = self.programs.compile_s, time.perf_counter()
        try:
            yield
        finally:
            compiling = self.programs.compile_s - compiled
            self.seconds[name] += time.perf_counter() - begin - compiling

    def prefill(self, **settings: Any) -> DecodeState:
        with self._clock("prefill_s"):
            first = first_capacity(max(map(len, self.prompts)), self.needed)
            if mesh_model(self.models.target) is not None:  # shards do not grow
                first = self.needed
            settings = settings | {"run": self.programs, "grows": True}
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
        with self._clock("prefill_s"):
            return jax.block_until_ready(switch(self.models, prefilled, self.config))

    def decode(self, state: DecodeState, steps: int) -> None:
        stops, ended = np.array(state.stop_tokens), np.array(state.done)
        while not ended.all():
            with self._clock("decode_s"):
                state = self._with_room(state, ended, steps)
            state, record, done = self._chunk(state, steps)
            # A record has a token for each of gamma + 1 positions.
            gammas = np.full(steps, record.tokens.shape[-1] - 1)
            self.records.append((record.drafted, record.accepted, record.committed, gammas))
            unwanted = self._take(record, ended, done, stops)
            ended = done | unwanted
            if unwanted.any():
                ended_on_device = jax.device_put(ended, state.done.sharding)
                state = dataclasses.replace(state, done=ended_on_device)

    def _chunk(self, state: DecodeState, steps: int) -> tuple[DecodeState, Any, np.ndarray]:
        """Run a chunk of ``steps``; their `StepRecord` on the host, and which rows are done."""
        config, choice = self.config, None
        if self.gammas is not None:
            choice = self.gammas.choice(self.models, state)
            config = self.gammas.configs[choice.choose()]
            state = self._awake(state, config, steps)
        before = self.seconds["decode_s"]
        with self._clock("decode_s"):
            args = (self.models, state)
            state, record = self.programs(decode_chunk, *args, config=config, steps=steps)
            record, done = jax.device_get((record, state.done))
        if choice is not None:
            seconds = (self.seconds["decode_s"] - before) / steps
            choice.saw(config.gamma, seconds, record.accepted[record.committed > 0])
        return state, record, done

    def _awake(self, state: DecodeState, config: StepConfig, steps: int) -> DecodeState:
        """``state`` for a chunk of ``steps``: a drafter with a model that rested is caught up."""
        if not self.config.draft.needs_model:
            return state
        if not config.gamma:
            self.rested += steps
            return state
        with self._clock("decode_s"):
            while self.rested > 0:
                state = self.programs(catch_up, self.models, state, config=self.config)
                self.rested -= CATCH_UP - 1  # the first of its tokens is taken up anew
        self.rested = 0
        return state

    def _with_room(self, state: DecodeState, ended: np.ndarray, steps: int) -> DecodeState:
        """``state`` with room for a chunk of ``steps`` in every row that goes on."""
        present = state.tokens.shape[1]
        known = (len(self.prompts[row]) + len(self.tokens[row]) for row in np.flatnonzero(~ended))
        most = min(max(known) + steps * (self.config.gamma + 1), self.needed)
        if most <= present:
            return state
        capacity = min(max(most, 2 * present), self.needed)
        return grow(state, rounded_capacity(capacity), self.config)

    def _take(
        self, record: StepRecord, ended: np.ndarray, done: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Hand on a chunk's tokens; returns which rows the caller ended, bool ``[B]``."""
        unwanted = np.zeros_like(ended)
        for row in np.flatnonzero(~ended).tolist():
            block = record.tokens[:, row]
            new = tuple(block[block >= 0].tolist())
            wanted = self._wanted(row, new)
            self.tokens[row].extend(new[:wanted])
            unwanted[row] = wanted is not None
            if unwanted[row] or done[row]:
                stopped = unwanted[row] or new[-1] in stops[row]
                self.finished[row] = "stop" if stopped else "length"
        return unwanted

    def _wanted(self, row: int, new: tuple[int, ...]) -> int | None:
        """How many of ``new`` the row keeps as its last ones; None where it goes on."""
        answer = None if self.on_tokens is None else self.on_tokens(row, new)
        if answer is None or isinstance(answer, (bool, np.bool_)):
            return len(new) if answer else None
        keep = whole_number(answer)
        if keep is None or not 0 <= keep <= len(new):
            raise ValueError(
                f"on_tokens returned {shown(answer)} for {len(new)} tokens; return how many of "
                "them the row keeps as its last ones, True for all, or None to go on"
            )
        return keep

    def generation(self) -> Generation:
        tally = Tally(self.config.gamma)
        if self.records:
            *counts, gammas = map(np.concatenate, zip(*self.records, strict=True))
            kept = kept_of(*counts, kept=np.array([len(row) for row in self.tokens]))
            tally.add(*kept, gammas=gammas)
        return Generation(
            tokens=tuple(map(tuple, self.tokens)),
            finished=tuple(self.finished),
            seeds=tuple(p.seed for p in self.params if p.seed is not None),
            stats=tally.stats(
                rows=len(self.prompts),
                prompt_tokens=self.prompt_tokens,
                compilations=self.programs.compilations,
                compile_s=self.programs.compile_s,
                **self.seconds,
            ),
        )
