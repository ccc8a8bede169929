"""The time of an iteration, a draft and its verification, at a real model's shape."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bench import point
from bench.cases import Case
from bench.ceilings import Ceilings
from bench.decode import floors, kernels
from bench.decode.check import Check
from bench.decode.running import CHUNKS, Loop, compiled, memory_of, rewound, too_large
from bench.decode.states import Blueprint
from bench.drafters import STEP_SAMPLING
from bench.program import failure
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.dispatch import record_choices


@dataclasses.dataclass(frozen=True)
class Iteration:
    """An iteration at a case, to be checked and timed.

    Attributes:
        operation: of the row.
        case: of the row; ``B`` rows of ``S`` tokens.
        name: of the row.
        models: with what the drafter and the policy need.
        config: of the step.
        steps: iterations of a jitted chunk.
        ceilings: of this machine.
    """

    operation: str
    case: Case
    name: str
    models: Models
    config: StepConfig
    steps: int
    ceilings: Ceilings

    def measure(self) -> Iterator[point.Row]:
        """Yield its row, with times if its output was right."""
        try:
            yield from self._rows()
        except Exception as error:
            yield self._row(False, reason=failure(self.name, error).reason)
        gc.collect()  # a failure's traceback may refer to a cache

    def _rows(self) -> Iterator[point.Row]:
        target: Any = self.models.target
        room = CHUNKS[1] * self.steps * (self.config.gamma + 1)
        blueprint = Blueprint.of(
            *(target, self.case["B"], self.case["S"], self.config.gamma, room),
            policy=self.config.cache_policy,
            exact=self.config.exact,
            sampling=STEP_SAMPLING[self.case.get("sampling", "greedy")],
        )

        def drafter_state(models: Models) -> Any:
            return self._drafter_state(models, blueprint.shapes)

        check = Check(self.models, self.config, drafter_state)
        draft = jax.eval_shape(drafter_state, self.models)
        shapes = dataclasses.replace(blueprint.shapes, draft=draft)

        def lower() -> jax.stages.Lowered:
            return decode_chunk.lower(self.models, shapes, config=self.config, steps=self.steps)

        with record_choices() as choices:
            chunk = lower()
        lowerings = {"chunk": lambda: chunk, **check.lowerings(shapes)}
        programs = compiled(lowerings)
        program, memory = programs["chunk"], memory_of(programs["chunk"])
        copies = {id(x): x.nbytes for x in jax.tree.leaves(self.models)}
        in_host = sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.cache) if x.sharding
        )
        memory |= {"weight_bytes": sum(copies.values()), "host_bytes": in_host}
        memory["cache_bytes"] = shapes.cache.nbytes - in_host
        if reason := too_large(memory["weight_bytes"] + memory["cache_bytes"], memory):
            yield self._row(None, reason=reason, memory=memory)
            return
        drafter = jax.jit(drafter_state)(self.models)

        start = self.case["S"], drafter
        state = rewound(blueprint.filled(target.config.vocab_size), *start)
        reason, error = check.wrong(state, programs)
        if reason:
            yield self._row(False, reason=reason, error=error, memory=memory)
            return
        state, record = jax.block_until_ready(program(self.models, rewound(state, *start)))
        if not (record.committed >= 1).all():
            raise RuntimeError("an iteration committed no token in some row")
        loop = Loop(program, self.models, state, *start)
        del state
        samples = loop.step_ns(self.steps)
        median = statistics.median(samples)
        about = {"over_floor": median / sum(self.floors_ns.values())} if median > 0 else {}
        about |= self._kernels(loop, program, median)
        about |= {"backends": list(map(dataclasses.asdict, choices))} if choices else {}
        about |= {"error": error, "step_ns": samples, "memory": memory}
        yield self._row(check.compared, **about)

    def _kernels(self, loop: Loop, program: Any, step_ns: float) -> dict[str, Any]:
        """The figures of the kernels of an iteration, or why the device clock has none."""
        if point.DEVICE.reason is not None:
            return {}
        try:
            launched = point.DEVICE.kernels(lambda: loop.run(1))
        except RuntimeError as error:
            return {"profile": {"reason": str(error)}}
        return kernels.figures(launched, program.as_text(), self.steps, step_ns)

    @property
    def floors_ns(self) -> dict[str, float]:
        """The least nanoseconds of each part."""
        return floors.of_iteration(
            self.models, self.case["B"], self.case["S"], self.config, self.ceilings
        )

    def _drafter_state(self, models: Models, state: DecodeState) -> Any:
        """The drafter's state after the context, with which it was prefilled."""
        draft, (batch, capacity) = self.config.draft, state.tokens.shape
        drafter_state = draft.init(models, batch, capacity, self.config.gamma)
        tokens = jnp.arange(capacity, dtype=jnp.int32) % models.target.config.vocab_size
        tokens = jnp.broadcast_to(tokens, (batch, capacity))
        lengths = jnp.full(batch, self.case["S"], jnp.int32)
        with self.config.of_models():
            return draft.sync(models, drafter_state, tokens, lengths, self.case["S"])

    def _row(self, checked: str | bool | None, **rest: Any) -> point.Row:
        target: Any = self.models.target
        case = self.case | {"layers": target.config.num_layers}
        rest |= {"floors_ns": self.floors_ns, "settings": {"draft": repr(self.config.draft)}}
        return point.row(self.operation, case, self.name, checked=checked, **rest)
