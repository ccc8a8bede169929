"""Triton and Pallas kernels under compute-sanitizer; tests/cuda_ffi/test_driver.py has CUDA's."""

import os
import re
import shutil
import subprocess
import sys

import jax
import pytest

# Each array is memory of its own, so that an access beyond it is seen.
NO_POOL = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "JAX_PLATFORMS": "cuda"}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_the_sanitizer_has_nothing_to_say(backend, tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    # XLA asks the driver for what an older one lacks; such answers are no faults of a kernel.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "tests.ops.every_kernel", backend]
    ran = subprocess.run(
        command, env=os.environ | NO_POOL, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(re.search(r"^(\d+) calls$", ran.stdout, re.MULTILINE)[1]) >= 5
