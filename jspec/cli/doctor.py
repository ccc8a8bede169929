"""`jspec doctor`: what runs here, and what to do about the rest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from packaging.version import Version
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jspec import host, tuned
from jspec.cli.compile_cache import keep_programs
from jspec.cli.errors import one_line
from jspec.cli.show import console, environment, print_json
from jspec.dispatch import Case, Operation
from jspec.extras import GPU_PYTHON, install_gpu
from jspec.gpu import gpu_in_use
from jspec.models.bundled import bundled_path
from jspec.ops import operations
from jspec.ops.attention.dense import ATTENTION

BUNDLED = "bundled model"
CAPTURED = "0.4.1"  # the first jax-triton whose calls XLA captures in CUDA graphs
PATIENCE = "Each backend is tried; where much must be compiled, this takes minutes."


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: what was checked.
        works: whether it works.
        detail: details, such as a version or an error.
        advice: what to do if it does not work.
        seconds: duration of the check.
    """

    what: str
    works: bool
    detail: str
    advice: str = ""
    seconds: float = 0.0


Check = tuple[str, Callable[[], Finding]]  # what is checked, and the check


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0 if decoding works here, 1 otherwise."""
    chosen = operations() if arguments.only is None else (_named_operation(arguments.only),)
    keep_programs()
    shows = None if arguments.json else console(stderr=False)
    if shows is not None:
        console().print(PATIENCE)
    findings = []
    checks = _checks_of(chosen)
    if arguments.only is None:
        checks = itertools.chain(_checks(), checks)
    for finding in _look(checks):
        findings.append(finding)
        if shows is not None:
            _show(shows, finding)
    needed = {BUNDLED} | {f"{x.name}, {n}" for x in chosen for n in x.never_refusing}
    broken = [f.what for f in findings if f.what in needed and not f.works]
    verdict = _verdict(findings, broken, chosen, arguments.only)
    if shows is None:
        values = [dataclasses.asdict(f) for f in findings]
        print_json({"environment": environment(), "findings": values, "verdict": verdict})
    else:
        shows.print(f"\n{verdict}")
    return 1 if broken else 0


def _checks() -> Iterator[Check]:
    yield "Python", _python
    for name in ("jax", "flax", "jax-triton"):
        yield name, functools.partial(_package, name)
    yield "GPU", _gpu
    yield "tuning", _tuned
    yield BUNDLED, _bundled
    if jax.default_backend() == "gpu":
        yield "cache", _cache
    yield "host memory", _host


def _named_operation(name: str) -> Operation:
    """The operation ``name``; raises `ValueError` where there is none."""
    known = {operation.name: operation for operation in operations()}
    if name not in known:
        raise ValueError(f"--only {name!r} is no operation; name one of {', '.join(known)}")
    return known[name]


def _checks_of(chosen: Sequence[Operation]) -> Iterator[Check]:
    """Checks of each backend of operations."""
    for operation in chosen:
        pairs = functools.cache(functools.partial(_pairs, operation))
        for name in operation.backends:
            yield _label(operation, name), functools.partial(_backend, operation, name, pairs)


def _label(operation: Operation, name: str) -> str:
    """An operation and a backend; kernels of ``cuda`` run as their C++ build on a CPU."""
    built = name.startswith("cuda") and jax.default_backend() == "cpu"
    return f"{operation.name}, {name} (C++)" if built else f"{operation.name}, {name}"


def _look(checks: Iterator[Check]) -> Iterator[Finding]:
    """Run the checks one by one; a terminal at stderr shows the name of the current one.

    It is erased before a finding is yielded, which is shown on stdout.
    """
    columns = (TextColumn("probing {task.description}...", markup=False), TimeElapsedColumn())
    for what, check in checks:
        shows = console()
        quiet = not shows.is_terminal
        with Progress(*columns, console=shows, transient=True, disable=quiet) as progress:
            progress.add_task(one_line(what))
            begin = time.perf_counter()
            try:
                finding = check()
            except Exception as error:  # whatever it is, the other checks go on
                said = one_line(f"{type(error).__name__}: {error}")
                finding = Finding(what, False, f"{said:.300}", "report it, with all that is above")
            seconds = time.perf_counter() - begin
        yield dataclasses.replace(finding, seconds=seconds)


def _show(shows: Console, finding: Finding) -> None:
    """A line of three columns, and what to do on a line of its own, which can be copied."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=2)
    table.add_column(width=28)
    table.add_column(overflow="fold")  # a path is shown whole
    took = f", {finding.seconds:.1f} s" if finding.seconds >= 0.05 else ""
    mark = "ok" if finding.works else "--"
    table.add_row(mark, finding.what, finding.detail + took)
    shows.print(table)
    if finding.advice:
        shows.print(f"    to do: {finding.advice}", soft_wrap=True)


def _verdict(
    findings: Sequence[Finding],
    broken: Sequence[str],
    chosen: Sequence[Operation],
    only: str | None,
) -> str:
    if broken:
        return f"jspec cannot decode here: {'; '.join(broken)} must work. See what to do above."
    names = {_label(x, name) for x in chosen for name in x.backends}
    backends = [f for f in findings if f.what in names]
    works = sum(f.works for f in backends)
    of_device = f"on {jax.devices()[0].device_kind}"
    if only:
        return f"{only} runs here, {of_device}: {works} of {len(backends)} backends run."
    return (
        f"jspec decodes here, {of_device}: {works} of {len(backends)} backends run, and every "
        "operation has one that does."
    )


def _python() -> Finding:
    detail = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= GPU_PYTHON or not _has_driver():
        return Finding("Python", True, detail)
    return Finding(
        "Python", True, detail, "for a GPU take 3.12 or newer: jax needs it from 0.11 on"
    )


def _package(name: str) -> Finding:
    try:
        installed = version(name)
        if name == "jax-triton" and Version(installed) < Version(CAPTURED):
            advice = f"pip install 'jax-triton>={CAPTURED}': XLA captures its calls in CUDA graphs"
            return Finding(name, True, installed, advice)
        return Finding(name, True, installed)
    except PackageNotFoundError:
        if name != "jax-triton":
            advice = f"pip install {name}"
        else:
            advice = install_gpu("cuda13") if _has_driver() else "nothing: GPUs alone need it"
        return Finding(name, False, "not installed", advice)


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _gpu() -> Finding:
    devices = jax.devices()
    if devices[0].platform == "gpu":
        return Finding("GPU", True, f"{len(devices)} x {devices[0].device_kind}")
    if not _has_driver():
        return Finding("GPU", False, "no NVIDIA driver", "nothing: jspec decodes on the CPU")
    if find_spec("jax_cuda13_plugin") or find_spec("jax_cuda12_plugin"):
        advice = "this says why: python -c \"import jax; jax.devices('cuda')\""
        return Finding("GPU", False, "jax does not see it", advice)
    advice = (
        f"with driver 580 or newer {install_gpu('cuda13')}; with an older one "
        f"{install_gpu('cuda12')}"
    )
    return Finding("GPU", False, "jax has no CUDA plugin", advice)


def _bundled() -> Finding:
    weights = bundled_path() / "model.safetensors"
    if weights.is_file():
        return Finding(BUNDLED, True, f"{weights.stat().st_size / 1e6:.1f} MB")
    advice = "in a checkout: pip install --force-reinstall --no-deps ."
    return Finding(BUNDLED, False, f"{weights} is missing", advice)


def _tuned() -> Finding:
    """Which file gives the order of backends and the block sizes here."""
    source = tuned.serving(gpu_in_use())
    detail = f"{source.table.name}.json, for {source.table.gpu}"
    if source.guess is None:
        return Finding("tuning", True, f"{detail}: measured")
    advice = "it may be faster; in a checkout: python -m bench all, then python -m bench tune"
    return Finding("tuning", True, f"{detail}: a guess, {source.guess}", advice)


def _cache() -> Finding:
    """How often a GPU holds the cache while it decodes a batch: XLA's attention transposes it."""
    q, keys = jnp.zeros((2, 1, 8, 128), jnp.bfloat16), jnp.zeros((2, 256, 2, 128), jnp.bfloat16)
    settings = {"window": None, "scale": 1.0, "softcap": None, "value_size": None}
    positions, arguments = jnp.zeros((2, 1), jnp.int32), {"key_positions": None, **settings}
    chosen = ATTENTION.choose(None, q, keys, keys, positions, **arguments).name
    if not chosen.startswith("xla"):
        return Finding("cache", True, f"held once: attention runs by {chosen}")
    detail = f"held twice by batches of two rows and more: attention runs by {chosen}"
    return Finding("cache", True, detail, install_gpu("cuda13"))


def _host() -> Finding:
    """Whether a policy can keep the cache in the host's memory."""
    reason, _, advice = (host.refusal() or "").partition("; ")
    if reason:
        return Finding("host memory", False, reason, advice)
    return Finding("host memory", True, "the cache can lie there, by the policy hata_off")


def _pairs(operation: Operation) -> list[tuple[Case, Any]]:
    """The cases of an operation that are small, and what each must give."""
    cases = [case for case in operation.cases() if case.small]
    return [(c, c.expected() if c.expected else _run(operation, "xla", c)) for c in cases]


def _run(operation: Operation, name: str, case: Case) -> Any:
    run = functools.partial(operation, **case.static, implementation=name)
    return jax.jit(run)(*case.arguments)


def _backend(
    operation: Operation, name: str, pairs: Callable[[], Sequence[tuple[Case, Any]]]
) -> Finding:
    """Run a backend on the cases that it takes, and compare what it gives with what each must give.

    It works if it takes one. Others may serve in its place, so that there is nothing to do if not.
    """
    what, refused, took = _label(operation, name), [], 0
    for case, expected in pairs():
        if reason := operation.backend(name).supports(*case.arguments, **case.static):
            refused.append(reason)
            continue
        took += 1
        got = jax.tree.leaves(_run(operation, name, case))
        if not all(_agree(x, y) for x, y in zip(got, jax.tree.leaves(expected), strict=True)):
            detail = f"{case.name}: differs from what it must give"
            return Finding(what, False, detail, "report it, with all that is above")
    if not took:
        return Finding(what, False, refused[-1])  # the last case is one that kernels take
    return Finding(what, True, f"right; refuses some cases: {refused[0]}" if refused else "right")


def _agree(x: Any, y: Any) -> bool:
    """Whether two outputs are the same; to two digits, where they are float32 or bfloat16.

    A GPU multiplies float32 in TF32 unless told otherwise, and backends round bfloat16 at other
    places.
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.shape != y.shape:
        return False
    if x.dtype in (np.float32, jnp.bfloat16):
        return bool(np.allclose(np.float32(x), np.float32(y), rtol=1e-2, atol=2e-2))
    return np.array_equal(x, y)
