"""Assigns a kernel to a part of a step: attention, matmuls with weights, or the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.clocks import Kernel

PARTS = ("attention", "products", "rest")
_ATTENTION = re.compile(
    r"attention|attend|fmha|sdpa|flash|merge_kernel|gathered_kernel", re.IGNORECASE
)
_SCOPE = re.compile(r"/(?:gathered_|scored_)?attention/")  # scopes of attention operations
_PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitk|matmul|linear_kernel|stream_kernel|"
    r"(?:^|_)dot(?:_|$)",
    re.IGNORECASE,
)
# An instruction of a compiled program, and its `op_name`.
_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{op_name="([^"]*)"')
# The name of a Mosaic kernel in the instruction that calls it; `stable_` is the serialised format.
_MOSAIC = re.compile(r"\\+00(?!stable_)([A-Za-z]\w*_mosaic_gpu)\\+00")


def origins(program: str) -> dict[str, str]:
    """The operation each kernel was compiled from, by kernel name, from a program's text.

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


def instruction_of(kernel: str) -> str:
    """The name of a kernel in `origins`."""
    return re.sub("(_mosaic_gpu).*", r"\1", kernel)


def part_of(kernel: str, made_from: dict[str, str]) -> str:
    """The part of a kernel, by the operation it was compiled from and by its name."""
    if _SCOPE.search(made_from.get(instruction_of(kernel), "")) or _ATTENTION.search(kernel):
        return "attention"
    return "products" if _PRODUCTS.search(kernel) else "rest"


def by_part(kernels: Iterable[Kernel], made_from: dict[str, str]) -> dict[str, int]:
    """Nanoseconds of each part."""
    sums: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, nanoseconds in kernels:
        sums[part_of(name, made_from)] += nanoseconds
    return sums


def longest(kernels: Iterable[Kernel], count: int) -> dict[str, list[int]]:
    """Count and total nanoseconds of the ``count`` kernels that took the most time, by name."""
    sums: dict[str, list[int]] = {}
    for name, nanoseconds in kernels:
        sum_of_name = sums.setdefault(name, [0, 0])
        sum_of_name[0] += 1
        sum_of_name[1] += nanoseconds
    ranked = sorted(sums.items(), key=lambda pair: -pair[1][1])
    return dict(ranked[:count])
