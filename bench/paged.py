"""Attention over rows in one piece, and over the same rows in blocks: what a block table costs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import point, workload
from bench.caches import CACHES, Check, bytes_of, dense
from bench.cases import Case, product
from bench.point import Row
from bench.program import Absent, Source, bound, compile_all, reference, shapes
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.cache.layout import BLOCK
from jspec.ops.attention.dense import ATTENTION
from jspec.typing import Array

SUFFIX = "+blocks"


def in_blocks(case: Case, *rows: Array) -> tuple[Array, ...]:
    """``rows [B, S, ...]`` in blocks, in random order, and their table int32 ``[B, W]``."""
    batch, width = case["B"], case["S"] // BLOCK
    rng = np.random.default_rng([workload.SEED, batch, width])
    order = rng.permutation(batch * width).astype(np.int32)

    @jax.jit
    def shuffled(x: Array, order: Array) -> Array:
        return x.reshape(-1, BLOCK, *x.shape[2:])[jnp.argsort(order)]

    return *(shuffled(x, jnp.asarray(order)) for x in rows), jnp.asarray(order.reshape(batch, -1))


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """Each backend that reads blocks, once over rows in one piece and once over blocks."""
    inputs = dense(case)
    options = ("key_positions", "window", "softcap", "value_size")
    static: dict[str, Any] = {**dict.fromkeys(options), "scale": case["H"] ** -0.5}
    whole = inputs.q, inputs.k, inputs.v, inputs.positions
    check = Check(*reference(ATTENTION, whole, **static))
    k, v, table = in_blocks(case, inputs.k, inputs.v)
    paged = inputs.q, k, v, inputs.positions, table
    sources: dict[str, Source | Absent] = {}
    for name in filter(settings.wants, ATTENTION.backends):
        try:
            backend = ATTENTION.backend(name)
        except ImportError as error:
            sources[name] = Absent(name, f"failed: {error}", failed=True)
            continue
        *arguments, of_table = shapes(paged)
        if reason := backend.supports(*arguments, table=of_table, **static):
            sources[name + SUFFIX] = Absent(name + SUFFIX, reason)
            continue

        def run(q: Array, k: Array, v: Array, positions: Array, table: Array, backend=backend):
            return backend.run(q, k, v, positions, table=table, **static)

        sources[name] = Source(functools.partial(backend.run, **static), shapes(whole))
        sources[name + SUFFIX] = Source(run, shapes(paged))
    programs = [
        bound(name, program, paged if name.endswith(SUFFIX) else whole, check.both)
        for name, program in compile_all("in_blocks", sources).items()
    ]
    moved = bytes_of(int(inputs.lengths.sum()), case)
    yield from point.measure("in_blocks", case, programs, settings, states=("cold",), moved=moved)


def checked(case: Case) -> Case:
    """The case; raises `ValueError` unless rows are whole blocks, and longer than the queries."""
    if case["S"] % BLOCK or case["T"] > case["S"] // 4:
        raise ValueError(
            f"S={case['S']} must be a multiple of {BLOCK}, and T={case['T']} at most a fourth of it"
        )
    return case


IN_BLOCKS = Benchmark(
    name="in_blocks",
    names=tuple(ATTENTION.backends),
    rows=rows,
    default={
        "B": 4,
        "S": 131072,
        "heads": "32/8",
        "H": 128,
        "T": 1,
        "cache": "bfloat16",
        "lengths": "full",
    },
    choices={"cache": CACHES, "lengths": ("full", "ragged")},
    complete=checked,
    gpu=[
        *product(B=(4,), S=("128K",), T=(1, 10)),
        *product(B=(64,), S=("4K",), T=(1, 4), lengths=("ragged",)),
    ],
    quick=product(B=(4,), S=("128K",), T=(1, 10)),
    cpu=["B=1,S=2K,heads=8/2,H=64", "B=4,S=2K,heads=8/2,H=64,T=4,lengths=ragged"],
)
