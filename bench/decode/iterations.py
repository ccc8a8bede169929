"""The time of an iteration, a draft and its verification, at a real model's shape."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench import clocks, point
from bench.decode import floors, parts, phases
from bench.decode.check import counted
from bench.decode.draft_check import DraftCheck
from bench.decode.padding import NoisyPadding
from bench.decode.running import (
    CHUNKS,
    REPEATS,
    Loop,
    first_run,
    kernels_of,
    memory_of,
    of_kernels,
    too_large,
)
from bench.decode.shapes import Ceilings, weight_bytes
from bench.decode.states import Blueprint
from bench.policies import arrays_of
from bench.program import Absent, failure
from bench.settings import Settings
from jspec.decode.draft import NoDraft, named_draft
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.models.decoder import Decoder

Programs = Mapping[Any, Any]
CPU_REPEATS = 3  # where an iteration takes seconds


@dataclasses.dataclass(frozen=True)
class Shape:
    """``batch`` rows of ``context`` tokens of a ``model`` by name."""

    model: str
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A row's ``name``, its ``draft`` (as in `named_draft`) and ``gamma``.

    ``exact``: whether the target's passes are exact.
    """

    name: str
    draft: str
    gamma: int
    exact: bool = False

    @property
    def config(self) -> StepConfig:
        draft = named_draft(self.draft)
        if isinstance(draft, NoDraft):
            draft = NoisyPadding()
        return StepConfig(self.gamma, draft, exact=self.exact)


def iterations(
    model: Decoder,
    shape: Shape,
    draftings: Sequence[Drafting],
    settings: Settings,
    ceilings: Ceilings,
) -> list[Iteration]:
    """The iterations to measure; drafts that read the same kind of copy share it."""
    measured, copies = [], {}
    for drafting in draftings:
        config = drafting.config
        cache_policy = config.cache_policy
        arrays = arrays_of(cache_policy, model.config.layers)
        kind = floors.quantized_in(config)
        models = config.draft.prepare(Models(model, copies.get(kind), arrays))
        copies[kind] = models.draft
        measured.append(Iteration(models, shape, drafting, settings, ceilings))
    return measured


class Iteration:
    """Measures one drafter's iteration: compile what `lowerings` gives, then take `rows`."""

    def __init__(
        self,
        models: Models,
        shape: Shape,
        drafting: Drafting,
        settings: Settings,
        ceilings: Ceilings,
    ):
        self.shape, self.drafting, self._models = shape, drafting, models
        self._config, self._settings = drafting.config, settings
        self._steps = settings.decode.steps
        target: Any = models.target
        self._target: Decoder = target
        room = CHUNKS[1] * self._steps * (drafting.gamma + 1)
        sizes = shape.batch, shape.context, drafting.gamma, room
        options = {"policy": self._config.cache_policy, "exact": drafting.exact}
        self._blueprint = Blueprint.of(self._target, *sizes, **options)
        self._floors = floors.of_iteration(
            models, shape.batch, shape.context, self._config, ceilings
        )
        self._check = DraftCheck(models, self._config, self._drafter_state)

    @property
    def size(self) -> int:
        """Bytes of the cache."""
        return self._blueprint.shapes.cache.nbytes

    def lowerings(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """Functions that lower each program: a chunk, and those of the check."""
        drafter_state = jax.eval_shape(self._drafter_state, self._models)
        shapes = dataclasses.replace(self._blueprint.shapes, draft=drafter_state)

        def lower() -> jax.stages.Lowered:
            return decode_chunk.lower(self._models, shapes, config=self._config, steps=self._steps)

        return {"chunk": lower} | (self._check.lowerings(shapes) if self._settings.check else {})

    def rows(self, programs: Programs) -> Iterator[point.Row]:
        """Yield the iteration's row, with times if its output was right."""
        for program in programs.values():
            if isinstance(program, Absent):
                yield self._row(False, reason=program.reason)
                return
        program = programs["chunk"]
        memory = memory_of(program)
        reason = too_large(self._resident_bytes, memory)
        if reason:
            yield self._row(None, reason=reason, **memory)
            return
        try:
            yield from self._measured(programs, memory)
        except Exception as error:
            reason = failure(self.drafting.name, error).reason
            yield self._row(False, reason=reason, **memory)

    def _measured(self, programs: Programs, memory: dict[str, Any]) -> Iterator[point.Row]:
        program, drafter_state = programs["chunk"], self._jitted_drafter_state()
        filled = self._blueprint.filled(self._target.config.vocab_size)

        def rewound(state: DecodeState) -> DecodeState:
            # A chunk consumes its state.
            draft = jax.tree.map(jnp.copy, drafter_state)
            return dataclasses.replace(self._blueprint.rewound(state), draft=draft)

        state = rewound(filled)
        del filled
        state, record, peak = first_run(partial(program, self._models), state)
        about = memory | peak
        if not (record.committed >= 1).all():
            raise RuntimeError("an iteration committed no token in some row")
        if not self._settings.check:
            yield self._row(None, reason="not checked, so not timed", **about)
            return
        reason, error = self._check.wrong(rewound(state), programs)
        about["error"] = error
        if reason:
            yield self._row(False, reason=reason, **about)
            return
        run = partial(Loop(self._models, rewound, state).run, program)
        del state
        short, long = (partial(run, count) for count in CHUNKS)
        repeats = CPU_REPEATS if jax.default_backend() == "cpu" else REPEATS
        samples = clocks.step(short, long, 0.0, repeats, lengths=CHUNKS)
        about["step_ns"] = [round(ns / self._steps) for ns in samples]
        failed = None
        if point.DEVICE.reason is None:
            try:
                about |= self._kernels(run, program, statistics.median(about["step_ns"]))
            except RuntimeError as error:
                failed = f"device clock: {error}"
        yield self._row(counted(self._check.layers), **about)
        if failed:
            yield self._row(False, reason=failed)

    def _kernels(self, run: Callable[[int], Any], program: Any, step_ns: float) -> dict[str, Any]:
        """The number of kernels of an iteration, and the times of its parts."""
        kernels = kernels_of(partial(run, 1))
        sums = phases.by_part(kernels, parts.origins(program.as_text()))
        return of_kernels(kernels, self._steps, step_ns) | {
            "parts_ns": {
                part: {kind: ns / self._steps for kind, ns in kinds.items()}
                for part, kinds in sums.items()
            }
        }

    def _drafter_state(self, models: Models) -> Any:
        """The drafter's state after the context, with which it was prefilled."""
        state, draft = self._blueprint.shapes, self._config.draft
        (batch, capacity), context = state.tokens.shape, self.shape.context
        drafter_state = draft.init(models, batch, capacity, self._config.gamma)
        tokens = jnp.arange(capacity, dtype=jnp.int32) % self._target.config.vocab_size
        tokens = jnp.broadcast_to(tokens, (batch, capacity))
        lengths = jnp.full(batch, context, jnp.int32)
        with self._config.of_models():
            return draft.sync(models, drafter_state, tokens, lengths, context)

    def _jitted_drafter_state(self) -> Any:
        return jax.jit(self._drafter_state)(self._models)

    @property
    def _resident_bytes(self) -> int:
        """Bytes of weights and cache."""
        copies = {id(x): x.nbytes for x in jax.tree.leaves(self._models)}
        return sum(copies.values()) + self.size

    def _row(self, checked: str | bool | None, **rest: Any) -> point.Row:
        shape, drafting = self.shape, self.drafting
        at = {
            "model": shape.model,
            "layers": self._target.config.num_layers,
            "B": shape.batch,
            "S": shape.context,
            "gamma": drafting.gamma,
            "draft": drafting.name,
        }
        return point.row(
            "iteration",
            at,
            drafting.name,
            checked=checked,
            setting=drafting.draft,
            floors_ns=self._floors,
            weight_bytes=weight_bytes(self._target),
            draft_weight_bytes=floors.draft_weight_bytes(
                self._models, shape.batch, drafting.config
            ),
            cache_bytes=self.size,
            **rest,
        )
