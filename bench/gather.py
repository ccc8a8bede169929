"""Attention over a selection of a cache: read in place, or copied once and read as a dense cache.

Rows of ``gather`` read the selection where it lies. Those of ``copy`` and ``read`` are the other
way: one copy of the selection, then dense attention over the copy, as `jspec.policies.attend` does
in a loop that reads one selection many times. `Even` says from how many reads on that is faster.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention, cases, ceilings, point, regret, table, workload
from bench.caches import DTYPE, Check, bytes_of, made
from bench.cases import Case, heads, kilo
from bench.program import Absent, Program, Source, bound, chosen, compile_all, shapes, sources
from bench.rivals import gather as rivals
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.ops.attention import dense
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.attention.gathered import GATHERED
from jspec.typing import Array

COLUMNS = ("B", "S", "n", "heads", "T", "indices", "part")
DEFAULT: Case = {
    "B": 8,
    "S": 131072,
    "n": 8192,
    "heads": "32/8",
    "H": 128,
    "T": 1,
    "indices": "shared",
}
BYTES = (
    "keys and values of the n selected and the T newest slots, queries and outputs, and 4 bytes "
    "an index: 2 * 2 bytes * H * B * (K * (n + T) + T * N); a copy reads and writes its keys and "
    "values"
)
OPERATIONS = {"gather": "gathered_attention", "copy": "compact_copy", "read": "compact_read"}


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT)
    if case["n"] + case["T"] > case["S"]:
        raise ValueError(f"n={case['n']} and T={case['T']} must fit into S={case['S']}")
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or the suite's defaults."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [case("B=1,S=8K,n=512"), case("B=1,S=8K,n=512,heads=32/32,indices=per-head")]
    some = ("S=128K,n=8K", "S=32K,n=512,heads=32/32,indices=per-head")
    whole = (some[0], "S=128K,n=8K,T=10", some[1], "S=32K,n=2K")
    return [case(text) for text in (some if settings.quick else whole)]


@dataclasses.dataclass(frozen=True)
class Selected:
    """``q [B, T, N, H]``; ``k``, ``v [B, S, K, H]``; ``positions`` int32 ``[B, T]``, the last ones
    of the cache; ``selected`` int32 ``[B, n]`` or ``[B, K, n]``, slots below ``context_len [B]``;
    ``tail`` int32 ``[B, T]``, the slots of the queries themselves."""

    q: Array
    k: Array
    v: Array
    positions: Array
    selected: Array
    tail: Array
    context_len: Array

    @property
    def arguments(self) -> tuple[Array, ...]:
        """Of the backends of `jspec.ops.gathered_attention`."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def inputs(case: Mapping[str, Any]) -> Selected:
    """A selection in random order; values not selected, and the last selected one, are large."""
    batch, slots, tokens, count = case["B"], case["S"], case["T"], case["n"]
    heads_of_indices = heads(case)[1] if case["indices"] == "per-head" else 1
    rng = np.random.default_rng([workload.SEED, batch, slots, count])
    drawn = [
        rng.choice(slots - tokens, count, replace=False) for _ in range(batch * heads_of_indices)
    ]
    selected = np.array(drawn, np.int32).reshape(batch, heads_of_indices, count)
    large = np.ones((batch, heads_of_indices, slots), bool)
    np.put_along_axis(large, selected[..., :-1], False, axis=2)
    q, k, v = made(case, np.swapaxes(large, 1, 2), np.full(batch, count + tokens))
    newest = np.broadcast_to(np.arange(slots - tokens, slots, dtype=np.int32), (batch, tokens))
    if case["indices"] == "shared":
        selected = selected[:, 0]
    context_len = np.full(batch, slots - tokens, np.int32)
    return Selected(q, k, v, *map(jnp.asarray, (newest, selected, newest, context_len)))


@jax.jit
def picked(x: Array, slots: Array) -> Array:
    """``x [B, S, K, H]`` at ``slots``, int32 ``[B, n]`` or ``[B, K, n]``, by plain indexing."""

    def at(x: Array, slots: Array) -> Array:
        return x[slots]

    return jax.vmap(at if slots.ndim == 2 else jax.vmap(at, (1, 0), 1))(x, slots)


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("gather", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from _measured(case, settings)
            advance()


def _measured(case: Case, settings: Settings) -> Iterator[point.Row]:
    """The rows of a case: read in place, the copy, and the reading of the copy."""
    data = inputs(case)
    slots = _with_tail(data.selected, data.tail)
    k, v = picked(data.k, slots), picked(data.v, slots)
    counts = case["n"] + 1 + jnp.arange(case["T"], dtype=jnp.int32)
    check = Check.of(data.q, k, v, jnp.broadcast_to(counts, data.positions.shape))
    yield from _gather(case, data, check, settings)
    if settings.wants("xla"):
        yield from _copy(case, data, (k, v), settings)
    yield from _read(case, data, (k, v), check, settings)


def _with_tail(selected: Array, tail: Array) -> Array:
    """The selected slots and then the newest ones, for each KV head where selections differ."""
    if selected.ndim == 3:
        tail = jnp.broadcast_to(tail[:, None], (*selected.shape[:2], tail.shape[1]))
    return jnp.concatenate([selected, tail], axis=-1)


def _gather(case: Case, data: Selected, check: Check, settings: Settings) -> list[point.Row]:
    by_backend = sources(GATHERED, shapes(data.arguments), settings, **static(case))
    best = chosen(GATHERED, data.arguments, **static(case))
    programs = [
        bound(name, program, data.arguments, check.both, chosen=name == best)
        for name, program in compile_all("gather", by_backend).items()
    ]
    programs += rivals.gather(data, check.output, settings)
    moved = _needed(case) + data.selected.nbytes
    return _rows_of("gather", case, programs, settings, moved)


def _copy(
    case: Case, data: Selected, expected: tuple[Array, Array], settings: Settings
) -> list[point.Row]:
    """One copy of the selection, with room for the newest tokens after it, as `Compact.of` in
    `jspec.policies.attend` makes it."""
    spare = case["T"]

    def copy(k: Array, v: Array, slots: Array) -> list[Array]:
        index = slots[..., None, None] if slots.ndim == 2 else jnp.swapaxes(slots, 1, 2)[..., None]
        copied = (jnp.take_along_axis(x, index, axis=1, mode="clip") for x in (k, v))
        return [jnp.pad(x, ((0, 0), (0, spare), (0, 0), (0, 0))) for x in copied]

    def right(outputs: Any) -> bool:
        pairs = zip(outputs, expected, strict=True)
        return all(bool((out[:, :-spare] == want[:, :-spare]).all()) for out, want in pairs)

    arguments = (data.k, data.v, data.selected)
    program = compile_all("copy", {"xla": Source(copy, shapes(arguments))})["xla"]
    vectors = 2 * 2 * case["B"] * case["n"] * heads(case)[1]
    moved = vectors * case["H"] * jnp.dtype(DTYPE).itemsize + data.selected.nbytes
    return _rows_of("copy", case, [bound("xla", program, arguments, right)], settings, moved)


def _read(
    case: Case, data: Selected, copied: tuple[Array, Array], check: Check, settings: Settings
) -> list[point.Row]:
    """Dense attention over the copy, whose keys are in the order of the selection."""
    # All selected slots are before the newest tokens, so the positions of any head serve.
    first = data.selected if data.selected.ndim == 2 else data.selected[:, 0]
    arguments = (data.q, *copied, data.positions, _with_tail(first, data.tail))
    by_backend = {
        name: Source(_reading(name), shapes(arguments))
        for name in filter(settings.wants, ATTENTION.backends)
    }
    static_arguments = attention.static(case) | {"key_positions": arguments[-1]}
    best = chosen(ATTENTION, arguments[:-1], **static_arguments)
    programs = [
        bound(name, program, arguments, check.both, chosen=name == best)
        for name, program in compile_all("read", by_backend).items()
    ]
    return _rows_of("read", case, programs, settings, _needed(case))


@functools.cache
def _reading(name: str) -> Callable[..., Any]:
    """Attention by a backend, the positions of the keys its last argument."""

    def run(q: Array, k: Array, v: Array, positions: Array, where: Array) -> Any:
        return dense.attention(q, k, v, positions, key_positions=where, implementation=name)

    return run


def _rows_of(
    part: str,
    case: Case,
    programs: Sequence[Program | Absent],
    settings: Settings,
    moved: int,
) -> list[point.Row]:
    where = {**case, "part": part}
    clock = attention.clock()
    return point.measure(OPERATIONS[part], where, programs, settings, moved=moved, **clock)


def _needed(case: Mapping[str, Any]) -> int:
    return bytes_of(case["B"] * (case["n"] + case["T"]), case)


def argument_shapes(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of the arguments of the backends of `jspec.ops.gathered_attention` at a case."""
    batch, tokens = case["B"], case["T"]
    q, k, v, positions = attention.shapes(case)
    per_head = (heads(case)[1],) if case["indices"] == "per-head" else ()
    selected, context_len = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((batch, *per_head, case["n"]), (batch,))
    )
    return (
        q,
        k,
        v,
        positions,
        selected,
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
        context_len,
    )


def static(case: Mapping[str, Any]) -> dict[str, Any]:
    """The static arguments of the backends of `jspec.ops.gathered_attention`."""
    return {
        **dict.fromkeys(("counts", "log_weights", "softcap", "value_size")),
        "scale": case["H"] ** -0.5,
    }


@dataclasses.dataclass(frozen=True)
class Even:
    """Break-even of the copy: microseconds of the fastest backend for each part of a ``case``."""

    case: Mapping[str, Any]
    gather: float
    copy: float
    read: float

    @property
    def reads(self) -> int | None:
        """Reads from which on the copy is faster, None where it never is."""
        gain = self.gather - self.read
        return None if gain <= 0 else math.floor(self.copy / gain) + 1

    def __str__(self) -> str:
        case = self.case
        when = "never" if self.reads is None else f"from read {self.reads} on"
        return (
            f"B={case['B']}, n={kilo(case['n'])} of {kilo(case['S'])}, {case['heads']} heads, "
            f"T={case['T']}, {case['indices']}: gather {table.number(self.gather)} us; copy "
            f"{table.number(self.copy)} us, then read {table.number(self.read)} us; the copy wins "
            f"{when}"
        )


def evens(rows: Sequence[point.Row]) -> list[Even]:
    """Every case of which backends ran all three parts."""
    by_case: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        time = point.best_clock(row)
        if time is not None and row["backend"]:
            case = tuple((k, x) for k, x in row["case"].items() if k not in ("part", "l2"))
            parts = by_case.setdefault(case, {})
            part = row["case"]["part"]
            parts[part] = min(parts.get(part, math.inf), time.median)
    return [Even(dict(case), **x) for case, x in by_case.items() if len(x) == len(OPERATIONS)]


def floor(result: Mapping[str, Any]) -> table.Floor:
    """The read ceiling that rows are compared with."""
    return table.Floor(ceilings.bandwidth(result["ceilings"], "read"), BYTES)


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS, floor(result))
    for even in evens(result["rows"]):
        console().print(str(even), markup=False)
    regret.show(result["rows"])


SUITE = Suite(
    "gather",
    "attention over a selection of a cache, in place or by a copy: every backend, and rivals",
    run,
    show,
    (GATHERED, ATTENTION),
    rivals.NAMES,
    case=case,
)
