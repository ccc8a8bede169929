"""Orders of backends and block sizes as data: a JSON file for each GPU, and one for CPUs.

The fields of a file:

- ``gpu``: the device kind as JAX names it.
- ``compute_capability``: such as "9.0", null for CPUs.
- ``measured``: whether the orders were measured on that device.
- ``orders``: by operation, rules that take a list of backends, best first. An operation without
  rules takes its `jspec.dispatch.Operation.default_order`.
- ``blocks``: for each operation and backend, rules that take block sizes by name, none for CPUs;
  also for the ``exchange`` of Helix, the chunks by its ``rows``.

A rule is ``{"up_to": {SIZE: BOUND, ...}, "take": ...}``. The first rule whose sizes are all at most
their bounds applies; the last one has no ``up_to``. Sizes are those of
`jspec.dispatch.Operation.sizes`. ``python -m bench tune`` writes orders and
block sizes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jspec.gpu import gpu_in_use

FOLDER = Path(__file__).parent
CPU = "cpu"  # the table whose orders serve without a GPU
DEFAULT = "h100"  # whose block sizes do: in lowering for a GPU, or interpreting a kernel
FIELDS = ("gpu", "compute_capability", "measured", "orders", "blocks")


class TableError(ValueError):
    """A table that cannot be read, or that has no block sizes for a backend."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The entry ``take``, for sizes that are at most their bounds in ``up_to``."""

    up_to: Mapping[str, int]
    take: Any


@dataclasses.dataclass(frozen=True)
class Table:
    """A file of this folder: its fields as in the docstring of the module; ``name`` is its stem."""

    name: str
    gpu: str
    compute_capability: tuple[int, int] | None
    measured: bool
    orders: Mapping[str, Sequence[Rule]]
    blocks: Mapping[str, Mapping[str, Sequence[Rule]]]

    def order(self, operation: str, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
        """Backends of ``operation`` for these sizes, best first; None if not measured."""
        if operation not in self.orders:
            return None
        return tuple(self._take(self.orders[operation], operation, sizes))

    def block(self, operation: str, backend: str, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Block sizes of a backend for arguments of these sizes, by name."""
        rules = self.blocks.get(operation, {}).get(backend)
        if rules is None:
            raise TableError(f"{self.name}.json has no block sizes for {operation}, {backend}")
        return dict(self._take(rules, f"{operation}, {backend}", sizes))

    def _take(self, rules: Sequence[Rule], what: str, sizes: Mapping[str, int]) -> Any:
        """The entry of the first rule whose bounds hold for ``sizes``; ``what``: for errors."""
        for rule in rules:
            for name in rule.up_to:
                if name not in sizes:
                    raise TableError(
                        f"{self.name}.json bounds {name!r} of {what}, whose sizes are "
                        f"{', '.join(sizes)}"
                    )
            if all(sizes[name] <= bound for name, bound in rule.up_to.items()):
                return rule.take
        raise AssertionError("the last rule of a loaded table holds for all sizes")


@dataclasses.dataclass(frozen=True)
class Serving:
    """The table that is used on a device.

    Attributes:
        table: The table.
        guess: Why its orders may not suit the device; None for a table that was measured on it.
    """

    table: Table
    guess: str | None


def order(operation: str, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The order of backends on the GPU in use, or on a CPU; None if not measured."""
    return serving(gpu_in_use()).table.order(operation, sizes)


class Blocks(Protocol):
    """What has block sizes, such as a `Table`."""

    def block(self, operation: str, backend: str, sizes: Mapping[str, int]) -> dict[str, Any]: ...


_BLOCKS: contextvars.ContextVar[Blocks | None] = contextvars.ContextVar("blocks", default=None)


@contextlib.contextmanager
def use_blocks(blocks: Blocks) -> Iterator[None]:
    """A context in which kernels take these block sizes.

    They are read while JAX traces: whatever is jitted must be traced again for others.
    """
    token = _BLOCKS.set(blocks)
    try:
        yield
    finally:
        _BLOCKS.reset(token)


def block(operation: str, backend: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The block sizes of a backend on the GPU in use, those of `DEFAULT` without one."""
    return (_BLOCKS.get() or _table_of_blocks()).block(operation, backend, sizes)


def blocks(operation: str, backend: str) -> tuple[Mapping[str, Any], ...]:
    """All results that `block` can have."""
    return tuple(rule.take for rule in _table_of_blocks().blocks[operation][backend])


def _table_of_blocks() -> Table:
    gpu = gpu_in_use()
    return tables()[DEFAULT] if gpu is None else serving(gpu).table


@functools.cache
def tables() -> dict[str, Table]:
    """Every table of this folder, by name."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.json"))}


@functools.cache
def serving(gpu: tuple[str, tuple[int, int]] | None) -> Serving:
    """The table for a GPU of this device kind and compute capability; `CPU` for None."""
    table = tables()[CPU] if gpu is None else nearest(*gpu, list(tables().values()))
    if gpu is not None and table.gpu != gpu[0]:
        return Serving(table, f"this is {gpu[0]}")
    device = "CPU" if gpu is None else "GPU"
    unmeasured = f"its orders were not measured on this {device}"
    return Serving(table, None if table.measured else unmeasured)


def nearest(kind: str, capability: tuple[int, int], among: Sequence[Table]) -> Table:
    """The table whose GPU is most like this one.

    First the same device kind, then a name that is a word of it (an H100 of another memory size),
    then the nearest compute capability; of equals a measured one, then the first.
    """
    words = kind.lower().split()

    def distance(table: Table) -> tuple[Any, ...]:
        major, minor = (
            abs(a - b) for a, b in zip(table.compute_capability or (), capability, strict=True)
        )
        return table.gpu != kind, table.name not in words, major, minor, not table.measured

    return min((x for x in among if x.compute_capability is not None), key=distance)


def load(path: Path) -> Table:
    """Read a table; raises `TableError` with the reason where it cannot be used."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or set(content) != set(FIELDS):
        raise TableError(f"{path} must be an object with the fields {', '.join(FIELDS)}")
    if not isinstance(content["gpu"], str) or not isinstance(content["measured"], bool):
        raise TableError(f"{path}: gpu must be a string and measured a bool")
    capability = _capability(content["compute_capability"], path)
    orders = {
        name: _rules(rules, _is_order, f"{path}, orders of {name}")
        for name, rules in _object(content["orders"], f"{path}, orders").items()
    }
    blocks = {
        name: {
            backend: _rules(rules, _is_block, f"{path}, blocks of {name}, {backend}")
            for backend, rules in _object(of, f"{path}, blocks of {name}").items()
        }
        for name, of in _object(content["blocks"], f"{path}, blocks").items()
    }
    return Table(path.stem, content["gpu"], capability, content["measured"], orders, blocks)


def _capability(value: Any, path: Path) -> tuple[int, int] | None:
    if value is None:
        return None
    try:
        major, minor = map(int, value.split("."))
    except (AttributeError, ValueError):
        raise TableError(
            f'{path}: compute_capability must be such as "9.0", not {value!r}'
        ) from None
    return major, minor


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{where}: must be an object, not {value!r}")
    return value


def _rules(entries: Any, is_take: Callable[[Any], bool], where: str) -> tuple[Rule, ...]:
    if not isinstance(entries, list) or not entries:
        raise TableError(f"{where}: there must be a list of rules, not {entries!r}")
    rules = []
    for number, rule in enumerate(entries, 1):
        location = f"{where}, rule {number} of {len(entries)}"
        if "take" not in _object(rule, location) or not set(rule) <= {"up_to", "take"}:
            raise TableError(f"{location}: the fields are up_to and take, not {', '.join(rule)}")
        up_to = _object(rule.get("up_to", {}), location)
        if not all(type(bound) is int for bound in up_to.values()):
            raise TableError(f"{location}: up_to must give whole numbers by size, not {up_to}")
        if bool(up_to) == (number == len(entries)):
            raise TableError(f"{location}: the last rule, and no other, has no up_to")
        if not is_take(rule["take"]):
            raise TableError(f"{location}: it cannot take {rule['take']!r}")
        rules.append(Rule(up_to, rule["take"]))
    return tuple(rules)


def _is_order(take: Any) -> bool:
    """Backends by name, each once."""
    names = isinstance(take, list) and all(isinstance(name, str) for name in take)
    return names and 0 < len(take) == len(set(take))


def _is_block(take: Any) -> bool:
    """Whole numbers and flags by name."""
    return isinstance(take, dict) and all(type(x) in (int, bool) for x in take.values())
