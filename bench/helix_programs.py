"""The programs of whole steps on a mesh and of their checks, and what one device computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from bench import helix_check, helix_state
from bench.cases import Case
from bench.decode.check import LAYERS
from bench.helix_check import Computed
from bench.helix_state import DEFAULT, MESH, alone, filled, model_of, shapes_of, step_config
from bench.settings import bar
from jspec.decode.step import decode_chunk

Start = Callable[[Any, Case], None]


class Programs:
    """Compiled programs by case, and the results of one device.

    Programs of many layers take long to compile: all are lowered before the first one runs, and
    compiled on all cores.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._chunks: dict[Any, Future[jax.stages.Compiled]] = {}
        self._checks: dict[Any, Future[jax.stages.Compiled]] = {}
        self._in_float32: dict[Any, Future[jax.stages.Compiled]] = {}
        self._reference: tuple[Any, Any] = (None, None)

    def prepare(self, cases: Sequence[Case]) -> None:
        """Compile what the ``cases`` and the checks of them need."""
        with bar("compile helix-step", 3 * len(cases)) as advance:
            _on_each_mesh(cases, None, self._start_chunk, advance)
            self.prepare_checks(cases, advance)
        for program in (*self._chunks.values(), *self._checks.values(), *self._in_float32.values()):
            program.exception()  # wait, since autotuning runs kernels on the device

    def prepare_checks(self, cases: Sequence[Case], advance: Callable[[], None]) -> None:
        """Begin to compile what the checks of the ``cases`` need."""
        _on_each_mesh([*cases, *map(alone, cases)], LAYERS, self._start_check, advance)

    def chunk(self, case: Case) -> jax.stages.Compiled:
        """`decode_chunk` of `STEPS` steps."""
        return self._chunks[_key(case)].result()

    def computed(self, case: Case, reference: Computed | None = None) -> Computed:
        """Run the first layers on the same tokens on the devices of a case.

        ``reference``: as in `bench.helix_check.computed`.
        """
        model = model_of(case, LAYERS)
        state = filled(model, case, step_config(case))
        program = self._checks[_key(case)].result()
        return helix_check.computed(program, model, state, case, reference)

    def reference(self, case: Case) -> tuple[Computed, Computed]:
        """The results of one device in bfloat16 and in float32."""
        case = alone(case)
        if self._reference[0] != case:
            one = self.computed(case)
            self._reference = case, (one, self._computed_in_float32(case, one))
        return self._reference[1]

    def _computed_in_float32(self, case: Case, reference: Computed) -> Computed:
        model, config = helix_check.in_float32(model_of(case, LAYERS), step_config(case))
        program, state = self._in_float32[_key(case)].result(), filled(model, case, config)
        return helix_check.computed(program, model, state, case, reference)

    def _start_chunk(self, model: Any, case: Case) -> None:
        config = step_config(case)

        def lower() -> Any:
            shapes = shapes_of(model, case, config)
            return decode_chunk.lower(model, shapes, config, helix_state.STEPS)

        self._start(self._chunks, case, lower)

    def _start_check(self, model: Any, case: Case) -> None:
        config = step_config(case)

        def lower(model: Any = model, config: Any = config) -> Any:
            return helix_check.lowered(model, shapes_of(model, case, config), config)

        def lower_in_float32() -> Any:
            with jax.default_matmul_precision("highest"):  # GPUs use less by default
                return lower(*helix_check.in_float32(model, config))

        self._start(self._checks, case, lower)
        if case == alone(case):
            self._start(self._in_float32, case, lower_in_float32)

    def _start(self, programs: dict[Any, Any], case: Case, lower: Callable[[], Any]) -> None:
        key = _key(case)
        if key in programs:
            return
        try:
            programs[key] = self._pool.submit(lower().compile)
        except Exception as error:
            # Its traceback and those of its causes reference caches.
            error.__context__ = error.__cause__ = None
            programs[key] = Future()
            programs[key].set_exception(error.with_traceback(None))


def _key(case: Case) -> tuple[Any, ...]:
    return tuple(sorted(case.items()))


def _on_each_mesh(
    cases: Sequence[Case], layers: int | None, start: Start, advance: Callable[[], None]
) -> None:
    """Call ``start`` for each case with its model of ``layers`` layers, made once per mesh."""

    def mesh_of(case: Case) -> Case:
        return DEFAULT | {name: case[name] for name in ("shape", *MESH)}

    by_mesh = sorted(cases, key=lambda case: str(mesh_of(case)))
    for mesh, group in itertools.groupby(by_mesh, key=mesh_of):
        model = model_of(mesh, layers)
        for case in group:
            start(model, case)
            advance()
        del model
