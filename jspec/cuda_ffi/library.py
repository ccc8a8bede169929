"""The kernels' libraries: loaded, checked and registered on first use, and the call of a target.

A new kernel is, in the folder ``src/SUBJECT``: ``NAME_ffi.cc`` with its FFI handler, compiled for
both platforms; ``NAME.cu`` with the CUDA kernel and ``NAME_cpu.cc`` with its counterpart, which
define the function that the handler calls, declared in ``NAME.h``; and the handler's name in
`TARGETS`. The libraries of both platforms hold every target of a subject, so that one name serves
both. A new subject is a folder, and a line in `jspec.cuda_ffi.build.SUBJECTS`.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jspec.cuda_ffi.build import build
from jspec.cuda_ffi.errors import BuildError
from jspec.sharding import opaque
from jspec.typing import Array

# Names of the handlers by subject; XLA knows each as jspec_NAME.
TARGETS = {
    "verify": (
        "verify_greedy",
        "verify_tree",
        "verify_and_commit",
        "acceptance_scan",
        "acceptance_scan_naive",
    ),
    "pack": ("pack", "pack_path", "verify_and_pack", "verify_and_pack_single"),
    "sample": ("verify_stochastic", "sample"),
    "linear": ("linear", "linear_chain"),
    "grouped": ("grouped_linear",),
    "select": ("select",),
    "hashed": ("hash_select", "hash_append_select", "hash_attention"),
    "codes": ("hamming_scores", "hash_encode"),
    "attention": ("attention", "scored_attention"),
    "gathered": ("gathered_attention", "rotate_append_attend"),
    "host": ("fetch_rows", "fetch_ahead", "store_rows"),
    "exchange": ("exchange", "all_to_all_merge", "all_reduce"),
}
PLATFORMS = {"gpu": "CUDA", "cpu": "cpu"}


def refusal(subject: str) -> str | None:
    """Why the kernels of ``subject`` cannot run on the default backend, or None.

    A subject is a key of `TARGETS`. Its library is built if it is not yet.
    """
    return _refusal(subject, jax.default_backend())


def call(
    target: str,
    outputs: Sequence[Any],
    *arguments: Array,
    vmap_method: str,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> tuple[Array, ...]:
    """Call one of `TARGETS`.

    Args:
        target: the name of the handler.
        outputs: shapes and dtypes of its results.
        arguments: its inputs.
        vmap_method: as in `jax.ffi.ffi_call`.
        aliases: from the index of an input to that of the output that shares its memory.
        attributes: of the handler, with their NumPy dtypes.

    Returns:
        The results.

    Raises:
        BuildError: where the library cannot be built or loaded.
    """
    subject = next(subject for subject, targets in TARGETS.items() if target in targets)
    if reason := refusal(subject):
        raise BuildError(reason)
    function = jax.ffi.ffi_call(
        f"jspec_{target}", outputs, vmap_method=vmap_method, input_output_aliases=aliases
    )
    return tuple(opaque(functools.partial(function, **attributes), *arguments))


def loaded(subject: str) -> ctypes.CDLL:
    """The library of ``subject`` for the default backend; `BuildError` where `refusal` has one."""
    library = _loaded(subject, jax.default_backend())
    if isinstance(library, str):
        raise BuildError(library)
    return library


def _refusal(subject: str, backend: str) -> str | None:
    library = _loaded(subject, backend)
    return library if isinstance(library, str) else None


@functools.cache
def _loaded(subject: str, backend: str) -> ctypes.CDLL | str:
    """The library for ``backend``, built, loaded and registered once; or why that fails."""
    if backend not in PLATFORMS:
        return f"there are kernels for NVIDIA GPUs and CPUs, not for {backend!r}"
    try:
        return _register(subject, PLATFORMS[backend])
    except BuildError as error:
        return str(error)


def _register(subject: str, platform: str) -> ctypes.CDLL:
    path = build(subject, platform).path
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}; delete it to build it again") from error
    try:
        _check_abi(path, library.jspec_ffi_api_version())
        handlers = {target: getattr(library, f"jspec_{target}") for target in TARGETS[subject]}
    except AttributeError as error:
        raise BuildError(
            f"{path} is no library of jspec's kernels: {error}; delete it to build it again"
        ) from error
    for target, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)
        jax.ffi.register_ffi_target(f"jspec_{target}", capsule, platform=platform)
    return library


def _check_abi(path: Path, built: int) -> None:
    """Raise `BuildError` for a library compiled against a newer FFI than that of jaxlib."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    running = (int(versions["MAJOR"]), int(versions["MINOR"]))
    version = divmod(built, 1000)
    if version[0] != running[0] or version > running:
        raise BuildError(
            f"{path} was built for XLA FFI {version[0]}.{version[1]}, but the running jaxlib has "
            f"{running[0]}.{running[1]}; delete it to build it again"
        )
