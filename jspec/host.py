"""Arrays in the pinned memory of the host: which devices have it, and copies in both directions.

JAX calls it the memory kind ``pinned_host``. An array's type says which memory it is in, also in
traced code; JAX's operations accept no array in host memory.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jspec.typing import Array

KIND = "pinned_host"


def refusal() -> str | None:
    """Why arrays of the default device cannot be in the host's memory, or None."""
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if KIND in kinds:
        return None
    return (
        f"{device.device_kind} ({device.platform}) has no memory of the kind {KIND!r}, only "
        f"{', '.join(sorted(kinds))}; take an NVIDIA GPU or a CPU, or a policy that keeps the "
        "cache on the device, as hata does"
    )


def in_host(x: Array | np.ndarray) -> bool:
    """Whether ``x``, which may be traced, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_host(x: Array) -> Array:
    """``x`` in the host's memory, inside `jax.jit`."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """``x`` in the device's memory, inside `jax.jit`."""
    return jax.device_put(x, jax.memory.Space.Device)


def place_in_host(x: np.ndarray | Array, sharding: Sharding | None) -> Array:
    """``x`` in the pinned host memory of the default device, or of the device of ``sharding``.

    Raises `ValueError` where there is no such memory, and for a sharding over several devices,
    whose rows no kernel fetches.
    """
    if reason := refusal():
        raise ValueError(f"the cache cannot lie in host memory: {reason}")
    devices = sharding.device_set if sharding is not None else {jax.local_devices()[0]}
    if len(devices) > 1:
        raise ValueError(
            f"a cache in host memory serves one device, and sharding={sharding} has "
            f"{len(devices)}; take a policy that keeps the cache on the devices, as hata does"
        )
    return jax.device_put(x, SingleDeviceSharding(*devices, memory_kind=KIND))
