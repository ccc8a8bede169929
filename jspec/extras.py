"""Commands that install what jspec can do without, as `jspec doctor` and errors print them."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

DISTRIBUTION = "jspec-jax"
GPU_PYTHON = (3, 12)  # the oldest that jax has GPU packages for, from 0.11 on


def install(extra: str) -> str:
    """The command that installs the packages of ``extra``, an extra of jspec's.

    It names these packages and not jspec, so that it works wherever jspec itself came from.
    """
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # jspec runs from its sources, and pip knows nothing of it
        return f"pip install -e '.[{extra}]' in jspec's folder"
    parts = [requirement.partition(";") for requirement in requirements]
    packages = [name.strip() for name, _, marker in parts if f"extra == '{extra}'" in marker]
    return "pip install " + " ".join(f"'{name}'" for name in packages)


def check_matplotlib() -> None:
    """Raise `ValueError` with the way out where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"pictures need matplotlib; {install('bench')}")


def install_gpu(extra: str) -> str:
    """`install` for an extra whose packages need a newer Python than jspec does."""
    command = install(extra)
    if sys.version_info >= GPU_PYTHON:
        return command
    needed = ".".join(map(str, GPU_PYTHON))
    return f"make an environment of Python {needed} or newer with jspec, and there {command}"
