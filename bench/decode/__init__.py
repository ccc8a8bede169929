"""The time of a decoding step at the shapes of real models, plain and as verification.

Weights, keys and values are random. A pass of T tokens is a step without a draft whose gamma is
T - 1: shaped like one that verifies. Clock: *step* is the marginal wall time of a jitted chunk of
steps in a sequence of chunks, divided by its steps.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax

from bench import point
from bench.decode import catalogue, prefill, shapes
from bench.decode.shapes import Ceilings
from bench.decode.steps import Case, Steps
from bench.decode.tables import compare, show
from bench.machine import matrix_ceiling, read_ceiling
from bench.program import Absent, failure
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.cli.compile_cache import keep_programs
from jspec.models.decoder import Decoder

SWEEP = (1, 2, 4, 8, 10, 16)  # tokens of a pass
PAIR = (1, 10)
LONG = 120 * 1024
QUICK = (
    Case("qwen3-8b", 1, 8192, PAIR),
    Case("qwen3-8b", 32, 8192, PAIR),
    Case("qwen3-8b", 4, LONG, PAIR),
)
WHOLE = (
    Case("qwen3-8b", 1, 2048, (1,)),
    Case("qwen3-8b", 1, 8192, SWEEP),
    Case("qwen3-8b", 1, 32768, (1,)),
    *QUICK[1:],
    *(
        Case(name, *sizes, PAIR)
        for name in ("qwen3-4b", "llama-3.1-8b", "gpt-oss-20b-attention")
        for sizes in ((1, 8192), (4, LONG))
    ),
)
STEPS = 16  # of a chunk
# Without a GPU a step of two layers takes a second.
CPU = (Case("qwen3-4b", 1, 2048, (1,)),)
CPU_LAYERS, CPU_STEPS = 2, 1
PREFILLED = (16384, 65536)


def cases(settings: Settings) -> list[Case]:
    """The requested cases."""
    asked = settings.decode
    if asked.batches or asked.contexts or asked.tokens:
        crossed = itertools.product(
            asked.models or ("qwen3-8b",), asked.batches or (1,), asked.contexts or (8192,)
        )
        return [Case(*sizes, asked.tokens or PAIR) for sizes in crossed]
    defaults = CPU if jax.default_backend() == "cpu" else QUICK if settings.quick else WHOLE
    if not asked.models:
        return list(defaults)
    known = [case for case in defaults if case.model in asked.models]
    others = [name for name in asked.models if all(name != case.model for case in defaults)]
    return known + [Case(name, 1, 8192, PAIR) for name in others]


def run(settings: Settings) -> dict[str, Any]:
    """Every case of every model; cases of a model in the order of their cache sizes."""
    keep_programs()
    chosen = cases(settings)
    asked, cpu = settings.decode, jax.default_backend() == "cpu"
    asked = dataclasses.replace(
        asked,
        layers=asked.layers or (CPU_LAYERS if cpu else None),
        steps=asked.steps or (CPU_STEPS if cpu else STEPS),
    )
    settings = dataclasses.replace(settings, decode=asked)
    names = list(dict.fromkeys(case.model for case in chosen))
    all_defaults = not (asked.batches or asked.contexts or asked.tokens or settings.quick)
    prefilled = names[: None if asked.models else 1] if all_defaults and not cpu else []
    ceilings = Ceilings(read_ceiling(), None if cpu else matrix_ceiling())
    return {
        "read_ceiling_bytes_per_s": ceilings.read,
        "matrix_ceiling_flops_per_s": ceilings.matrix,
        "steps": asked.steps,
        "rows": _rows(chosen, settings, ceilings, prefilled),
    }


def _rows(
    chosen: list[Case], settings: Settings, ceilings: Ceilings, prefilled: list[str]
) -> Iterator[point.Row]:
    # No variable here references a model, so that it is freed before the next one is made.
    for name in dict.fromkeys(case.model for case in chosen):
        cases_of_model = [case for case in chosen if case.model == name]
        yield from steps_of(drawn(name, settings), cases_of_model, settings, ceilings)
    # Last, since their matmuls of many rows take long to compile.
    for name in prefilled:
        if ceilings.matrix is not None:
            yield from _prefills(name, drawn(name, settings), settings, ceilings.matrix)


def drawn(name: str, settings: Settings) -> Decoder:
    """A model by name with random weights, of as many layers as were asked for."""
    config = catalogue.MODELS[name]
    layers = settings.decode.layers or config.num_layers
    config = shapes.first_layers(config, layers)
    return shapes.random_model(config, mxfp4=name in catalogue.IN_MXFP4)


def _prefills(
    name: str, model: Decoder, settings: Settings, matrix_ceiling: float
) -> Iterator[point.Row]:
    """The rows of a model's prefill."""
    for tokens in PREFILLED:
        yield prefill.row(name, model, tokens, settings, matrix_ceiling)


def steps_of(
    model: Decoder, chosen: list[Case], settings: Settings, ceilings: Ceilings
) -> Iterator[point.Row]:
    """The rows of a model's steps."""
    measured = [Steps(model, case, settings, ceilings) for case in chosen]
    yield from by_size(chosen[0].model, measured)


class Measured(Protocol):
    """Something to compile and measure: `Steps` or an `Iteration`."""

    @property
    def size(self) -> int: ...
    def lowerings(self) -> dict[Any, Callable[[], jax.stages.Lowered]]: ...
    def rows(self, programs: Mapping[Any, Any]) -> Iterator[point.Row]: ...


def by_size(label: str, measured: Sequence[Measured]) -> Iterator[point.Row]:
    """The rows of each of ``measured``, whose programs are compiled concurrently."""
    # The smallest first: the device reports the peak memory of all that ran so far.
    measured = sorted(measured, key=lambda steps: steps.size)
    # All programs first, before a cache takes the memory that compiling needs.
    programs = _compiled(label, [steps.lowerings() for steps in measured])
    with bar(label, len(measured)) as advance:
        for steps, (ready, seconds) in zip(measured, programs, strict=True):
            for row in steps.rows(ready):
                yield row | {"compile_s": seconds}
            gc.collect()  # a failure's traceback may hold a cache
            advance()


def _compiled(
    label: str, cases: Sequence[Mapping[Any, Callable[[], jax.stages.Lowered]]]
) -> list[tuple[dict[Any, jax.stages.Compiled | Absent], dict[str, float]]]:
    """Each case's programs, or `Absent` for one that failed, and the seconds of compiling each.

    Lowered one after the other, compiled concurrently.
    """
    programs: list[tuple[dict[Any, Any], dict[str, float]]] = [({}, {}) for _ in cases]
    every = [
        (of_case, key, lower)
        for of_case, case in zip(programs, cases, strict=True)
        for key, lower in case.items()
    ]

    def compiled(lowered: jax.stages.Lowered, key: Any, seconds: dict[str, float]) -> Any:
        begin = time.perf_counter()
        program = lowered.compile()
        seconds[str(key)] = round(time.perf_counter() - begin, 2)
        return program

    with ThreadPoolExecutor() as pool, bar(f"compile {label}", len(every)) as advance:
        for (of_case, seconds), key, lower in every:
            try:
                of_case[key] = pool.submit(compiled, lower(), key, seconds)
            except Exception as error:
                of_case[key] = failure(str(key), error)
        for (of_case, _), key, _ in every:
            if not isinstance(of_case[key], Absent):
                try:
                    of_case[key] = of_case[key].result()
                except Exception as error:
                    of_case[key] = failure(str(key), error)
            advance()
    return programs


SUITE = Suite(
    "decode",
    "a step of real models' shapes with random weights, plain and as verification, and prefill",
    run,
    show,
    compare=compare,
)
