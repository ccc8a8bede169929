"""Exact selection of a row's highest scores: every backend, JAX, PyTorch, FlashInfer and CUB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention, cases, ceilings, point, regret, table, workload
from bench.program import Absent, Program, Source, bound, chosen, compile_all, shapes, sources
from bench.rivals import select as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.ops.selection import SELECT

COLUMNS = ("rows", "n", "k", "scores")
BYTES = "every score once, and 4 bytes a selected slot"
BITS = 128  # scores "0..128" count the equal bits of 128 random ones
DEFAULT = {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32"}
CHOICES = {"scores": ("0..128", "float32", "bfloat16")}
NAMES = ("lax.top_k", *rivals.NAMES)
Case = dict[str, Any]


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT, CHOICES)
    if case["k"] > case["n"]:
        raise ValueError(f"k={case['k']} must be at most n={case['n']}")
    return case


def grid(settings: Settings) -> list[Case]:
    """The cases: ``scores`` is a dtype, or the range of integer scores."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    large = [
        (256, 32768, 512, "0..128"),
        (256, 32768, 512, "float32"),
        (256, 32768, 512, "bfloat16"),
        (8, 2**20, 8192, "float32"),
        (32, 131072, 2048, "float32"),
        (4, 131072, 8192, "float32"),
    ]
    some = [large[0], large[3]]
    if jax.default_backend() != "gpu":
        some = large = [(4, 8192, 256, "0..128"), (4, 8192, 256, "float32")]
    chosen = some if settings.quick else large
    return [dict(zip(COLUMNS, case, strict=True)) for case in chosen]


def scores_of(case: Case) -> np.ndarray:
    """Normal numbers, or the bits that two random codes share."""
    rng = np.random.default_rng([workload.SEED, case["rows"], case["n"]])
    shape = case["rows"], case["n"]
    if case["scores"] == "0..128":
        return rng.binomial(BITS, 0.5, shape).astype(np.int32)
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(case["scores"]))


def expected(scores: np.ndarray, k: int) -> np.ndarray:
    """The slots by numpy's stable sort, ascending."""
    falling = -scores.astype(np.float32)
    return np.sort(np.argsort(falling, axis=1, kind="stable")[:, :k], axis=1).astype(np.int32)


def static(case: Case) -> dict[str, Any]:
    """The static arguments of the backends of `jspec.ops.select`."""
    highest = BITS if case["scores"] == "0..128" else None
    return {"k": case["k"], "sinks": 0, "recent": 0, "highest": highest}


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("select", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from _measured(case, settings)
            advance()


def _measured(case: Case, settings: Settings) -> list[point.Row]:
    rows, n, k, _ = case.values()
    scores = scores_of(case)
    want = expected(scores, k)
    arguments = (jnp.asarray(scores), *(jnp.full((rows,), x, jnp.int32) for x in (k, n)))
    best = chosen(SELECT, arguments, **static(case))
    by_backend = sources(SELECT, shapes(arguments), settings, **static(case))
    programs = [
        bound(name, program, arguments, lambda out: np.array_equal(out, want), chosen=name == best)
        for name, program in compile_all("select", by_backend).items()
    ]
    if settings.wants("lax.top_k"):
        programs.append(_top_k(arguments[0], k, want))
    programs += rivals.select(scores, want, settings)
    moved = scores.nbytes + want.nbytes
    return point.measure("select", case, programs, settings, moved=moved, **attention.clock())


def _top_k(scores: jax.Array, k: int, want: np.ndarray) -> Program | Absent:
    """`jax.lax.top_k`, whose slots are in the order of their scores."""
    source = Source(lambda x: jax.lax.top_k(x, k)[1], shapes((scores,)))
    program = compile_all("top_k", {"lax.top_k": source})["lax.top_k"]
    return bound("lax.top_k", program, (scores,), lambda out: np.array_equal(np.sort(out), want))


def floor(result: dict[str, Any]) -> table.Floor:
    """The read ceiling that rows are compared with."""
    return table.Floor(ceilings.bandwidth(result["ceilings"], "read"), BYTES)


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS, floor(result))
    regret.show(result["rows"])


SUITE = Suite(
    "select",
    "exact selection of the highest scores of a row: every backend, JAX, PyTorch, FlashInfer, CUB",
    run,
    show,
    (SELECT,),
    NAMES,
    case=case,
)
