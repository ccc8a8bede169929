"""Attention over a dense cache: every backend and the rivals, as shares of the read ceiling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bench import cases, ceilings, point, regret, table
from bench.caches import DTYPE, Check, bytes_of, dense
from bench.cases import Case, heads
from bench.program import bound, chosen, compile_all, sources
from bench.rivals import attention as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.ops.attention.dense import ATTENTION

COLUMNS = ("B", "S", "heads", "H", "T", "lengths")
DEFAULT: Case = {"B": 8, "S": 32768, "heads": "32/8", "H": 128, "T": 1, "lengths": "full"}
BYTES = (
    "keys and values up to each row's length, queries and outputs: 2 * 2 bytes * H * "
    "(K * sum of lengths + B * T * N)"
)
CONTEXTS = tuple(1024 * 2**i for i in range(1, 8))  # of the figure, at B=4
TOKENS = (1, 2, 4, 8, 10, 16)  # of the figure, at B=4, S=32K


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT)
    least = case["S"] if case["lengths"] == "full" else case["S"] // 4
    if case["T"] > least:
        raise ValueError(f"T={case['T']} must be at most {least}, the least length of a row")
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or the suite's defaults."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        few = ("B=1,S=2K", "B=1,S=8K", "B=1,S=8K,T=10", "B=4,S=2K,lengths=ragged")
        return [case(text) for text in few]
    some = ("B=8,S=32K", "B=4,S=128K,T=10", "B=8,S=64K,lengths=ragged", "B=1,S=8K")
    whole = (
        *("B=8,S=32K,heads=32/32", "B=8,S=32K", "B=4,S=128K", "B=4,S=128K,T=10", "B=1,S=256K"),
        *("B=1,S=128K,T=10", "B=8,S=32K,heads=64/8,H=64,T=12", "B=8,S=64K,lengths=ragged"),
        *("B=1,S=8K", "B=32,S=8K", "B=32,S=8K,T=10"),
        *(f"B=4,S={slots}" for slots in CONTEXTS),
        *(f"B=4,S=32K,T={tokens}" for tokens in TOKENS),
    )
    every = [case(text) for text in (some if settings.quick else whole)]
    return [x for i, x in enumerate(every) if x not in every[:i]]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("attention", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from measured(case, settings)
            advance()


def measured(case: Case, settings: Settings) -> list[point.Row]:
    """The rows of a case; its cache is freed on return."""
    # Case by case: XLA's autotuning of matmuls allocates arrays of the cache's size.
    programs = compile_all("attention", sources(ATTENTION, shapes(case), settings, **static(case)))
    inputs = dense(case)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.positions)
    check = Check.of(inputs.q, inputs.k, inputs.v, inputs.positions + 1)
    best = chosen(ATTENTION, arguments, **static(case))
    bounds = [
        bound(name, program, arguments, check.both, chosen=name == best)
        for name, program in programs.items()
    ]
    bounds += rivals.attention(inputs, check.output, settings)
    moved = bytes_of(int(inputs.lengths.sum()), case)
    return point.measure("attention", case, bounds, settings, moved=moved, **clock())


def clock() -> dict[str, Any]:
    """The states and clocks to measure: device time with a cold L2, else wall time.

    Cold, since a step reads a layer's weights before the layer's cache.
    """
    if point.DEVICE.reason is None:
        return {"states": ("cold",), "clocks": ("device",)}
    return {"states": ("warm",), "clocks": ("wall",)}


def shapes(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of the arguments of the backends of `jspec.ops.attention` at a case."""
    (query_heads, kv_heads), size = heads(case), case["H"]
    q = jax.ShapeDtypeStruct((case["B"], case["T"], query_heads, size), DTYPE)
    kv = jax.ShapeDtypeStruct((case["B"], case["S"], kv_heads, size), DTYPE)
    return q, kv, kv, jax.ShapeDtypeStruct((case["B"], case["T"]), jnp.int32)


def static(case: Mapping[str, Any]) -> dict[str, Any]:
    """The static arguments of the backends of `jspec.ops.attention`."""
    none = ("key_positions", "window", "softcap", "value_size")
    return {**dict.fromkeys(none), "scale": case["H"] ** -0.5}


def floor(result: Mapping[str, Any]) -> table.Floor:
    """The read ceiling that rows are compared with."""
    return table.Floor(ceilings.bandwidth(result["ceilings"], "read"), BYTES)


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS, floor(result))
    regret.show(result["rows"])


SUITE = Suite(
    "attention",
    "attention over a cache: every backend, cuDNN, PyTorch, FlashAttention-3 and FlashInfer",
    run,
    show,
    (ATTENTION,),
    rivals.NAMES,
    case=case,
)
