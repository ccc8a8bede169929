"""The machine a result was measured on, and its measured read bandwidth."""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cli.show import environment
from jspec.gpu import gpu_in_use

OPTIONAL = (  # kernels' and rivals' packages
    *("jax-triton", "triton", "torch", "flashinfer-python"),
    *("fa3-fwd", "flash-attn3-jax"),
)


def describe() -> dict[str, Any]:
    """Device, driver, versions and the date (UTC)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = environment()
    found["versions"] |= {name: v for name in OPTIONAL if (v := _version(name)) is not None}
    gpu = gpu_in_use()
    if gpu is not None:
        found["compute_capability"] = f"{gpu[1][0]}.{gpu[1][1]}"
    return found | {"driver": _driver(), "date": now}


def _version(package: str) -> str | None:
    """None where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version, None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def read_ceiling(repeats: int = 7) -> float:
    """Bytes a second of summing a large array: the marginal time of a pass inside one program."""
    gpu = jax.default_backend() == "gpu"
    size, dtype = (2**30, jnp.bfloat16) if gpu else (2**28, jnp.float32)
    x = jnp.ones((size // jnp.dtype(dtype).itemsize // 1024, 1024), dtype)

    @partial(jax.jit, static_argnums=1)
    def passes(x: jax.Array, count: int) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            # Each pass needs the one before, so that none can be left out.
            shifted = x + (total * 0).astype(x.dtype)
            return jnp.sum(jnp.sum(shifted, axis=1, dtype=jnp.float32)), None

        return jax.lax.scan(body, jnp.float32(0), length=count)[0]

    seconds = {}
    for count in (2, 10):
        passes(x, count).block_until_ready()
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            passes(x, count).block_until_ready()
            samples.append(time.perf_counter() - begin)
        seconds[count] = statistics.median(samples)
    return 8 * size / (seconds[10] - seconds[2])
