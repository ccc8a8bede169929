"""The machine a result was measured on, and its measured read bandwidth."""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cli.show import environment
from jspec.gpu import gpu_in_use

OPTIONAL = (  # kernels' and rivals' packages
    *("jax-triton", "triton", "torch", "flashinfer-python"),
    *("fa3-fwd", "flash-attn3-jax", "cuda-cccl"),
)


def describe() -> dict[str, Any]:
    """Device, driver, versions and the date (UTC)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = environment()
    machine["versions"] |= {name: v for name in OPTIONAL if (v := _version(name)) is not None}
    gpu = gpu_in_use()
    if gpu is not None:
        machine["compute_capability"] = f"{gpu[1][0]}.{gpu[1][1]}"
    return machine | {"driver": _driver(), "date": now}


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
    size, dtype = (2**31, jnp.bfloat16) if gpu else (2**28, jnp.float32)
    # On a GPU the jitter of a call exceeds the time of a pass.
    few, many = (2, 34) if gpu else (2, 10)
    x = jnp.ones((size // jnp.dtype(dtype).itemsize // 1024, 1024), dtype)

    @partial(jax.jit, static_argnums=1)
    def passes(x: jax.Array, count: int) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            # Each pass depends on the one before, so that XLA removes none.
            shifted = x + (total * 0).astype(x.dtype)
            return jnp.sum(jnp.sum(shifted, axis=1, dtype=jnp.float32)), None

        return jax.lax.scan(body, jnp.float32(0), length=count)[0]

    seconds = _medians(lambda count: passes(x, count), (few, many), repeats)
    return (many - few) * size / (seconds[many] - seconds[few])


def matrix_ceiling(size: int = 8192, repeats: int = 7) -> float:
    """Operations a second of bfloat16 matmuls ``[size, size] @ [size, size]`` of random numbers.

    The marginal time of a matmul inside one program, each on the result of the one before. Random,
    because a GPU multiplies zeros at a higher clock.
    """
    keys = jax.random.split(jax.random.key(0))
    # Scaled so that repeated matmuls keep their magnitude.
    x = (size**-0.5 * jax.random.normal(keys[0], (size, size))).astype(jnp.bfloat16)
    first = jax.random.normal(keys[1], (size, size)).astype(jnp.bfloat16)

    @partial(jax.jit, static_argnums=2)
    def matmuls(x: jax.Array, first: jax.Array, count: int) -> jax.Array:
        return jax.lax.scan(lambda y, _: (jnp.dot(x, y), None), first, length=count)[0]

    seconds = _medians(lambda count: matmuls(x, first, count), (2, 10), repeats)
    return 8 * 2 * size**3 / (seconds[10] - seconds[2])


def _medians(
    run: Callable[[int], jax.Array], counts: tuple[int, int], repeats: int
) -> dict[int, float]:
    """Seconds of ``run(count)``, the median after a call to compile."""
    seconds = {}
    for count in counts:
        run(count).block_until_ready()
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run(count).block_until_ready()
            samples.append(time.perf_counter() - begin)
        seconds[count] = statistics.median(samples)
    return seconds
