"""Calling a Triton kernel from JAX, under jax-triton 0.3 and 0.4 alike."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

import jax
from packaging.requirements import Requirement

from jspec.extras import install_gpu
from jspec.gpu import refuses_gpu
from jspec.ops.cached import FLOAT8
from jspec.sharding import opaque
from jspec.typing import Array


def not_installed() -> str | None:
    """Which packages are missing and how to get them, or None."""
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if not missing:
        return None
    names = " and ".join(missing)
    return f"{names} not installed; {install_gpu('cuda13')}"


@functools.cache
def too_old() -> str | None:
    """Which Triton jax-triton needs where another is installed, or None.

    jax-triton 0.4 imports under an older Triton, and fails when a kernel is lowered.
    """
    try:
        installed, bridge = version("triton"), version("jax-triton")
        needed = [Requirement(line) for line in requires("jax-triton") or []]
    except PackageNotFoundError:  # a module without its metadata
        return None
    for need in needed:
        applies = need.name == "triton" and (need.marker is None or need.marker.evaluate())
        if applies and not need.specifier.contains(installed, prereleases=True):
            return f"jax-triton {bridge} needs {need} and finds {installed}; pip install '{need}'"
    return None


def refuses_triton(keys: Array | None = None) -> str | None:
    """Why no Triton kernel can run on the default device, or None.

    ``keys``: of a cache that the kernel reads or writes.
    """
    if keys is not None and keys.dtype == FLOAT8:
        refusal = refuses_gpu((8, 9), "Triton with a cache of 8 bits")
    else:
        refusal = refuses_gpu((8, 0), "Triton")
    return refusal or not_installed() or too_old()


def next_power(n: int) -> int:
    """The smallest power of 2 that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def passes_aliases_twice() -> bool:
    """Whether a kernel gets an aliased array twice, as its input and as its output.

    jax-triton 0.3 does; 0.4 passes it once.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    return "out_type" not in inspect.signature(jax_triton.triton_call).parameters


def triton_call(
    kernel: Any,
    *arrays: Array | tuple[Array, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    warps: int,
    stages: int | None = None,
    aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> tuple[Array, ...]:
    """Launch a Triton kernel on a one-dimensional grid.

    The kernel gets pointers to ``arrays``, then to its outputs. Before jax-triton 0.4, XLA cannot
    capture the call in a command buffer: in a jitted loop it costs the host a launch each time.

    Args:
        kernel: the jitted Triton function.
        arrays: its inputs; from jax-triton 0.4 on, one may be a tuple of arrays.
        out: shapes and dtypes of its outputs.
        programs: the size of the grid.
        warps: of a program.
        stages: of the compiler's loop pipelining, None for its default.
        aliases: from the index of an input array to that of the output that shares its memory; such
            outputs come last, since jax-triton 0.4 passes outputs by position.
        constants: the ``tl.constexpr`` parameters of the kernel.

    Returns:
        The outputs.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    # 0.4 renamed out_shape to out_type and warns of the old name.
    name = "out_shape" if passes_aliases_twice() else "out_type"
    settings = {name: tuple(out), "grid": (programs,), "num_warps": warps, "num_stages": stages}
    settings["input_output_aliases"] = dict(aliases or {})

    @jax.custom_batching.sequential_vmap  # jax-triton itself has no rule for vmap
    def launch(*arrays: Array | tuple[Array, ...]) -> tuple[Array, ...]:
        with warnings.catch_warnings():
            # 0.4 would have refs in place of aliases, which 0.3 does not take.
            warnings.filterwarnings("ignore", "input_output_aliases is deprecated")
            return jax_triton.triton_call(*arrays, kernel=kernel, **settings, **constants)

    return opaque(launch, *arrays)
