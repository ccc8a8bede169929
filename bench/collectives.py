"""Collectives between the devices of one host, by the bytes that each device gives.

XLA's, and jspec's one-sided all-to-alls where pieces are not too large for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from bench import cases, point, table
from bench.cases import Case
from bench.mesh import Shared, measure
from bench.settings import Settings
from bench.suite import Suite
from jspec.helix import HelixConfig
from jspec.helix.mesh import KVP
from jspec.ops.all_to_all import By, all_to_all, takes
from jspec.typing import Array

COLUMNS = ("P", "bytes")
DEFAULT: Case = {"P": 2, "bytes": 32768}
SIZES = ("2K", "32K", "256K", "1024K", "16384K")
ONE_SIDED: dict[str, By] = {"all_to_all, pallas": "pallas", "all_to_all, cuda": "cuda"}


def _all_to_all(x: Array) -> Array:
    return lax.all_to_all(x, KVP, split_axis=0, concat_axis=0, tiled=True)


def _one_sided(name: str) -> Callable[[Array], Array]:
    return partial(all_to_all, axes=KVP, axis=0, by=ONE_SIDED[name])


def _all_gather(x: Array) -> Array:
    # Summed, since XLA removes a gather of which a device reads only its own part.
    return lax.all_gather(x, KVP).sum(axis=0)


def _all_reduce(x: Array) -> Array:
    return lax.psum(x, KVP)


def _reduce_scatter(x: Array) -> Array:
    part = lax.psum_scatter(x, KVP, scatter_dimension=0, tiled=True)
    return jnp.tile(part, (len(x) // len(part), 1))


def _summed(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.sum(axis=0), x.shape)


def _exchanged(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x.reshape(len(x), len(x), -1), 0, 1).reshape(x.shape)


def _scattered(x: np.ndarray) -> np.ndarray:
    parts = x.sum(axis=0).reshape(len(x), -1)
    return np.stack([np.tile(part, len(x)) for part in parts]).reshape(x.shape)


# Each with its reference in NumPy, on the inputs ``[P, n]`` of all devices.
COLLECTIVES: dict[str, tuple[Callable[[Array], Array], Callable[[np.ndarray], np.ndarray]]] = {
    "all_to_all": (_all_to_all, _exchanged),
    **{name: (_one_sided(name), _exchanged) for name in ONE_SIDED},
    "all_gather": (_all_gather, _summed),
    "all_reduce": (_all_reduce, _summed),
    "reduce_scatter": (_reduce_scatter, _scattered),
}


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT)
    if case["P"] < 2 or case["bytes"] % (4 * case["P"]):
        raise ValueError(f"{text}: P must be 2 or more, and bytes a multiple of 4 P")
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or one for each size on all devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    devices = max(jax.device_count(), 2)
    sizes = SIZES[:2] if settings.quick or jax.default_backend() != "gpu" else SIZES
    return [case(f"P={devices},bytes={size}") for size in sizes]


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    groups = [[_shared(case, name)] for case in grid(settings) for name in _names(case)]
    for rows in measure("collectives", groups, settings):
        yield from rows


def _names(case: Case) -> list[str]:
    piece = case["bytes"] // case["P"]
    return [name for name in COLLECTIVES if takes(ONE_SIDED.get(name, "xla"), piece)]


def _shared(case: Case, name: str) -> Shared:
    devices, (body, right) = case["P"], COLLECTIVES[name]
    helix = HelixConfig(kvp=devices, exchange=ONE_SIDED.get(name, "xla"))
    rng = np.random.default_rng(devices)
    # Whole numbers, whose sums are exact in any order; a device has a row for each of them.
    x = rng.integers(-9, 10, (devices, case["bytes"] // 4)).astype(np.float32)

    def placed() -> tuple[Array]:
        shape = (devices * devices, x.shape[1] // devices)
        return (jax.device_put(x.reshape(shape), helix.sharding(KVP)),)

    def is_right(out: Any, arguments: tuple[Array]) -> bool:
        return np.array_equal(np.asarray(out).reshape(x.shape), right(x))

    return Shared(
        *(name, case, name, helix, body, body, lambda _: (P(KVP),), placed, is_right),
        out=P(KVP),
        moved=lambda _: case["bytes"],
    )


def show(result: dict[str, Any]) -> None:
    table.show(result)


SUITE = Suite(
    "collectives",
    "collectives between the devices of one host, by the bytes that each of them gives",
    run,
    show,
    custom_clocks=True,
    case=case,
)
