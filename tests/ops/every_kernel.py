"""Runs each kernel of a backend, for compute-sanitizer: ``python -m tests.ops.every_kernel NAME``.

Each operation's small cases, and attention in bfloat16 over rows of several chunks. Prints how many
calls there were.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Case, Operation
from jspec.ops import operations

SLOTS = 1088  # of several chunks and a part of one
STATIC = {"scale": 0.125, "softcap": None, "value_size": None}


def attention_case(size: int, tokens: int, window: int | None) -> Case:
    """Ragged rows, one of them empty, whose last key is the cache's last slot."""

    def build():
        rng = np.random.default_rng(size + tokens)
        q, k, v = (
            rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
            for shape in ((3, tokens, 8, size), (3, SLOTS, 2, size), (3, SLOTS, 2, size))
        )
        last = np.array([SLOTS - 1, 70, -1], np.int32)[:, None]
        positions = np.where(last < 0, -1, last + np.arange(1 - tokens, 1)).astype(np.int32)
        return q, k, v, positions

    static = {"key_positions": None, "window": window, **STATIC}
    return Case(f"H{size}-T{tokens}", build, static)


def cases(operation: Operation) -> list[Case]:
    result = [case for case in operation.cases() if case.small]
    if operation.name == "attention":
        result += [attention_case(64, 1, None), attention_case(128, 20, 700)]
        result += [attention_case(256, 3, None)]
    return result


def main() -> None:
    (name,) = sys.argv[1:]
    count = 0
    for operation in operations():
        if name not in operation.backends:
            continue
        backend = operation.backend(name)
        for case in cases(operation):
            arguments = case.arguments
            if backend.supports(*arguments, **case.static) is None:
                jax.block_until_ready(operation(*arguments, implementation=name, **case.static))
                count += 1
    print(f"{count} calls")


if __name__ == "__main__":
    main()
