"""Collectives between the devices of one host, by the bytes that each device gives.

XLA's, and jspec's one-sided ones where a message to one peer is not too large for them.
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

from bench.cases import Case
from bench.helix.mesh import Sharded
from bench.point import Row
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.helix import HelixConfig
from jspec.helix.mesh import KVP
from jspec.ops.all_to_all import By, all_reduce, all_to_all, takes
from jspec.typing import Array

DEFAULT: Case = {"P": 2, "bytes": 32768}
ONE_SIDED: dict[str, By] = {"all_to_all, pallas": "pallas", "all_to_all, cuda": "cuda"}
REDUCED: dict[str, By] = {"all_reduce, cuda": "cuda"}


def _all_to_all(x: Array) -> Array:
    return lax.all_to_all(x, KVP, split_axis=0, concat_axis=0, tiled=True)


def _one_sided(name: str) -> Callable[[Array], Array]:
    return partial(all_to_all, axes=KVP, axis=0, by=ONE_SIDED[name])


def _all_gather(x: Array) -> Array:
    # Summed, since XLA removes a gather of which a device reads only its own part.
    return lax.all_gather(x, KVP).sum(axis=0)


def _all_reduce(x: Array, by: By = "xla") -> Array:
    return all_reduce(x, KVP, by=by)


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
    **{name: (partial(_all_reduce, by=by), _summed) for name, by in REDUCED.items()},
    "reduce_scatter": (_reduce_scatter, _scattered),
}


def checked(case: Case) -> Case:
    """The case; raises `ValueError` for a message that cannot be divided."""
    if case["P"] < 2 or case["bytes"] % (4 * case["P"]):
        raise ValueError(
            f"P={case['P']},bytes={case['bytes']}: P must be 2 or more, and bytes a multiple of 4 P"
        )
    return case


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """Every collective at a number of bytes."""
    for name in filter(settings.wants, COLLECTIVES):
        message = case["bytes"] // (case["P"] if name in ONE_SIDED else 1)  # to one peer
        if takes((ONE_SIDED | REDUCED).get(name, "xla"), message):
            yield _sharded(case, name).row(settings)


def _sharded(case: Case, name: str) -> Sharded:
    devices, (body, right) = case["P"], COLLECTIVES[name]
    helix = HelixConfig(kvp=devices, exchange=(ONE_SIDED | REDUCED).get(name, "xla"))
    rng = np.random.default_rng(devices)
    # Whole numbers, whose sums are exact in any order; a device has a row for each of them.
    x = rng.integers(-9, 10, (devices, case["bytes"] // 4)).astype(np.float32)

    def placed() -> tuple[Array]:
        shape = (devices * devices, x.shape[1] // devices)
        return (jax.device_put(x.reshape(shape), helix.sharding(KVP)),)

    def is_right(out: Any, arguments: tuple[Array]) -> bool:
        return np.array_equal(np.asarray(out).reshape(x.shape), right(x))

    return Sharded(
        *("message", case, name, helix, body, body, placed, lambda _: (P(KVP),), P(KVP), is_right),
        moved=lambda _: case["bytes"],
    )


MESSAGE = Benchmark(
    name="message",
    names=tuple(COLLECTIVES),
    rows=rows,
    default=DEFAULT,
    complete=checked,
    gpu=[f"bytes={size}" for size in ("2K", "32K", "256K", "1024K", "16384K")],
    quick=["bytes=2K", "bytes=32K"],
    cpu=["bytes=2K", "bytes=32K"],
)
