"""Every kernel on a GPU, in a program of its own and under compute-sanitizer."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from jspec.cuda_ffi import build, toolchain
from jspec.cuda_ffi.errors import BuildError

# Programs of this folder, and the kernels that each launches.
PROGRAMS = {
    "driver.cu": ("verify/verify.cu", "verify/commit.cu", "pack/pack.cu", "pack/fused.cu"),
    "stochastic.cu": ("sample/stochastic.cu",),
    "select.cu": ("select/select.cu",),
    "hashed.cu": ("hashed/hashed.cu",),
    "attention.cu": ("attention/attention.cu",),
    "gathered.cu": ("gathered/gathered.cu",),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def driver(request, tmp_path_factory) -> Path:
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    try:
        nvcc = toolchain.find("CUDA").compiler
    except BuildError as error:
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("driver") / "driver"
    kernels = [build.SRC / name for name in PROGRAMS[request.param]]
    gpu = toolchain.SOME_GPUS.get(kernels[0].parent.name, ("-arch=native",))
    sources = [Path(__file__).parent / request.param, *kernels]
    options = ["-std=c++17", "-O3", *gpu, "-lineinfo", f"-I{build.SRC}", "-o", program]
    subprocess.run([nvcc, *options, *sources], check=True)
    return program


def test_kernels_equal_the_host(driver):
    subprocess.run([driver], check=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_has_nothing_to_say(tool, driver):
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", driver]
    subprocess.run(command, check=True)
