"""Suites: what they measure, at which cases, and how a result is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from bench import cases, ceilings, point, table
from bench.cases import Case
from bench.clocks import Feed, add_steps
from bench.program import Absent, Program, Source, bound, chosen, compile_all, shapes, sources
from bench.rivals.common import Maker, each
from bench.settings import Settings, bar
from jspec.dispatch import Operation

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of `python -m bench`.

    Attributes:
        name: of the suite.
        title: one line of what it measures.
        run: returns the result: ``rows``, which may be an iterator, and what the report needs.
        show: prints a result.
        operations: whose backends ``--backend`` can name.
        rivals: what else it can name.
        custom_clocks: whether rows are timed by other clocks than those of `bench.clocks`.
        case: parses a case of ``--case``, `ValueError` if it is invalid; None: cases are fixed.
        benchmarks: those that it consists of, if any.
    """

    name: str
    title: str
    run: Callable[[Settings], Result]
    show: Callable[[Result], None] = table.show
    operations: tuple[Operation, ...] = ()
    rivals: tuple[str, ...] = ()
    custom_clocks: bool = False
    case: Callable[[str], Any] | None = None
    benchmarks: tuple[Benchmark, ...] = ()

    @property
    def names(self) -> set[str]:
        """The names of all backends and rivals that it can run."""
        backends = {name for operation in self.operations for name in operation.backends}
        return backends | set(self.rivals)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a suite measures at each of its cases.

    Attributes:
        name: the value of ``op`` in ``--case`` that selects it.
        names: what ``--backend`` can select.
        rows: checks and times everything that the settings select at a case.
        default: every option of a case, and its default value.
        gpu: the cases on a GPU, each as for ``--case``.
        quick: those of ``--quick`` there.
        cpu: the cases on a CPU, of which ``--quick`` takes the first.
        choices: the words that an option can be.
        complete: fills in options that depend on others; raises `ValueError` for a case that makes
            no sense.
    """

    name: str
    rows: Callable[[Case, Settings], Iterable[point.Row]]
    names: tuple[str, ...] = ()
    default: Mapping[str, Any]
    gpu: Sequence[str]
    quick: Sequence[str]
    cpu: Sequence[str]
    choices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    complete: Callable[[Case], Case] = lambda case: case

    def case(self, text: str) -> Case:
        """Parse a case; raises `ValueError` if it is invalid."""
        return self.complete(cases.parse(text, self.default, self.choices))

    def grid(self, settings: Settings) -> list[Case]:
        """The default cases."""
        if jax.default_backend() == "gpu":
            texts = self.quick if settings.quick else self.gpu
        else:
            texts = self.cpu[:1] if settings.quick else self.cpu
        return [self.case(text) for text in texts]


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers that run after the first in one program, so that times include what is between them.

    Attributes:
        arguments: of each, after the first argument.
        follow: makes the first argument of a layer from the outputs of the one before.
    """

    arguments: tuple[tuple[Any, ...], ...]
    follow: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Setup:
    """An operation at one case.

    Attributes:
        arguments: of its backends, on the device.
        check: whether the outputs of a backend are right.
        bytes: what the operation must read and write, once.
        static: the keyword arguments of its backends.
        rivals: what makes the programs of other libraries, by name.
        feed: how steps of a jitted loop depend on each other; None: steps are not timed.
        layers: what else runs in the same program; ``check`` is of the last one's outputs.
        in_place: from the index of an output to that of the argument in whose memory it is.
    """

    arguments: tuple[Any, ...]
    check: Callable[[Any], bool]
    bytes: int
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rivals: Mapping[str, Maker] = dataclasses.field(default_factory=dict)
    feed: Feed | None = None
    layers: Layers | None = None
    in_place: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of a program: with layers, the first argument and the others of each."""
        if self.layers is None:
            return self.arguments
        return self.arguments[0], self.arguments[1:], *self.layers.arguments

    def programs(self, operation: Operation, settings: Settings) -> dict[str, Source | Absent]:
        """The programs of the backends that the settings select."""
        by_backend = sources(operation, shapes(self.arguments), settings, **self.static)
        return {
            name: self.program(x.function) if isinstance(x, Source) else x
            for name, x in by_backend.items()
        }

    def bound(
        self, name: str, compiled: jax.stages.Compiled | Absent, *, chosen: bool = False
    ) -> Program | Absent:
        """One of `programs`, compiled, with its arguments."""
        of_setup = {"chosen": chosen, "in_place": self.in_place}
        return bound(name, compiled, self.inputs, self.check, **of_setup)

    def program(self, function: Callable[..., Any]) -> Source:
        """The program of a backend's function; it returns the outputs of the last layer."""
        layers = self.layers
        if layers is None:
            return Source(function, shapes(self.arguments), tuple(self.in_place.values()))

        def run(x: Any, first: tuple[Any, ...], *others: tuple[Any, ...]) -> Any:
            outputs = function(x, *first)
            for arguments in others:
                outputs = function(layers.follow(outputs), *arguments)
            return outputs

        return Source(run, shapes(self.inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationBenchmark(Benchmark):
    """The backends of an operation and its rivals.

    Attributes:
        operation: whose backends are measured.
        setup: makes arguments, check and rivals of a case.
        rivals: the names of other libraries' programs.
        states: of the L2 cache on a GPU, ``"warm"`` or ``"cold"``; a CPU has warm ones alone.
    """

    name: str = dataclasses.field(init=False)
    names: tuple[str, ...] = dataclasses.field(init=False)
    rows: Callable[[Case, Settings], Iterable[point.Row]] = dataclasses.field(init=False)
    operation: Operation
    setup: Callable[[Case], Setup]
    rivals: tuple[str, ...] = ()
    states: tuple[str, ...] = ("cold",)  # a step reads a layer's weights before its cache

    def __post_init__(self):
        names = (*self.operation.backends, *(name.rpartition("+")[2] for name in self.rivals))
        for field, value in (("name", self.operation.name), ("names", names)):
            object.__setattr__(self, field, value)
        object.__setattr__(self, "rows", self._rows)

    def _rows(self, case: Case, settings: Settings) -> list[point.Row]:
        setup = self.setup(case)
        arguments, static = setup.arguments, dict(setup.static)
        by_backend = setup.programs(self.operation, settings)
        best = chosen(self.operation, arguments, **static)
        seconds: dict[str, float] = {}
        programs = [
            setup.bound(name, program, chosen=name == best)
            for name, program in compile_all(self.name, by_backend, seconds).items()
        ]
        programs += each(setup.rivals, settings)
        rows = point.measure(
            self.name,
            case,
            programs,
            settings,
            states=self.states,
            moved=setup.bytes,
            layers=1 if setup.layers is None else 1 + len(setup.layers.arguments),
        )
        sizes = dict(self.operation.sizes(*arguments, **static))
        for row in rows:
            if row.get("backend"):
                row["sizes"] = sizes
            if row["name"] in seconds:
                row["compile_s"] = round(seconds[row["name"]], 3)
        if setup.feed is not None:
            add_steps(rows, by_backend, arguments, setup.feed, settings.repeats)
        return rows


def of_operation(text: str, benchmarks: Iterable[Benchmark]) -> tuple[OperationBenchmark, Case]:
    """The benchmark of the operation that a case begins with, ``op=NAME,...``, and the case.

    Raises:
        ValueError: where none of ``benchmarks`` is of that operation, or the case is invalid.
    """
    by_name = {x.name: x for x in benchmarks if isinstance(x, OperationBenchmark)}
    name, _, rest = text.partition(",")
    benchmark = by_name.get(name.removeprefix("op="))
    if benchmark is None or not name.startswith("op="):
        raise ValueError(f"{text!r} must begin with op= and one of {', '.join(by_name)}")
    return benchmark, benchmark.case(rest)


def suite_of(name: str, title: str, *benchmarks: Benchmark) -> Suite:
    """A suite of these benchmarks; ``--case`` without ``op`` is of the first one."""
    by_name = {benchmark.name: benchmark for benchmark in benchmarks}

    def parse(text: str) -> tuple[Benchmark, Case]:
        """The benchmark of a case, and the case."""
        options = text.split(",")
        names = [option.removeprefix("op=") for option in options if option.startswith("op=")]
        rest = ",".join(option for option in options if not option.startswith("op="))
        benchmark = by_name.get((names or [benchmarks[0].name])[-1])
        if benchmark is None:
            raise ValueError(f"op={names[-1]} must be one of {', '.join(by_name)}")
        return benchmark, benchmark.case(rest)

    def run(settings: Settings) -> Result:
        planned = [parse(text) for text in settings.cases] or [
            (benchmark, case) for benchmark in benchmarks for case in benchmark.grid(settings)
        ]
        return {"ceilings": ceilings.rows(settings), "rows": rows(planned, settings)}

    def rows(planned: Sequence[tuple[Benchmark, Case]], settings: Settings) -> Iterator[point.Row]:
        with bar(name, len(planned)) as advance:
            for benchmark, case in planned:
                yield from benchmark.rows(case, settings)
                advance()

    names = {name: None for benchmark in benchmarks for name in benchmark.names}
    return Suite(name, title, run, rivals=tuple(names), case=parse, benchmarks=benchmarks)
