"""The rows of one case: the time of a step at a batch and context, by tokens of a pass."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax

from bench import clocks, point
from bench.decode import parts
from bench.decode.check import TOLERANCE, Check, counted
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
from bench.decode.shapes import (
    Ceilings,
    product_flops,
    read_cache_bytes,
    read_weight_bytes,
    weight_bytes,
)
from bench.decode.states import Blueprint
from bench.policies import arrays_of, policies
from bench.program import Absent, failure
from bench.settings import Settings
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.dispatch import BackendError
from jspec.models.decoder import Decoder
from jspec.ops.attention.dense import ATTENTION
from jspec.policies import Policy

SHARE = 64  # a policy selects one in 64 tokens of the context: 1.56 %
LEAST = 128  # selected tokens at least, as policies with pages need
DENSE_LAYERS = 2  # first layers, in which the policy does not select
Programs = Mapping[Any, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A ``model`` by name, with ``batch`` rows of ``context`` tokens; ``tokens``: of the passes.

    ``policy``: the name of a policy of `bench.policies` by which the model reads the cache, with a
    budget of one token in `SHARE` and `DENSE_LAYERS`; passes of several tokens are dense.
    """

    model: str
    batch: int
    context: int
    tokens: tuple[int, ...]
    policy: str = "dense"

    @property
    def count(self) -> int:
        """The number of tokens that the policy selects."""
        return max(self.context // SHARE, LEAST)

    def made(self) -> Policy:
        """The policy with the budget of this case."""
        return policies(self.count, dense_layers=DENSE_LAYERS)[self.policy]


class Steps:
    """Measures a case: compile what `lowerings` gives, then take `rows`."""

    def __init__(self, model: Decoder, case: Case, settings: Settings, ceilings: Ceilings):
        self.case, self._model, self._settings = case, model, settings
        self._ceilings, self._asked = ceilings, settings.decode
        room, gamma = CHUNKS[1] * self._asked.steps, max(case.tokens) - 1
        self._policy = case.made()
        arrays = None if case.policy == "dense" else arrays_of(self._policy, model.config.layers)
        self._models = Models(model, policy=arrays)
        self._blueprint = Blueprint.of(model, case.batch, case.context, gamma, room, self._policy)
        sizes = case.context, case.tokens
        self._check = Check(model, *sizes, self._asked.backends, self._policy, arrays)

    @property
    def size(self) -> int:
        """Bytes of the cache."""
        return self._blueprint.shapes.cache.nbytes

    def lowerings(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """Functions that lower each program: a chunk for each pass, and those of the check."""
        shapes = self._blueprint.shapes

        def lower(tokens: int) -> jax.stages.Lowered:
            config = StepConfig(tokens - 1, NoisyPadding(), self._asked.backends, self._policy)
            return decode_chunk.lower(self._models, shapes, config=config, steps=self._asked.steps)

        chunks = {tokens: partial(lower, tokens) for tokens in self.case.tokens}
        return chunks | (self._check.lowerings(shapes) if self._settings.check else {})

    def rows(self, programs: Programs) -> Iterator[point.Row]:
        """Yield a row for each pass, with times if its output was right."""
        ran: dict[int, dict[str, Any]] = {}
        state = None
        for tokens in self.case.tokens:
            program = programs[tokens]
            if not isinstance(program, Absent):
                memory = memory_of(program)
                resident = weight_bytes(self._model) + self.size
                reason = too_large(resident, memory)
                if reason:
                    yield self._row(tokens, None, reason=reason, **memory)
                    continue
                try:
                    state = self._filled() if state is None else self._blueprint.rewound(state)
                    state, record, peak = first_run(partial(program, self._models), state)
                    if not (record.committed == 1).all():
                        raise RuntimeError("a step without a draft did not commit one token a row")
                except Exception as error:
                    program, state = failure(tokens, error), None
                else:
                    ran[tokens] = memory | peak
            if isinstance(program, Absent):
                yield self._row(tokens, False, reason=program.reason)
        if ran:
            yield from self._timed(self._filled() if state is None else state, ran, programs)

    def _filled(self) -> DecodeState:
        return self._blueprint.filled(self._model.config.vocab_size)

    def _timed(
        self, state: DecodeState, ran: dict[int, dict[str, Any]], programs: Programs
    ) -> Iterator[point.Row]:
        """The rows of the passes that ran."""
        errors: dict[int, float] = {}
        if self._settings.check:
            try:
                errors = self._check.errors(state, self._checks(programs))
            except Exception as error:
                for tokens in ran:
                    yield self._row(tokens, False, reason=failure("check", error).reason)
                return
        loop = Loop(self._models, self._blueprint.rewound, state)
        del state
        for tokens, memory in ran.items():
            if not self._settings.check:
                reason = "not checked, so not timed"
                yield self._row(tokens, None, reason=reason, **memory)
            elif not errors[tokens] <= TOLERANCE:
                reason = f"its logits are wrong by {errors[tokens]:.1%}"
                yield self._row(tokens, False, reason=reason, error=errors[tokens], **memory)
            else:
                about = {"error": errors[tokens]} | memory
                yield from self._right(loop, programs[tokens], tokens, about)

    def _right(
        self, loop: Loop, program: Any, tokens: int, about: dict[str, Any]
    ) -> Iterator[point.Row]:
        """The row of a correct pass, and one with the reason if its kernels are not known."""
        run, failed = partial(loop.run, program), None
        try:
            short, long = (partial(run, count) for count in CHUNKS)
            samples = clocks.step(short, long, 0.0, REPEATS, lengths=CHUNKS)
            about["step_ns"] = [round(ns / self._asked.steps) for ns in samples]
        except Exception as error:
            yield self._row(tokens, False, reason=failure(tokens, error).reason, **about)
            return
        if point.DEVICE.reason is None:
            try:
                kernels = kernels_of(partial(run, 1))
            except RuntimeError as error:
                failed = str(error)
            else:
                steps, step_ns = self._asked.steps, statistics.median(about["step_ns"])
                sums = parts.by_part(kernels, parts.origins(program.as_text()))
                about |= of_kernels(kernels, steps, step_ns)
                about["parts_ns"] = {part: ns / steps for part, ns in sums.items()}
        yield self._row(tokens, counted(self._check.layers), **about)
        if failed is not None:
            yield self._row(tokens, False, reason=f"device clock: {failed}")

    def _checks(self, programs: Programs) -> dict[Any, Any]:
        """The programs of the check; raises `RuntimeError` if one did not compile."""
        check_programs = {key: programs[key] for key in programs if isinstance(key, tuple)}
        for program in check_programs.values():
            if isinstance(program, Absent):
                raise RuntimeError(program.reason)
        return check_programs

    def _row(self, tokens: int, checked: str | bool | None, **rest: Any) -> point.Row:
        config, case = self._model.config, self.case
        at = {
            "model": case.model,
            "layers": config.num_layers,
            "B": case.batch,
            "context": case.context,
            "T": tokens,
        }
        if case.policy != "dense":
            at["policy"] = case.policy
        fed = case.batch * tokens
        weights = read_weight_bytes(self._model, fed)
        reads = case.batch, case.context, self._model.dtype, self._policy, case.count
        cached = read_cache_bytes(config, *reads)
        flops = product_flops(self._model, fed)
        return point.row(
            "decode_step",
            at,
            self._attention(tokens),
            checked=checked,
            read_bytes=weights + cached,
            floor_ns=self._ceilings.floor_ns(weights, cached, flops),
            weight_bytes=weight_bytes(self._model),
            cache_bytes=self.size,
            **rest,
        )

    def _attention(self, tokens: int) -> str:
        """The backend of attention in a layer without a window."""
        config, asked = self._model.config, self._asked.backends.get("attention")
        layer = next((i for i, spec in enumerate(config.layers) if spec.window is None), 0)
        columns, spec = self._blueprint.shapes.cache.columns[layer], config.layers[layer]
        q = jax.ShapeDtypeStruct(
            (self.case.batch, tokens, config.num_heads, spec.key_size), self._model.dtype
        )
        positions = jax.ShapeDtypeStruct(q.shape[:2], "int32")
        arguments = q, columns["keys"], columns["values"], positions
        settings = {"key_positions": None, "scale": spec.key_size**-0.5, "window": None}
        settings |= {"softcap": spec.softcap, "value_size": None}
        try:
            return ATTENTION.choose(asked, *arguments, **settings).name
        except BackendError:
            return str(asked)
