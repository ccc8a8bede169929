"""Which GPU there is, for the backends that need one."""

from __future__ import annotations

import jax


def refuses_gpu(least: tuple[int, int], who: str) -> str | None:
    """Why the default device cannot run what ``who`` compiles, or None.

    ``least``: the lowest compute capability that will do, such as ``(8, 0)``.
    """
    if jax.default_backend() != "gpu":
        return f"{who} needs an NVIDIA GPU and the default device is a {jax.default_backend()}"
    device = jax.local_devices()[0]
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):
        return f"{who} needs an NVIDIA GPU and the default device is {device.device_kind}"
    if (major, minor) < least:
        return (
            f"{who} needs compute capability {least[0]}.{least[1]} and {device.device_kind} has "
            f"{major}.{minor}"
        )
    return None
