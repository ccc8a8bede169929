"""Compilers: where nvcc and the C++ compiler are, and their command lines."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import jax

from jspec.cuda_ffi.errors import BuildError
from jspec.extras import install

# Platforms as XLA names them, and the files of src/ that hold the kernels of each.
KERNELS = {"CUDA": "*.cu", "cpu": "*_cpu.cc"}
FLAGS = {
    "CUDA": (
        *"-std=c++17 -O3 -shared -cudart static --threads 0 -DJSPEC_CUDA".split(),
        *"-Xcompiler -fPIC,-w -diag-suppress 940,2473".split(),
    ),
    "cpu": ("-std=c++17", "-O2", "-fPIC", "-shared", "-w"),
}
# GPUs that CUDA kernels are compiled for, and of subjects with instructions of Hopper alone.
GPUS = (
    *"-gencode arch=compute_80,code=sm_80 -gencode arch=compute_89,code=sm_89".split(),
    *"-gencode arch=compute_90,code=[sm_90,compute_90]".split(),
)
HOPPER = ("-gencode", "arch=compute_90a,code=sm_90a")
SOME_GPUS = {
    "attention": HOPPER,
    "linear": (*GPUS[:4], *HOPPER, "-gencode", "arch=compute_90,code=compute_90"),
}
EXPORTS = Path(__file__).with_name("exports.map")  # for the linker: what a library shows
LONGEST = 1800  # seconds that a compiler may take
CXX_WAY_OUT = "install g++ or clang++, or name one in CXX"


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A compiler for one platform.

    Attributes:
        platform: "CUDA" or "cpu".
        compiler: its path.
        version: the output of ``--version``.
        arguments: that it always gets.
    """

    platform: str
    compiler: Path
    version: str
    arguments: tuple[str, ...] = ()

    def command(
        self, subject: str, sources: Sequence[Path], include: Path, output: Path
    ) -> list[str]:
        """The command that compiles ``sources`` of a subject into the shared library ``output``.

        Their own headers are named from the folder ``include``.
        """
        return self.compile(flags(self.platform, subject), [include], sources, output)

    def compile(
        self,
        options: Sequence[str],
        includes: Sequence[Path],
        sources: Sequence[Path],
        output: Path,
    ) -> list[str]:
        """The command that compiles handlers of XLA's FFI, called jspec_NAME, with these options,
        headers first in ``includes``."""
        # The wheels keep the static runtime in lib, where nvcc does not look by itself.
        wheel = self.compiler.parent.parent / "lib"
        library = [f"-L{wheel}"] if (wheel / "libcudart_static.a").exists() else []
        return [
            str(self.compiler),
            *self.arguments,
            *options,
            *(f"-I{folder}" for folder in (*includes, jax.ffi.include_dir())),
            *library,
            *("-Xlinker", f"--version-script={EXPORTS}"),
            "-o",
            str(output),
            *map(str, sources),
        ]


def flags(platform: str, subject: str) -> tuple[str, ...]:
    """The flags of the compiler for ``platform`` for every file of a subject."""
    gpus = SOME_GPUS.get(subject, GPUS) if platform == "CUDA" else ()
    return *FLAGS[platform], *gpus


@functools.cache
def find(platform: str) -> Toolchain:
    """The compiler for ``platform``, "CUDA" or "cpu"; `BuildError` where there is none."""
    for candidate, *arguments in _nvcc() if platform == "CUDA" else _cxx():
        if path := shutil.which(candidate):
            version = _version([path, *arguments])
            return Toolchain(platform, Path(path), version, tuple(arguments))
    if platform == "cpu":
        raise BuildError(f"no C++ compiler found; {CXX_WAY_OUT}")
    raise BuildError(
        "no nvcc found; install a CUDA toolkit and set CUDA_HOME, or " + install("cuda13-build")
    )


def _nvcc() -> Iterator[list[str]]:
    if home := os.environ.get("CUDA_HOME"):
        yield [str(Path(home, "bin", "nvcc"))]
    yield ["nvcc"]
    wheels = find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield [str(Path(folder, "cu13", "bin", "nvcc"))]


def _cxx() -> Iterator[list[str]]:
    if named := os.environ.get("CXX"):
        command = shlex.split(named)
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX={named!r} is no command that can be run; {CXX_WAY_OUT}")
        yield command
    yield from (["g++"], ["clang++"], ["c++"])


def _version(command: list[str]) -> str:
    done = run([*command, "--version"])
    if done.returncode:
        said = done.stderr.strip() or done.returncode
        raise BuildError(f"{' '.join(command)} --version failed: {said}")
    return done.stdout.strip()


def run(command: list[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler; `BuildError` where it cannot be executed or takes too long."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", cwd=cwd, timeout=LONGEST
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
