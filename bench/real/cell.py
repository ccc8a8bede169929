"""One cell: prompts of one length in batches of one size, decoded by every drafter."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench import point
from bench.ceilings import Ceilings
from bench.decode import floors, kernels
from bench.drafters import PLAIN, Drafting, params_of
from bench.program import compiler_pool
from bench.real import check
from bench.real.answers import repeats
from bench.settings import bar
from jspec.decode.convert_state import convert_state
from jspec.decode.options import usual_steps
from jspec.decode.prefill import rounded_capacity, start_decoding
from jspec.decode.programs import PROGRAMS
from jspec.decode.rows import state_of
from jspec.decode.state import DecodeState, Exact, FlatModels, Models, StepRecord
from jspec.decode.step import decode_chunk
from jspec.dispatch import Choice, record_choices
from jspec.eval.sample import prepared
from jspec.policies.hata import with_hashes
from jspec.sharding import explicit_mesh_sharding, place

ROOM = 1024  # positions after the prompts, so that all lengths of answers share a program
WORKERS = 12  # programs that compile at once; more would wait for the interpreter
REPEATS = 2  # generations that are timed, of answers up to `LONG` tokens; one of longer ones
LONG = 256
SAMPLES = 5  # of the time of a step
WARMUPS = 2  # chunks before: the second one records a CUDA graph
Row = dict[str, Any]


@dataclasses.dataclass
class Measured:
    """Answers of all batches with one drafter and sampling, and what they took."""

    answers: list[tuple[int, ...]]
    steps: list[int]
    attempts_at: list[int]
    accepted_at: list[int]
    decode_s: list[float]
    switch_s: float


class Cell:
    """Prompts in batches of ``batch``, prefilled once; every drafter starts from there.

    ``rows``: token ids of the prompts. ``limits``: ceilings of this device, for floors.
    ``hashes``: a folder of trained hashes. ``room``: positions after
    the prompts. ``draft_model``: a second model, for drafters by one.
    """

    def __init__(
        self,
        model: jspec.Decoder,
        tokenizer: jspec.Tokenizer,
        rows: Sequence[list[int]],
        batch: int,
        *,
        exact: Exact | None,
        limits: Ceilings,
        hashes: Path | None = None,
        room: int = ROOM,
        draft_model: jspec.Decoder | None = None,
    ):
        self.model, self.batch, self._limits = model, batch, limits
        self.exact: Exact | None = exact
        self._tokenizer, self._hashes, self._room = tokenizer, hashes, room
        self._draft_model = draft_model
        self.batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        self._copies: dict[str, Any] = {}
        self._step_times: dict[tuple[str, str], Row] = {}
        self._choices: dict[tuple[str, str], list[Choice]] = {}
        self._plain: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self.prefill_s, self.prefilled = self._prefill()

    def batched(self, rows: Sequence[int], batch: int) -> Cell:
        """A cell of these prompts, ``batch`` at a time, with copies of their prefills."""
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *self.prefilled)
        prompts, cell = self.prompts, copy.copy(self)
        parts = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        cell.batch, cell.batches = batch, [[prompts[row] for row in part] for part in parts]
        cell.prefilled = [_rows_of(whole, np.array(part)) for part in parts]
        cell._step_times, cell._choices, cell._plain = {}, {}, {}
        return cell

    @property
    def prompts(self) -> list[list[int]]:
        return [row for rows in self.batches for row in rows]

    @property
    def mean_context(self) -> int:
        """Tokens in the cache of a row, on average over prompts."""
        return round(statistics.mean(map(len, self.prompts)))

    def _prefill(self) -> tuple[float, list[DecodeState]]:
        """Seconds of all prefills without compiling, and the state of each batch after it."""
        capacity = rounded_capacity(max(map(len, self.prompts)) + self._room)
        run, begin = PROGRAMS.timed(), time.perf_counter()
        config = jspec.StepConfig(0, jspec.NoDraft(), exact=self.exact)
        states = []
        with bar("prefill", len(self.batches)) as advance:
            for rows in self.batches:
                settings = {"capacity": capacity, "run": run}
                params = self._timing_params(rows)
                state = start_decoding(Models(self.model), rows, params, config, **settings)
                states.append(jax.block_until_ready(state))
                advance()
        return time.perf_counter() - begin - run.compile_s, states

    def compile(self, programs: Sequence[tuple[Drafting, str]]) -> None:
        """Compile the steps of these drafters and samplings, several at a time."""
        with compiler_pool(WORKERS) as pool:
            futures = self.compiling(pool, programs)
            with bar("compile", len(futures)) as advance:
                for _ in as_completed(futures):
                    advance()

    def compiling(
        self, pool: Executor, programs: Sequence[tuple[Drafting, str]]
    ) -> list[Future[None]]:
        """Begin to compile the steps of these drafters and samplings in ``pool``.

        A program that fails to compile fails again, with its reason, where it is measured.
        """

        def task(drafting: Drafting, sampling: str) -> Callable[[], Any]:
            models, config = self._models(drafting), drafting.config
            arguments = FlatModels.of(models), self._shapes(models, config, sampling)
            static = {"config": config, "steps": usual_steps(config.draft, config.gamma)}

            def compiled() -> None:
                with record_choices() as choices:  # of this thread
                    PROGRAMS.timed().executable(decode_chunk, arguments, static)
                self._choices[drafting.name, sampling] = choices

            return compiled

        futures = []
        for pair in programs:
            with contextlib.suppress(Exception):
                futures.append(pool.submit(task(*pair)))
        return futures

    def row(self, drafting: Drafting, sampling: str, new: int) -> Row:
        """The figures of one drafter with one sampling and length of answers, checked.

        Greedy plain decoding must have been measured before, with the same length of answers. A
        lossy policy is not checked, but compared with it.
        """
        # First the time of a step, which also warms the program up.
        if (at := (drafting.name, sampling)) not in self._step_times:
            self._step_times[at] = self._step_time(drafting, sampling)
        result = self.answers(drafting, sampling, new)
        if not result["checked"]:
            return result | {"reason": "its answers are not the model's, so it is not timed"}
        return result | self._step_times[at]

    def answers(self, drafting: Drafting, sampling: str, new: int) -> Row:
        """The figures of `row` but for the time of a step."""
        measured = self._measured(drafting, sampling, new)
        result = {
            "setting": repr(drafting.config.draft),
            "tokens": list(map(len, measured.answers)),
            "steps": measured.steps,
            "repeats": list(map(repeats, measured.answers)),
            "attempts_at": measured.attempts_at,
            "accepted_at": measured.accepted_at,
            "decode_s_samples": measured.decode_s,
            "prefill_s": self.prefill_s,
            "switch_s": measured.switch_s,
            "context": self.mean_context,
            "plain_floor_ns": self.plain_floor_ns,
        }
        if drafting.config.is_lossy:
            plain = self._plain[sampling, new]
            return result | check.agreement(self._score, measured.answers, plain)
        if sampling != "greedy":
            result |= check.sampled(self._score, measured.answers, params_of(sampling, new, 1)[0])
        elif drafting.name == PLAIN:
            self._plain[sampling, new] = measured.answers
            result |= {"rows": len(measured.answers), "checked": True}
        else:
            result |= self.check_greedy(
                measured.answers, new, exact=drafting.config.exact is not None
            )
        return result

    def generate(
        self, drafting: Drafting, params: list[jspec.SamplingParams], index: int
    ) -> jspec.Generation:
        """The answers of a batch by a drafter, from its prefill."""
        config, models = drafting.config, self._models(drafting)
        return jspec.generate(
            self.model,
            self.batches[index],
            params,
            draft=config.draft,
            gamma=config.gamma,
            target=config.target,
            draft_model=models.draft,
            policy_params=models.policy,
            backends=config.backends,
            exact=config.exact,
            prefilled=self.prefilled[index],
        )

    def check_greedy(self, answers: check.Answers, new: int, *, exact: bool = False) -> Row:
        """Whether answers are those of plain decoding, which must have been measured before."""
        return check.greedy(self._score, answers, self._plain["greedy", new], exact=exact)

    def _score(
        self, rows: Sequence[int], texts: check.Answers, params: jspec.SamplingParams
    ) -> list[np.ndarray]:
        return check.score_answers(self.model, self.prefilled, rows, texts, params)

    def _measured(self, drafting: Drafting, sampling: str, new: int) -> Measured:
        """Generate the answers of every batch, as a caller of `jspec.generate` does."""
        runs = []
        for _ in range(REPEATS if len(self.batches) == 1 and new <= LONG else 1):
            parts_of = [
                self.generate(drafting, params_of(sampling, new, len(rows)), index)
                for index, rows in enumerate(self.batches)
            ]
            runs.append(parts_of)
        last = runs[-1]
        stats = jspec.Stats.merged([part.stats for part in last])
        return Measured(
            answers=[row for part in last for row in part.tokens],
            steps=[count for part in last for count in part.steps],
            attempts_at=[at.attempts for at in stats.acceptance_by_position],
            accepted_at=[at.accepted for at in stats.acceptance_by_position],
            decode_s=[sum(part.stats.decode_s for part in run) for run in runs],
            switch_s=sum(part.stats.prefill_s for part in last),
        )

    def _models(self, drafting: Drafting) -> Models:
        """The model with what a drafter makes of it; quantised copies of one kind are shared."""
        config = drafting.config
        kind = floors.quantized_in(config)
        policy = config.cache_policy
        policy = policy if self._hashes is None else with_hashes(policy, self._hashes)
        arrays = prepared(policy, self.model, self._tokenizer)
        if config.draft.traits.needs_model:
            return Models(self.model, self._draft_model, arrays)
        models = config.draft.prepare(Models(self.model, self._copies.get(kind), arrays))
        self._copies[kind] = models.draft
        return models

    @property
    def plain_floor_ns(self) -> float:
        """Nanoseconds in which a plain step of a batch could read its bytes."""
        plain = jspec.StepConfig(0, jspec.NoDraft())
        of_parts = floors.of_iteration(
            Models(self.model), self.batch, self.mean_context, plain, self._limits
        )
        return sum(of_parts.values())

    def _timing_params(self, rows: Sequence[Sequence[int]]) -> list[jspec.SamplingParams]:
        """Requests that no end token ends, of as many tokens as there is room for."""
        one = jspec.SamplingParams(max_new_tokens=self._room, ignore_eos=True)
        return [dataclasses.replace(one, seed=row) for row in range(len(rows))]

    def _step_time(self, drafting: Drafting, sampling: str) -> Row:
        """Nanoseconds of a step while all rows of the first batch decode, and of its kernels.

        As in `jspec.generate`, a chunk starts before the one ahead of it is read.
        """
        config, models = drafting.config, self._models(drafting)
        flat, steps = FlatModels.of(models), usual_steps(config.draft, config.gamma)
        static = {"config": config, "steps": steps}
        state, run = self._started(models, config, sampling), PROGRAMS.timed()

        def start() -> StepRecord:
            nonlocal state
            state, record = run(decode_chunk, flat, state, **static)
            return record

        for _ in range(WARMUPS):
            jax.block_until_ready(start())
        running, following = start(), start()
        jax.block_until_ready(running)
        samples, begin = [], time.perf_counter_ns()
        while len(samples) < SAMPLES:
            running, following = following, start()
            if jax.device_get(running).done.any():  # a step of fewer rows is another step
                break
            end = time.perf_counter_ns()
            samples.append(round((end - begin) / steps))
            begin = end
        jax.block_until_ready(following)
        if not samples:
            raise RuntimeError(f"{drafting.name}: some row ended before a step could be timed")
        result: Row = {"step_ns": samples}
        if choices := self._choices.get((drafting.name, sampling)):
            result["backends"] = list(map(dataclasses.asdict, choices))
        of_parts = floors.of_iteration(models, self.batch, self.mean_context, config, self._limits)
        result["floors_ns"] = of_parts
        if point.DEVICE.reason is None and sampling == "greedy":
            program = run.executable(decode_chunk, (flat, state), static)
            result |= self._profile(start, program, steps, statistics.median(samples))
        return result

    def _started(self, models: Models, config: jspec.StepConfig, sampling: str) -> DecodeState:
        """The state of the first batch for steps of ``config``, as `jspec.generate` makes it."""
        return self._starting(models, config, sampling)(self.prefilled[0])

    def _shapes(self, models: Models, config: jspec.StepConfig, sampling: str) -> DecodeState:
        """The shapes of `_started`, without the memory of another cache."""
        before = self.prefilled[0]
        shapes = jax.eval_shape(self._starting(models, config, sampling), before)
        sharding = before.lengths.sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    def _starting(
        self, models: Models, config: jspec.StepConfig, sampling: str
    ) -> Callable[[DecodeState], DecodeState]:
        """What makes `_started` of the prefilled state of the first batch; `_shapes` traces it."""
        rows = self.batches[0]
        tokens, lengths = jax.device_get((self.prefilled[0].tokens, self.prefilled[0].lengths))
        params = [
            dataclasses.replace(timing, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p)
            for timing, p in zip(
                self._timing_params(rows), params_of(sampling, self._room, len(rows)), strict=True
            )
        ]
        ends = self.model.config.stop_tokens

        def start(before: DecodeState) -> DecodeState:
            state = convert_state(models, before, config)
            arrays = tokens, lengths, params, ends, state.cache, state.draft
            return place(state_of(*arrays, exact=state.exact), explicit_mesh_sharding(models))

        return start

    def _profile(self, chunk: Any, program: Any, steps: int, step_ns: float) -> Row:
        """The kernels of a step by part; a reason where CUPTI gives none."""
        try:
            launched = point.DEVICE.kernels(chunk)
        except RuntimeError as error:
            return {"profile": str(error)}
        about = kernels.figures(launched, program.as_text(), steps, step_ns)
        sums = {part: sum(kinds.values()) for part, kinds in about["parts_ns"].items()}
        return about | {"parts_ns": sums}


@jax.jit
def _rows_of(state: DecodeState, rows: jax.Array) -> DecodeState:
    return jax.tree.map(lambda x: x[rows], state)
