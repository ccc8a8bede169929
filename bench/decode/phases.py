"""Assigns a kernel to a part of an iteration, such as draft passes or verification."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.clocks import Kernel
from bench.decode.parts import PARTS as KINDS
from bench.decode.parts import instruction_of, part_of

# In the order of tables.
PARTS = (
    "draft passes",
    "verification",
    "collection",
    "selection",
    "compaction",
    "bookkeeping",
)
PHASES = {"draft": "draft passes", "verification": "verification"}
_PHASE = re.compile(r"(?:^|/)(draft|verification)/")  # scopes of `jspec.decode.step`
_INSIDE = re.compile(r"(?:^|/)(collection|selection|compaction)/")  # scopes of `jspec.policies`
# Kernels that XLA does not name after an instruction, by the names in their sources.
_NAMED = {
    "collection": re.compile(r"weights_kernel"),
    "selection": re.compile(r"(row|count|place|finish|score|pick)_kernel"),
    "bookkeeping": re.compile(r"(commit|parts|verify|ballot|tiles|filter|residual)_kernel"),
}
Sums = dict[str, dict[str, int]]  # nanoseconds by part and kind


def by_part(kernels: Iterable[Kernel], made_from: dict[str, str]) -> Sums:
    """Nanoseconds of each part, divided into attention, matmuls with weights, and the rest.

    ``kernels``: in the order in which they ran; ``made_from``: by `bench.decode.parts.origins`. A
    kernel of unknown origin, such as one of a library, belongs to the phase of the kernel before.
    """
    kernels = list(kernels)
    sums: Sums = {part: dict.fromkeys(KINDS, 0) for part in PARTS}
    origins = [made_from.get(instruction_of(name), "") for name, _ in kernels]
    phases = [match[1] for path in origins if (match := _PHASE.search(path))]
    phase = phases[0] if phases else "verification"
    for (name, nanoseconds), path in zip(kernels, origins, strict=True):
        match = _PHASE.search(path)
        phase = match[1] if match else phase
        kind = part_of(name, made_from)
        sums[_part(name, path, phase)][kind] += nanoseconds
    return sums


def _part(name: str, path: str, phase: str) -> str:
    """The part of a kernel that was compiled from ``path`` while ``phase`` ran."""
    inside = _INSIDE.search(path)
    if inside:
        return inside[1]
    if "/" in path:
        return PHASES[phase] if _PHASE.search(path) else "bookkeeping"
    named = [part for part, kernels in _NAMED.items() if kernels.search(name)]
    return named[0] if named else PHASES[phase]
