"""The machine a result was measured on, and its measured read bandwidth."""

from __future__ import annotations

import datetime
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cli.show import environment


def describe() -> dict[str, Any]:
    """Device, driver, versions and the date (UTC)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return environment() | {"driver": _driver(), "date": now}


def _driver() -> str | None:
    """The NVIDIA driver's version, None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def read_ceiling(repeats: int = 7) -> float:
    """Bytes a second of summing a large array inside one program: what reading can reach."""
    gpu = jax.default_backend() == "gpu"
    size, dtype = (2**30, jnp.bfloat16) if gpu else (2**28, jnp.float32)
    x = jnp.ones((size // jnp.dtype(dtype).itemsize,), dtype)
    total = jax.jit(lambda x: jnp.sum(x.reshape(-1, 1024), axis=1, dtype=jnp.float32))
    total(x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return size / sorted(seconds)[repeats // 2]
