"""`jspec doctor`: what runs here, and what to do about the rest."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.markup import escape
from rich.table import Table

from jspec.cli.show import console, environment, print_json
from jspec.dispatch import Operation
from jspec.models.bundled import bundled_path
from jspec.ops.attention import ATTENTION, attention
from jspec.ops.fused import VERIFY_AND_APPEND, VERIFY_AND_PACK
from jspec.ops.pack import PACK
from jspec.ops.sample import SAMPLE, Role, Sampling, settings_of
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.verify import VERIFY_GREEDY
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it works, what was seen, and the way out if not."""

    what: str
    works: bool
    seen: str
    advice: str = ""


def doctor(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0 if decoding works here, 1 otherwise."""
    findings = [_python(), *_packages(), _gpu(), _bundled(), *map(_attention, ATTENTION.backends)]
    for call in _calls():
        wanted = call.run("xla")
        findings += [_backend(call, name, wanted) for name in call.operation.backends]
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
    needed = [
        f for f in findings if f.what.startswith(("bundled", "attention")) or ", xla" in f.what
    ]
    return 0 if all(f.works for f in needed) else 1


def _python() -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 12):
        return Finding("Python", True, seen)
    return Finding("Python", True, seen, "for a GPU take 3.12 or newer: jax needs it from 0.11 on")


def _packages() -> list[Finding]:
    wanted = {"jax": "", "flax": "", "jax-triton": "only for GPU kernels: pip install '.[cuda13]'"}
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
    advice = "pip install '.[cuda13]' (driver 580 or newer) or '.[cuda12]', with Python >= 3.12"
    return Finding("GPU", False, "jax has no CUDA plugin", advice)


def _bundled() -> Finding:
    weights = bundled_path() / "model.safetensors"
    if weights.is_file():
        return Finding("bundled model", True, f"{weights.stat().st_size / 1e6:.1f} MB")
    return Finding("bundled model", False, f"{weights} is missing", "install jspec again")


def _attention(name: str) -> Finding:
    """Run an attention implementation on a small case and compare it with numpy."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 16), np.float32) for n in (3, 40, 40))
    positions = np.array([[37, 38, 39]], np.int32)
    out, _ = attention(*map(jnp.asarray, (q, k, v, positions)), implementation=name)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / 4
    scores = np.where(np.arange(40) <= positions[0][:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(axis=-1, keepdims=True), v)
    error = float(np.abs(np.asarray(out) - wanted).max())
    # A GPU multiplies float32 in TF32 unless told otherwise: three digits are what it has.
    what = f"attention, {name}"
    if error < 1e-2:
        return Finding(what, True, "right")
    return Finding(what, False, f"off by {error:.1e}", "report it, with this table")


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation with small arguments."""

    operation: Operation
    arguments: tuple[Any, ...]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, backend: str) -> list[Array]:
        """What that backend returns."""
        out = self.operation(*self.arguments, **self.static, implementation=backend)
        return jax.tree.leaves(out)


def _calls() -> list[Call]:
    """A call of each operation in which all is accepted, so that no output is unspecified."""
    target = jnp.arange(30, dtype=jnp.int32).reshape(2, 15)
    tokens = (target[:, :14], target, jnp.full((2,), 14, jnp.int32), target[:, :0])
    rows = jnp.arange(2 * 14 * 8, dtype=jnp.float32).reshape(2, 14, 8)
    held = jnp.array([1, 3], jnp.int32)
    certain = 40 * jax.nn.one_hot(target, 30)
    ones, zeros = jnp.ones(2), jnp.zeros(2, jnp.int32)
    settings = settings_of(Sampling(ones, zeros, ones, 0 * ones, zeros.astype(jnp.uint32)))
    unsharded = {"filtered": False, "axis_name": None}
    return [
        Call(VERIFY_GREEDY, tokens),
        Call(
            VERIFY_STOCHASTIC, (tokens[0], certain, *tokens[2:], settings, zeros, None), unsharded
        ),
        Call(SAMPLE, (certain, settings, target), {"role": Role.DRAFT} | unsharded),
        Call(PACK, (rows, tokens[2])),
        Call(VERIFY_AND_PACK, (*tokens, rows)),
        Call(VERIFY_AND_APPEND, (*tokens, rows, jnp.zeros((2, 20, 8)), held)),
    ]


def _backend(call: Call, name: str, wanted: list[Array]) -> Finding:
    """Run a backend on a small case and compare it with the reference."""
    what = f"{call.operation.name}, {name}"
    if reason := call.operation.backend(name).supports(*call.arguments, **call.static):
        return Finding(what, False, reason, "nothing, unless you want this one: others serve")
    got = call.run(name)
    if all(jnp.array_equal(x, y) for x, y in zip(got, wanted, strict=True)):
        return Finding(what, True, "right")
    return Finding(what, False, "differs from the reference", "report it, with this table")
