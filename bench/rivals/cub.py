"""CUB's top-k, compiled for the case at hand and called by XLA.

`cub::DeviceBatchedTopK` takes all rows in one call and returns slots in any order. `cub` may select
any of equal scores, which may vary from call to call; `cub_stable` selects the first ones. The
sizes are compile-time constants, as CUB's documentation recommends. The headers are those of the
package `cuda-cccl`: nvcc comes with older ones.
"""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.program import Absent, Program, Source, bound, compile_all, shapes
from jspec.cuda_ffi import toolchain
from jspec.cuda_ffi.errors import BuildError
from jspec.gpu import gpu_in_use, refuses_gpu
from jspec.typing import Array

CALLS = {"cub": "CUB_BATCHED", "cub_stable": "CUB_STABLE"}
NAMES = tuple(CALLS)
SOURCE = Path(__file__).with_name("cub.cu")
OLDEST = (3, 6)  # of CCCL: its batched top-k takes rows larger than a block, by clusters
HOPPER = (9, 0)  # the least compute capability with clusters
TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "int32": "int"}


def cub(name: str, scores: np.ndarray, k: int, check: Callable[[Any], bool]) -> Program | Absent:
    """The call ``name`` for scores ``[rows, n]``; ``check`` of its slots ``[rows, k]``."""
    if reason := refusal():
        return Absent(name, reason)
    array = jnp.asarray(scores)
    source = Source(call(name, array.dtype.name, *scores.shape, k), shapes((array,)))
    return bound(name, compile_all(name, {name: source})[name], (array,), check)


def refusal() -> str | None:
    """Why CUB's top-k cannot run here, or None."""
    if reason := refuses_gpu(HOPPER, "CUB's batched top-k"):
        return reason
    try:
        toolchain.find("CUDA")
    except BuildError as error:
        return str(error)
    include = headers()
    if include is None:
        return "cuda-cccl is not installed"
    installed = version(include)
    if installed < OLDEST:
        return "its top-k needs CCCL {}.{} or newer, not {}.{}".format(*OLDEST, *installed)
    return None


def headers() -> Path | None:
    """The folder of the headers in the package `cuda-cccl`, None where it is not installed."""
    try:
        package = find_spec("cuda.cccl")
    except ModuleNotFoundError:  # there is no `cuda` either
        return None
    for folder in (package and package.submodule_search_locations) or ():
        include = Path(folder, "headers", "include")
        if (include / "cub" / "version.cuh").is_file():
            return include
    return None


def version(include: Path) -> tuple[int, int]:
    """Major and minor number of the headers."""
    text = (include / "cub" / "version.cuh").read_text()
    match = re.search(r"^#define CUB_VERSION (\d+)", text, re.MULTILINE)
    number = int(match[1]) if match else 0
    return number // 100_000, number // 100 % 1000


@functools.cache
def call(name: str, dtype: str, rows: int, n: int, k: int) -> Callable[[Array], Array]:
    """Scores ``[rows, n]`` to slots ``[rows, k]``, compiled for these sizes."""
    gpu, include = gpu_in_use(), headers()
    assert gpu is not None  # `refusal` says so
    assert include is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cub.so")
        run = toolchain.run(command(name, dtype, n, k, gpu[1], include, path))
        if run.returncode:
            raise BuildError((run.stderr or run.stdout).strip())
        library = ctypes.CDLL(str(path))
    library.jspec_cub_workspace.restype = ctypes.c_int64
    size = library.jspec_cub_workspace(rows)
    if size < 0:
        raise RuntimeError(f"CUB cannot say what it needs: CUDA error {-size}")
    target = f"bench_{name}_{dtype}_{rows}_{n}_{k}"
    capsule = jax.ffi.pycapsule(library.jspec_cub_select)
    jax.ffi.register_ffi_target(target, capsule, platform="CUDA")
    outputs = (
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((max(size, 1),), jnp.uint8),
    )
    return lambda scores: jax.ffi.ffi_call(target, outputs)(scores)[0]


def command(
    name: str, dtype: str, n: int, k: int, gpu: tuple[int, int], include: Path, output: Path
) -> list[str]:
    """The command that compiles a call for a compute capability, against CUB's headers."""
    defined = {CALLS[name]: 1, "CUB_SCORES": TYPES[dtype], "CUB_N": n, "CUB_K": k}
    options = (
        *toolchain.FLAGS["CUDA"],
        "-arch=sm_{}{}".format(*gpu),
        *(f"-D{key}={value}" for key, value in defined.items()),
    )
    return toolchain.find("CUDA").compile(options, [include], [SOURCE], output)
