"""CUDA kernels on a CPU: `emulator` has each thread of a block as a fiber, and the instructions."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import jax

from jspec.cuda_ffi import build, toolchain

FOLDER = Path(__file__).parent / "emulator"


def emulated(subject: str, output: Path, name: str | None = None):
    """A function with the signature of `jspec.cuda_ffi.library.call`, for the targets of a subject.

    It runs ``NAME.cc`` of the emulator, which includes the CUDA source, with the handlers of
    ``NAME_ffi.cc``, compiled to ``output``; ``name`` is that of the subject unless passed.
    """
    name = name or subject
    tools = toolchain.find("cpu")
    sources = [FOLDER / f"{name}.cc", build.SRC / subject / f"{name}_ffi.cc"]
    command = tools.compile(toolchain.FLAGS["cpu"], [FOLDER, build.SRC], sources, output)
    done = toolchain.run(command)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(output))

    @functools.cache
    def register(target: str) -> str:
        name = f"emulated_{target}"
        capsule = jax.ffi.pycapsule(getattr(library, f"jspec_{target}"))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        return name

    def call(
        target: str,
        outputs: Any,
        *arguments: Any,
        vmap_method: str,
        aliases: dict[int, int] | None = None,
        **attributes: Any,
    ):
        function = jax.ffi.ffi_call(
            register(target), outputs, vmap_method=vmap_method, input_output_aliases=aliases
        )
        return tuple(function(*arguments, **attributes))

    return call
