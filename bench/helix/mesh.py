"""Programs on the mesh of a `HelixConfig`: their check and their marginal time in a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench import clocks, point
from bench.cases import Case
from bench.program import failure
from bench.settings import Settings
from jspec.dispatch import BackendError
from jspec.helix import HelixConfig

LENGTHS = (16, 112)  # steps of the two loops of a program, of which a call runs one
REPEATS = 12  # of both at most: a step over a million positions takes a millisecond


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A program on the devices of ``helix``, measured as a row of the ``case``.

    Attributes:
        operation: of the row.
        case: of the row.
        name: of the row.
        helix: the mesh.
        body: on every device, ``body(*arguments)`` returns the outputs.
        following: on every device, the first argument of a loop's next step from the arguments.
        arguments: makes the arguments; is also traced for their shapes.
        specs: the sharding of arguments.
        out: the sharding of outputs.
        is_right: whether outputs are right for some arguments.
        moved: bytes that a device reads and writes.
    """

    operation: str
    case: Case
    name: str
    helix: HelixConfig
    body: Callable[..., Any]
    following: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    specs: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    out: Any
    is_right: Callable[[Any, tuple[Any, ...]], bool]
    moved: Callable[[tuple[Any, ...]], int]

    def row(self, settings: Settings) -> point.Row:
        """Check the program; its row has the time of a step, or the reason why not."""
        row = partial(point.row, self.operation, self.case, self.name)
        if reason := too_few_devices(self.helix) or self.helix.refuses_all_to_all():
            return row(checked=None, reason=reason)
        try:
            program, arguments = self._compiled(), self.arguments()
            short, long = (
                partial(program, jax.device_put(np.int32(i), self.helix.sharding()), *arguments)
                for i in range(2)
            )
            if not self.is_right(short()[0], arguments):
                return row(checked=False, reason="its output is wrong")
            times = marginal(short, long, min(settings.repeats, REPEATS))
            return row(checked=True, bytes=self.moved(arguments), step_ns=times)
        except BackendError as error:
            return row(checked=None, reason=str(error))
        except Exception as error:
            return row(checked=False, reason=failure(self.name, error).reason)

    def _compiled(self) -> jax.stages.Compiled:
        """A program that returns the outputs and the result of one of the two loops.

        Both loops are in one program, chosen by its first argument: lowering takes longer than
        compiling.
        """

        def loop(steps: int) -> Callable[..., Any]:
            def run(x: Any, *others: Any) -> Any:
                def step(x: Any, _: None) -> tuple[Any, None]:
                    return self.following(x, *others), None

                return jax.lax.scan(step, x, length=steps, unroll=clocks.UNROLL)[0]

            return run

        def body(which: Any, *arguments: Any) -> Any:
            return self.body(*arguments), jax.lax.switch(which, [*map(loop, LENGTHS)], *arguments)

        shapes = jax.eval_shape(self.arguments)
        specs = PartitionSpec(), *self.specs(shapes)
        mesh = self.helix.mesh
        shard = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=(self.out, specs[1]), check_vma=False
        )
        places = jax.tree.map(
            partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        jitted = jax.jit(shard, in_shardings=places, compiler_options=self.helix.compiler_options)
        return jitted.lower(jax.ShapeDtypeStruct((), np.int32), *shapes).compile()


def too_few_devices(helix: HelixConfig) -> str | None:
    """Why this machine has no such mesh, or None."""
    if jax.device_count() >= helix.devices:
        return None
    return f"it needs {helix.devices} devices, and JAX has {jax.device_count()}"


def marginal(short: Callable[[], Any], long: Callable[[], Any], repeats: int) -> list[int]:
    """Samples of the marginal nanoseconds of a step, above a step that only counts."""
    return clocks.step(short, long, clocks.empty_step(repeats), repeats, LENGTHS)
