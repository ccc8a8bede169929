"""The machine that a result was measured on."""

from __future__ import annotations

import datetime
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jspec.cli.show import environment
from jspec.gpu import gpu_in_use

# Packages of kernels and rivals.
OPTIONAL = (
    "jax-triton",
    "triton",
    "torch",
    "flashinfer-python",
    "fa3-fwd",
    "cuda-cccl",
    "google-tunix",
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
