"""Rows in groups, each group times a matrix of its own, as the experts of a mixture are.

`grouped_linear` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

import numpy as np
from jax import lax
from jax import numpy as jnp

from jspec.dispatch import Backend, Case, Operation, always
from jspec.typing import Array


def grouped_linear(
    x: Array, kernel: Array, counts: Array, *, implementation: str | None = None
) -> Array:
    """``x [M, in]`` by groups of rows times ``kernel [E, in, out]``, float32 ``[M, out]``.

    ``counts`` int32 ``[E]``: how many rows each group has; groups follow each other. What comes of
    rows behind the last group is not specified. Sums are float32. Triton reads the matrices of
    groups that have rows, and no others. Raises `ValueError` for shapes that do not fit.
    """
    fits = x.ndim == 2 and kernel.ndim == 3 and x.shape[1] == kernel.shape[1]
    if not fits or counts.shape != kernel.shape[:1] or counts.dtype != jnp.int32:
        raise ValueError(
            f"x {x.shape}, kernel {kernel.shape}, counts {counts.dtype}{list(counts.shape)} must "
            "be [M, in], [E, in, out] and int32 [E]"
        )
    return GROUPED(x, kernel, counts, implementation=implementation)


def grouped_linear_xla(x: Array, kernel: Array, counts: Array) -> Array:
    """As `grouped_linear`."""
    return lax.ragged_dot(x, kernel, counts, preferred_element_type=jnp.float32)


def grouped_sizes(x: Array, kernel: Array, counts: Array) -> dict[str, int]:
    """What backends are ordered by; ``rows`` of all groups."""
    groups, inputs, outputs = kernel.shape
    return {"rows": len(x), "groups": groups, "inputs": inputs, "outputs": outputs}


def _cases() -> list[Case]:
    """Groups without rows among others, all rows in one, and one row alone."""

    def build(counts: list[int], dtype: str, inputs: int = 48, outputs: int = 40):
        def made() -> tuple[np.ndarray, ...]:
            rng = np.random.default_rng(sum(counts))

            def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
                values = scale * rng.standard_normal(shape, np.float32)
                return values.astype(jnp.dtype(dtype))

            kernel = normal(len(counts), inputs, outputs, scale=inputs**-0.5)
            return normal(sum(counts), inputs), kernel, np.array(counts, np.int32)

        return made

    def wanted(made):
        def multiplied() -> np.ndarray:
            x, kernel, counts = (np.asarray(array, np.float64) for array in made())
            groups = np.repeat(np.arange(len(counts)), counts.astype(int))
            return np.einsum("mi,mio->mo", x, kernel[groups]).astype(np.float32)

        return multiplied

    every = {
        "some-empty": build([0, 3, 0, 17, 1, 0], "float32"),
        "in-one": build([0, 9, 0], "float16"),
        "one-row": build([0, 0, 0, 1], "float16", inputs=40, outputs=21),
    }
    return [Case(name, made, small=True, wanted=wanted(made)) for name, made in every.items()]


GROUPED = Operation(
    "grouped_linear",
    {
        "xla": Backend("xla", grouped_linear_xla, always),
        "triton": "jspec.triton.grouped:GROUPED",
    },
    grouped_sizes,
    _cases,
)
