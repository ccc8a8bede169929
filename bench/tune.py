"""`python -m bench tune`: the order of backends on a device, fitted to what was measured there.

A point is a case of an operation; its ratios are the backends' times over the fastest one's. Times
are of a step in a jitted loop where they were measured, since a call that XLA cannot capture in a
graph costs several launches there, else spans of kernels with the gaps between them, else device
times, with what launches cost in a step.
An order costs, at a point, the ratio of the first of its backends that ran. Points may be cut in
two by a size and a bound, and the parts again, where that lowers the cost enough. Each part becomes
a rule of the table (see `jspec.tuned`), those below a bound first. Without a folder of results,
block sizes are searched instead: see `bench.blocks`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import blocks, show
from bench.cases import Case
from bench.earlier import as_today
from bench.point import best_clock, by_case, spread
from bench.settings import Settings, console
from bench.suite import OperationBenchmark, of_operation
from jspec import tuned
from jspec.dispatch import Operation
from jspec.gpu import gpu_in_use
from jspec.ops import operations
from jspec.tuned import Rule, Table

# Microseconds in which no kernel runs before one that waits for the kernel before it, in a graph:
# what is idle of steps of real models, for each of their launches.
WAIT = 0.5
GAIN = 0.002  # least reduction of the mean ratio of an operation by a rule
DEPTH = 2  # of nested cuts: at most four rules


@dataclasses.dataclass(frozen=True)
class Point:
    """The sizes of a case, and the time of each backend over the fastest one's."""

    sizes: Mapping[str, int]
    ratios: Mapping[str, float]

    def cost(self, order: Sequence[str]) -> float:
        """The ratio of the first backend of ``order`` that ran, or the worst ratio if none ran."""
        ran = (self.ratios[name] for name in order if name in self.ratios)
        return next(ran, max(self.ratios.values()))


def tune(folder: Path, path: Path) -> None:
    """Fit the order of each operation to the JSON files of ``folder``, and write a table.

    Rules of an existing table are fitted one by one, so that those which no result reaches stay.

    Args:
        folder: of results of one device. Their rows say the sizes by which orders are chosen.
        path: the table to write.

    Raises:
        ValueError: where nothing can be fitted to the results.
    """
    results = [as_today(show.read(path)) for path in sorted(folder.glob("*.json"))]
    rows = [row for result in results for row in result["rows"] if row.get("sizes")]
    if not rows:
        raise ValueError(
            f"no row under {folder} has the sizes of its arguments; measure again by "
            "`python -m bench all --json FOLDER`"
        )
    machines = [result["machine"] for result in results]
    devices = {machine["device"] for machine in machines}
    if len(devices) != 1:
        raise ValueError(f"{folder} is of several devices: {', '.join(sorted(devices))}")
    base = _base(path, devices.pop(), machines[0].get("compute_capability"))
    unmeasured = {x.name: [Rule({}, list(x.default_order))] for x in operations()}
    orders = dict(base.orders or unmeasured)
    for operation in operations():
        points = points_of(rows, operation)
        if points:
            orders[operation.name] = refined(operation, points, base.orders.get(operation.name))
    path.write_text(text(dataclasses.replace(base, measured=True, orders=orders)))
    tuned.load(path)


def tune_blocks(
    path: Path,
    benchmarks: Sequence[OperationBenchmark],
    cases: Sequence[str] = (),
    only: Sequence[str] = (),
) -> None:
    """Search block sizes on the GPU in use, and write them into a table.

    Args:
        path: the table to write; where it does not exist, the search starts from the table in use.
        benchmarks: of the operations to search, where no case is named.
        cases: the ones to search at, such as ``op=linear,rows=96``, and no others.
        only: the backends to search, all where it is empty.

    Raises:
        ValueError: without an NVIDIA GPU, and for a case that is invalid.
    """
    planned: dict[str, tuple[OperationBenchmark, list[Case]]] = {}
    for benchmark, case in (of_operation(text, benchmarks) for text in cases):
        planned.setdefault(benchmark.name, (benchmark, []))[1].append(case)
    every = planned.values() or [(x, x.grid(Settings(True))) for x in benchmarks]
    gpu = gpu_in_use()
    if gpu is None:
        raise ValueError("block sizes are searched on an NVIDIA GPU, and JAX sees none")
    device, capability = gpu
    base = _base(path, device, "{}.{}".format(*capability))
    path.write_text(text(blocks.search(base, list(every), only)))
    tuned.load(path)


def refined(
    operation: Operation, points: Sequence[Point], before: Sequence[Rule] | None
) -> Sequence[Rule]:
    """The rules of ``before``, each fitted to the points that it applies to.

    A rule that applies to no point stays as it is, and so does one that costs no more than what is
    fitted. What costs less holds up to the sizes at which its first backend was measured, and the
    rule that it was fitted in place of stays for larger ones. Rules have no lower bounds: it holds
    for smaller sizes too. A rule that no size reaches, or that the next one repeats, is dropped.

    Args:
        operation: whose backends are ordered.
        points: all that were measured.
        before: the rules of a table, None where it has none. What is fitted then holds for all
            sizes.
    """
    rules, rest = list[Rule](), list(points)
    for rule in before or ():
        reached = [point for point in rest if _applies(rule, point)]
        rest = [point for point in rest if not _applies(rule, point)]
        fitted = fit(reached, operation) if reached else []
        if fitted and sum(_costs(reached, fitted)) < sum(_costs(reached, [Rule({}, rule.take)])):
            rules += _bounded(fitted, reached, rule)
        rules.append(rule)
    rules = rules or fit(points, operation)
    rules = [x for i, x in enumerate(rules) if not any(_covers(y, x) for y in rules[:i])]
    remaining = [rule for rule, next_ in itertools.pairwise(rules) if not _repeats(rule, next_)]
    rules = [*remaining, rules[-1]]
    screen = console()
    screen.print(f"{operation.name}, implementation=None against the fastest backend:")
    if before:
        screen.print(f"  before: {_speed(points, before)}, {len(before)} rules")
    screen.print(f"  fitted: {_speed(points, rules)}, {len(rules)} rules")
    return rules


def _bounded(fitted: Sequence[Rule], points: Sequence[Point], before: Rule) -> list[Rule]:
    """The rules fitted to ``points``, each up to the sizes at which its first backend ran.

    ``before`` is the rule that these points reach. A rule that would only change what comes after
    the first backend of ``before`` takes its order.
    """
    rules, rest = list[Rule](), list(points)
    for rule in fitted:
        reached = [point for point in rest if _applies(rule, point)]
        rest = [point for point in rest if not _applies(rule, point)]
        is_same = rule.take[0] == before.take[0] and set(rule.take) <= set(before.take)
        take = before.take if is_same else rule.take
        ran = [point for point in reached if take[0] in point.ratios]
        rules += [Rule(sizes, take) for sizes in _largest(ran)]
    while rules and list(rules[-1].take) == list(before.take):
        rules.pop()  # ``before`` follows
    return rules


def _largest(points: Sequence[Point]) -> list[dict[str, int]]:
    """The sizes of points that no other point has, or exceeds, all of."""
    names = _shared_sizes(points)
    every = dict.fromkeys(tuple(point.sizes[name] for name in names) for point in points)
    return [
        dict(zip(names, sizes, strict=True))
        for sizes in every
        if not any(
            other != sizes and all(x >= y for x, y in zip(other, sizes, strict=True))
            for other in every
        )
    ]


def _shared_sizes(points: Sequence[Point]) -> list[str]:
    """The sizes that all points have; results of other versions may lack some."""
    return [name for name in points[0].sizes if all(name in point.sizes for point in points)]


def _applies(rule: Rule, point: Point) -> bool:
    return all(point.sizes.get(name, bound) <= bound for name, bound in rule.up_to.items())


def order_at(rules: Sequence[Rule], sizes: Mapping[str, int]) -> Sequence[str] | None:
    """The order of ``rules`` at the sizes of a result, which may lack some that later ones have."""
    return next((rule.take for rule in rules if _applies(rule, Point(sizes, {}))), None)


def _covers(rule: Rule, other: Rule) -> bool:
    """Whether ``rule`` applies wherever ``other`` does."""
    return all(other.up_to.get(name, bound + 1) <= bound for name, bound in rule.up_to.items())


def _repeats(rule: Rule, following: Rule) -> bool:
    """Whether ``following`` has the order of ``rule`` wherever that applies."""
    return _covers(following, rule) and list(rule.take) == list(following.take)


def points_of(rows: Sequence[dict[str, Any]], operation: Operation) -> list[Point]:
    """The points at which backends of an operation ran, without exact backends."""
    names = {name for name in operation.backends if not name.startswith("exact")}
    points = []
    of_backends = [row for row in rows if row["name"] in names]
    for rows_of_point in by_case(of_backends, operation.name):
        medians = _medians(rows_of_point)
        if medians:
            least = min(medians.values())
            ratios = {name: median / least for name, median in medians.items()}
            points.append(Point(rows_of_point[0]["sizes"], ratios))
    return points


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The time of each backend at a point, by the step clock if all of them have it."""
    steps = {row["name"]: spread(row, "step") for row in rows}
    if None not in steps.values():
        return {name: time.median for name, time in steps.items() if time is not None}
    return {
        row["name"]: time.median + (0.0 if spread(row, "span") else WAIT * row.get("waits", 0))
        for row in rows
        if (time := best_clock(row)) is not None
    }


def fit(points: Sequence[Point], operation: Operation) -> list[Rule]:
    """The rules with the least cost at these points, with cuts nested up to `DEPTH`."""
    return _fit(points, operation, GAIN * len(points), DEPTH)[1]


def _fit(
    points: Sequence[Point], operation: Operation, price: float, depth: int
) -> tuple[float, list[Rule]]:
    """The rules that cost least, and what they cost: the points, and the price of each rule."""
    order = _best_order(points, operation)
    cheapest = _cost(points, order) + price, [Rule({}, order)]
    if depth == 0:
        return cheapest
    for size in _shared_sizes(points):
        values = sorted({point.sizes[size] for point in points})
        for low, high in itertools.pairwise(values):
            bound = int((low * high) ** 0.5)  # halfway, as sizes double
            parts = (_fit(x, operation, price, depth - 1) for x in _parts(points, size, bound))
            (cost_below, below), (cost_above, above) = parts
            if cost_below + cost_above < cheapest[0] - 1e-6:
                bounded = [Rule({size: bound} | dict(rule.up_to), rule.take) for rule in below]
                cheapest = cost_below + cost_above, bounded + above
    return cheapest


def _parts(points: Sequence[Point], size: str, bound: int) -> tuple[list[Point], list[Point]]:
    below = [point for point in points if point.sizes[size] <= bound]
    return below, [point for point in points if point.sizes[size] > bound]


def _cost(points: Sequence[Point], order: Sequence[str]) -> float:
    return sum(point.cost(order) for point in points)


def _best_order(points: Sequence[Point], operation: Operation) -> list[str]:
    """Backends by mean ratio, with the first one chosen to minimise the cost.

    The order ends with the first backend that supports all arguments.
    """
    ran: dict[str, list[float]] = {}
    for point in points:
        for name, ratio in point.ratios.items():
            ran.setdefault(name, []).append(ratio)
    ranked = sorted(ran, key=lambda name: sum(ran[name]) / len(ran[name]))
    orders = [[name, *(x for x in ranked if x != name)] for name in ranked]
    best = [*min(orders, key=lambda order: _cost(points, order)), "xla"]
    last = next(i for i, name in enumerate(best) if name in operation.never_refusing)
    return best[: last + 1]


def _costs(points: Sequence[Point], rules: Sequence[Rule]) -> list[float]:
    """The cost of these rules' orders at each point."""
    return [point.cost(order_at(rules, point.sizes) or ()) for point in points]


def _speed(points: Sequence[Point], rules: Sequence[Rule]) -> str:
    """The speed of these rules' orders relative to the fastest backend."""
    speeds = [1 / cost for cost in _costs(points, rules)]
    return f"mean {statistics.mean(speeds):.4f}x, worst {min(speeds):.2f}x, {len(speeds)} points"


def _base(path: Path, device: str, capability: str | None) -> Table:
    """The table to start from: the existing file, or the table in use for this device."""
    if path.exists():
        base = tuned.load(path)
        if base.gpu != device:
            raise ValueError(f"{path} is for {base.gpu}, and the results are of {device}")
        return base
    if device == tuned.CPU:
        return Table(path.stem, device, None, True, {}, {})
    if capability is None:
        raise ValueError(
            f"the results do not say the compute capability of {device}; measure again, or begin "
            f"with a copy of another table as {path}"
        )
    major, minor = map(int, capability.split("."))
    near = tuned.nearest(device, (major, minor), list(tuned.tables().values()))
    return dataclasses.replace(near, gpu=device, compute_capability=(major, minor))


def text(table: Table) -> str:
    """A table as JSON, one rule per line."""
    capability = table.compute_capability and ".".join(map(str, table.compute_capability))
    head = {"gpu": table.gpu, "compute_capability": capability, "measured": table.measured}
    fields = [f'"{name}": {json.dumps(value)}' for name, value in head.items()]
    orders = [_lines(name, rules, 4) for name, rules in table.orders.items()]
    blocks = []
    for name, of in table.blocks.items():
        inner = ",\n".join(_lines(backend, rules, 6) for backend, rules in of.items())
        blocks.append(f'    "{name}": {{\n{inner}\n    }}')
    for name, lines in (("orders", orders), ("blocks", blocks)):
        fields.append(
            f'"{name}": {{\n' + ",\n".join(lines) + "\n  }" if lines else f'"{name}": {{}}'
        )
    return "{\n" + ",\n".join(f"  {field}" for field in fields) + "\n}\n"


def _lines(name: str, rules: Sequence[Rule], indent: int) -> str:
    pad = " " * indent
    lines = []
    for rule in rules:
        bounds = {"up_to": dict(rule.up_to)} if rule.up_to else {}
        lines.append(f"{pad}  {json.dumps(bounds | {'take': rule.take})}")
    return f'{pad}"{name}": [\n' + ",\n".join(lines) + f"\n{pad}]"
