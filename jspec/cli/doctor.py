"""`jspec doctor`: what runs here, and what to do about the rest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.markup import escape
from rich.table import Table

from jspec import tuned
from jspec.cli.show import console, environment, print_json
from jspec.dispatch import Case, Operation
from jspec.gpu import gpu_in_use
from jspec.models.bundled import bundled_path
from jspec.ops import operations

CUDA = "pip install 'jspec-jax[cuda13]'"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it works, what was seen, and the way out if not."""

    what: str
    works: bool
    seen: str
    advice: str = ""


def doctor(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0 if decoding works here, 1 otherwise."""
    findings = [_python(), *_packages(), _gpu(), _tuned(), _bundled()]
    for operation in operations():
        findings += _operation(operation)
    if arguments.json:
        found = [dataclasses.asdict(f) for f in findings]
        print_json({"environment": environment(), "findings": found})
    else:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("", "what", "seen", "what to do"):
            table.add_column(heading)
        for f in findings:
            table.add_row("ok" if f.works else "--", f.what, *map(escape, (f.seen, f.advice)))
        console().print(table)
    needed = {"bundled model"} | {f"{x.name}, {n}" for x in operations() for n in x.never_refusing}
    return 0 if all(f.works for f in findings if f.what in needed) else 1


def _python() -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 12):
        return Finding("Python", True, seen)
    return Finding("Python", True, seen, "for a GPU take 3.12 or newer: jax needs it from 0.11 on")


def _packages() -> list[Finding]:
    wanted = {"jax": "", "flax": "", "jax-triton": f"only for GPU kernels: {CUDA}"}
    return [_package(name, advice) for name, advice in wanted.items()]


def _package(name: str, advice: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed", advice)


def _gpu() -> Finding:
    devices = jax.devices()
    if devices[0].platform == "gpu":
        return Finding("GPU", True, f"{len(devices)} x {devices[0].device_kind}")
    if not Path("/proc/driver/nvidia/version").exists():
        return Finding("GPU", False, "no NVIDIA driver", "nothing: jspec decodes on the CPU")
    if find_spec("jax_cuda13_plugin") or find_spec("jax_cuda12_plugin"):
        return Finding("GPU", False, "jax does not see it", "look at the log of jax.devices()")
    advice = f"{CUDA} (driver 580 or newer) or 'jspec-jax[cuda12]', with Python >= 3.12"
    return Finding("GPU", False, "jax has no CUDA plugin", advice)


def _bundled() -> Finding:
    weights = bundled_path() / "model.safetensors"
    if weights.is_file():
        return Finding("bundled model", True, f"{weights.stat().st_size / 1e6:.1f} MB")
    return Finding("bundled model", False, f"{weights} is missing", "install jspec again")


def _tuned() -> Finding:
    """Which file gives the order of backends and the block sizes here."""
    found = tuned.serving(gpu_in_use())
    seen = f"{found.table.name}.json, for {found.table.gpu}"
    if found.guess is None:
        return Finding("tuning", True, f"{seen}: measured")
    advice = "python -m bench all, then python -m bench tune: it may be faster"
    return Finding("tuning", True, f"{seen}: a guess, {found.guess}", advice)


def _operation(operation: Operation) -> list[Finding]:
    """Every backend of an operation on the cases that are small."""
    cases = [case for case in operation.cases() if case.small]
    wanted = [case.wanted() if case.wanted else _run(operation, "xla", case) for case in cases]
    pairs = list(zip(cases, wanted, strict=True))
    return [_backend(operation, name, pairs) for name in operation.backends]


def _run(operation: Operation, name: str, case: Case) -> Any:
    run = functools.partial(operation, **case.static, implementation=name)
    return jax.jit(run)(*case.arguments)


def _backend(operation: Operation, name: str, pairs: Sequence[tuple[Case, Any]]) -> Finding:
    """Run a backend on cases, and compare what it gives with what each must give."""
    what = f"{operation.name}, {name}"
    for case, wanted in pairs:
        if reason := operation.backend(name).supports(*case.arguments, **case.static):
            return Finding(what, False, reason, "nothing, unless you want this one: others serve")
        got = jax.tree.leaves(_run(operation, name, case))
        if not all(_agree(x, y) for x, y in zip(got, jax.tree.leaves(wanted), strict=True)):
            seen = f"{case.name}: differs from what it must give"
            return Finding(what, False, seen, "report it, with this table")
    return Finding(what, True, "right")


def _agree(x: Any, y: Any) -> bool:
    """Whether two outputs are the same; to three digits, where they are float32.

    A GPU multiplies float32 in TF32 unless told otherwise.
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.shape != y.shape:
        return False
    if x.dtype == np.float32:
        return bool(np.allclose(x, y, atol=1e-2))
    return np.array_equal(x, y)
