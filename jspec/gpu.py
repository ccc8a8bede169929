"""The GPU in use, for the backends that need one."""

from __future__ import annotations

import ctypes
import functools
import itertools

import jax


def gpu_in_use() -> tuple[str, tuple[int, int]] | None:
    """Device kind and compute capability of the default device, None where it is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):
        return None
    return device.device_kind, (major, minor)


def refuses_gpu(least: tuple[int, int], who: str) -> str | None:
    """Why the default device cannot run the kernels of ``who``, or None.

    ``least``: the lowest compute capability that they need, such as ``(8, 0)``.
    """
    gpu = gpu_in_use()
    if gpu is None:
        platform = jax.default_backend()
        what = jax.local_devices()[0].device_kind if platform == "gpu" else f"a {platform}"
        return f"{who} needs an NVIDIA GPU and the default device is {what}"
    kind, capability = gpu
    if capability < least:
        return (
            f"{who} needs compute capability {least[0]}.{least[1]} and {kind} has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


def multiprocessors() -> int:
    """Multiprocessors of the default device; those of an H100 where it is no GPU."""
    return jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else 132


@functools.cache
def unreached(devices: int) -> str | None:
    """Which of the first ``devices`` GPUs cannot reach the memory of another, or None."""
    driver = ctypes.CDLL("libcuda.so.1")
    for device, peer in itertools.permutations(range(devices), 2):
        reaches = ctypes.c_int()
        failed = driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), device, peer)
        if failed or not reaches.value:
            return f"device {device} cannot reach the memory of device {peer}"
    return None
