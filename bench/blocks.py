"""`python -m bench tune --json FILE`: block sizes, searched on the GPU in use.

Of each rule of a backend's block sizes, one number after the other is halved and doubled while the
cases to which the rule applies become faster; flags are flipped. Cases are those of ``--case``,
else of ``--quick``, and outputs are checked at each trial. Rules and their bounds stay as they are.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from bench.cases import Case
from bench.point import best_clock
from bench.settings import Settings, bar, console
from bench.suite import OperationBenchmark
from jspec import tuned
from jspec.tuned import Rule, Table

GAIN = 0.02  # least reduction of time by a change
Rules = Sequence[Rule]


class RecordingTable:
    """Block sizes of a table, where those of one backend are ``rules``; ``used`` are their indices
    in the order of look-ups."""

    def __init__(self, table: Table, operation: str, backend: str, rules: Rules):
        of_operation = {**table.blocks[operation], backend: rules}
        self.table = dataclasses.replace(table, blocks={**table.blocks, operation: of_operation})
        self.key, self.rules, self.used = (operation, backend), list(rules), list[int]()

    def block(self, operation: str, backend: str, sizes: Mapping[str, int]) -> dict[str, Any]:
        take = self.table.block(operation, backend, sizes)
        if (operation, backend) == self.key:
            applies = (
                all(sizes[name] <= bound for name, bound in rule.up_to.items())
                for rule in self.rules
            )
            self.used.append(list(applies).index(True))
        return take


def search(
    table: Table,
    cases: Sequence[tuple[OperationBenchmark, Sequence[Case]]],
    only: Sequence[str] = (),
) -> Table:
    """The table with block sizes that are the fastest of those tried on this GPU.

    Args:
        table: to start from.
        cases: of each operation whose block sizes are searched.
        only: the backends to search, all where it is empty.
    """
    blocks = {operation: dict(of) for operation, of in table.blocks.items()}
    for benchmark, of_operation in cases:
        for backend in blocks.get(benchmark.name, {}):
            if backend in benchmark.operation.backends and (not only or backend in only):
                rules = _searched(table, benchmark, of_operation, backend)
                blocks[benchmark.name][backend] = rules
                table = dataclasses.replace(table, blocks=blocks)
    return table


def _searched(
    table: Table, benchmark: OperationBenchmark, cases: Sequence[Case], backend: str
) -> Rules:
    """The rules of a backend, each with the fastest block sizes at these cases."""
    rules, settings = list(table.blocks[benchmark.name][backend]), Settings(True, (backend,))
    by_rule: dict[int, list[tuple[OperationBenchmark, Case]]] = {}
    with bar(f"{benchmark.name}, {backend}", len(rules)) as advance:
        for case in cases:
            setup = benchmark.setup(case)  # once for all trials
            fixed = dataclasses.replace(benchmark, setup=lambda _, setup=setup: setup)
            trial = RecordingTable(table, benchmark.name, backend, rules)
            if _microseconds(trial, fixed, case, settings) is not None and trial.used:
                by_rule.setdefault(trial.used[0], []).append((fixed, case))

        def cost(index: int, take: Mapping[str, Any]) -> float:
            """The geometric mean of the cases' times, infinite where one is wrong."""
            changed = [*rules[:index], Rule(rules[index].up_to, take), *rules[index + 1 :]]
            trial = RecordingTable(table, benchmark.name, backend, changed)
            times = [_microseconds(trial, *x, settings) for x in by_rule[index]]
            known = [time for time in times if time is not None]
            return statistics.geometric_mean(known) if len(known) == len(times) else float("inf")

        for index in by_rule:
            best, before = dict(rules[index].take), cost(index, rules[index].take)
            least = before
            for name in rules[index].take:
                for candidate in _candidates(best[name]):
                    while (time := cost(index, best | {name: candidate})) < least * (1 - GAIN):
                        step = candidate / best[name] if type(candidate) is int else 0
                        best, least = best | {name: candidate}, time
                        candidate = int(candidate * step)
                        if not step or not candidate:
                            break
            console().print(f"{benchmark.name}, {backend}, rule {index + 1}: {before / least:.2f}x")
            rules[index] = Rule(rules[index].up_to, best)
            advance()
    return rules


def _candidates(value: int | bool) -> Iterator[int | bool]:
    """The values to try next to one."""
    if isinstance(value, bool):
        yield not value
    else:
        yield from filter(None, (value // 2, value * 2))


def _microseconds(
    trial: RecordingTable, benchmark: OperationBenchmark, case: Case, settings: Settings
) -> float | None:
    """The time of a case by these block sizes, None where it fails or is wrong."""
    jax.clear_caches()  # programs traced with other block sizes
    with tuned.use_blocks(trial):
        rows = list(benchmark.rows(case, settings))
    times = [time.median for row in rows if (time := best_clock(row)) is not None]
    return min(times, default=None)
