"""Assigns a kernel to a part of an iteration, such as verification, and to a kind of work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.clocks import Kernel

KINDS = ("attention", "matmuls", "rest")
PARTS = (
    *("draft passes", "verification", "collection"),
    *("selection", "compaction", "bookkeeping", "packing"),
)  # in the order of tables
LONGEST = 12  # kernels whose times a row has
_ATTENTION = re.compile(
    r"attention|attend|fmha|sdpa|flash|merge_kernel|gathered_kernel", re.IGNORECASE
)
_SCOPE = re.compile(r"/(?:gathered_|scored_)?attention/")  # scopes of attention operations
_MATMULS = re.compile(
    r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitk|matmul|linear_kernel|stream_kernel|"
    r"(?:^|_)dot(?:_|$)",
    re.IGNORECASE,
)
# An instruction of a compiled program, and its `op_name`.
_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{op_name="([^"]*)"')
# The name of a Mosaic kernel in the instruction that calls it; `stable_` is the serialised format.
_MOSAIC = re.compile(r"\\+00(?!stable_)([A-Za-z]\w*_mosaic_gpu)\\+00")
_PHASES = {"draft": "draft passes", "verification": "verification"}
_PHASE = re.compile(r"(?:^|/)(draft|verification)/")  # scopes of `jspec.decode.step`
# Scopes of `jspec.policies`, and of `jspec.decode.trees`.
_INSIDE = re.compile(r"(?:^|/)(collection|selection|compaction|packing)/")
# Kernels that XLA does not name after an instruction, by the names in their sources.
_NAMED = {
    "collection": re.compile(r"weights_kernel"),
    "selection": re.compile(r"(row|count|place|finish|score|pick)_kernel"),
    "packing": re.compile(r"path_kernel"),
    "bookkeeping": re.compile(r"(commit|parts|verify|tree|ballot|tiles|filter|residual)_kernel"),
}
Sums = dict[str, dict[str, int]]  # nanoseconds by part and kind


def origins(program: str) -> dict[str, str]:
    """The operation that each kernel was compiled from, by kernel, from a program's text.

    XLA names its kernels after their instructions; those of Mosaic also have a suffix.
    """
    by_kernel: dict[str, str] = {}
    for line in program.splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction is not None:
            name, origin = instruction.groups()
            names = [re.sub(r"[.-]", "_", name), *_MOSAIC.findall(line)]
            by_kernel |= dict.fromkeys(names, origin)
    return by_kernel


def kind_of(kernel: str, path: str) -> str:
    """The kind of a kernel by its name and by the operation ``path`` that it was compiled from."""
    if _SCOPE.search(path) or _ATTENTION.search(kernel):
        return "attention"
    return "matmuls" if _MATMULS.search(kernel) else "rest"


def by_part(kernels: Iterable[Kernel], made_from: dict[str, str]) -> Sums:
    """Nanoseconds of each part, by kind.

    A kernel of unknown origin, such as one of a library, belongs to the phase of the kernel before.

    Args:
        kernels: in the order in which they ran.
        made_from: what `origins` returned.
    """
    paths = [
        (name, ns, made_from.get(re.sub("(_mosaic_gpu).*", r"\1", name), ""))
        for name, ns, *_ in kernels
    ]
    sums: Sums = {part: dict.fromkeys(KINDS, 0) for part in PARTS}
    phases = [match[1] for *_, path in paths if (match := _PHASE.search(path))]
    phase = phases[0] if phases else "verification"
    for name, nanoseconds, path in paths:
        match = _PHASE.search(path)
        phase = match[1] if match else phase
        sums[_part(name, path, phase)][kind_of(name, path)] += nanoseconds
    return sums


def _part(name: str, path: str, phase: str) -> str:
    """The part of a kernel that was compiled from ``path`` while ``phase`` ran."""
    inside = _INSIDE.search(path)
    if inside:
        return inside[1]
    if "/" in path:
        return _PHASES[phase] if _PHASE.search(path) else "bookkeeping"
    named = [part for part, pattern in _NAMED.items() if pattern.search(name)]
    return named[0] if named else _PHASES[phase]


def figures(
    kernels: Sequence[Kernel], program_text: str, steps: int, step_ns: float
) -> dict[str, Any]:
    """Kernels of a step, its idle share, its parts and its longest kernels.

    Args:
        kernels: of a chunk.
        program_text: the compiled program of the chunk.
        steps: of the chunk.
        step_ns: the time of a step.
    """
    totals: dict[str, list[float]] = {}
    for name, ns, *_ in kernels:
        total = totals.setdefault(name, [0.0, 0.0])
        total[0] += 1 / steps
        total[1] += ns / steps
    longest = sorted(totals.items(), key=lambda pair: -pair[1][1])[:LONGEST]
    parts = by_part(kernels, origins(program_text))
    return {
        "kernels": len(kernels) / steps,
        "idle": 1 - sum(kernel.ns for kernel in kernels) / steps / step_ns,
        "parts_ns": {
            part: {kind: ns / steps for kind, ns in kinds.items()} for part, kinds in parts.items()
        },
        "longest": dict(longest),
    }
