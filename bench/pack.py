"""Packing: every backend and PyTorch's masked gather, in a warm and in a cold L2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bench import ceilings, point, table, workload
from bench.program import Absent, bound, chosen, compile_all, shapes, sources
from bench.rivals import pack as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.ops.packing import PACK

COLUMNS = ("B", "gamma", "alpha", "D", "l2")
STATES = ("warm", "cold")
RIVALS_ALPHA = 0.9  # PyTorch's calls take long and their time hardly depends on alpha
Shape = tuple[int, int, int]  # batch, gamma, width


def grid(settings: Settings) -> list[Shape]:
    if settings.quick:
        return list(itertools.product((1, 32), (8, 128), (128, 2048)))
    whole = itertools.product((1, 4, 16, 32, 256, 1024), (8, 128), (128, 512, 1024, 2048))
    return [shape for shape in whole if fits(shape)]


def alphas(settings: Settings) -> tuple[float, ...]:
    return (0.3, 0.9) if settings.quick else (0.3, 0.6, 0.9)


def clocks(alpha: float) -> tuple[str, ...]:
    """Clocks to measure: wall time hardly depends on alpha and is measured for one on a GPU."""
    both = alpha == RIVALS_ALPHA or point.DEVICE.reason is not None
    return ("device", "wall") if both else ("device",)


def fits(shape: Shape) -> bool:
    """Whether a case is small enough for this machine."""
    return jax.default_backend() == "gpu" or int(np.prod(shape)) <= 2**24


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    programs = compiled_packs(grid(settings), settings)
    cases = list(itertools.product(grid(settings), alphas(settings)))
    with bar("pack", len(cases)) as advance:
        for (batch, gamma, width), alpha in cases:
            accepted = workload.make_tokens(batch, gamma, alpha).accepted
            kv = workload.make_kv(batch, gamma, width)
            expected = workload.expected_packed(kv, accepted)
            arguments = (jax.device_put(kv), jax.device_put(accepted))
            best = chosen(PACK, arguments)
            bounds = [
                bound(name, program, arguments, checks(expected), chosen=name == best)
                for (shape, name), program in programs.items()
                if shape == (batch, gamma, width)
            ]
            if alpha == RIVALS_ALPHA:
                bounds += rivals.pack(kv, accepted, expected[0], settings)
            case = {"B": batch, "gamma": gamma, "alpha": alpha, "D": width}
            moved = 2 * expected[0].nbytes
            yield from point.measure(
                "pack", case, bounds, settings, states=STATES, clocks=clocks(alpha), moved=moved
            )
            advance()


def compiled_packs(
    grid: list[Shape], settings: Settings
) -> dict[tuple[Shape, str], jax.stages.Compiled | Absent]:
    """Each backend of packing for each shape."""
    sources_by_key = {}
    for shape in grid:
        arguments = (
            jax.ShapeDtypeStruct(shape, np.float16),
            jax.ShapeDtypeStruct(shape[:1], np.int32),
        )
        for name, source in sources(PACK, shapes(arguments), settings).items():
            sources_by_key[shape, name] = source
    return compile_all("pack", sources_by_key)


def checks(expected: tuple[np.ndarray, np.ndarray, int]) -> Callable[[Any], bool]:
    """A check that the last three outputs are the fields of `Packed`, up to the total."""
    packed, offsets, total = expected

    def check(outputs: Any) -> bool:
        actual, actual_offsets, actual_total = map(np.asarray, outputs[-3:])
        return (
            int(actual_total) == total
            and np.array_equal(actual_offsets, offsets)
            and np.array_equal(actual[:total], packed)
        )

    return check


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)


SUITE = Suite(
    "pack",
    "packing accepted KV rows: every backend, and PyTorch's kv[mask]",
    run,
    show,
    (PACK,),
    rivals.NAMES,
)
