"""FP8 weights with a scale for each rectangle of them (DeepSeek-V3, arXiv 2412.19437, section 3.3).

A checkpoint has them as E4M3, and next to each ``weight`` a ``weight_scale_inv``: what a rectangle
is multiplied by to get its weights.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jspec.checks import shown
from jspec.models.files import Fields

DTYPE = np.dtype(jnp.float8_e4m3fn)
SUFFIX = "_scale_inv"


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """A scale for each ``rows`` outputs times ``columns`` inputs; the last may have fewer."""

    rows: int
    columns: int

    def shape(self, weights: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of ``weights [out, in]``."""
        return -(-weights[0] // self.rows), -(-weights[1] // self.columns)

    def dequantized(self, block: np.ndarray, first: int, scales: np.ndarray) -> np.ndarray:
        """``block [n, in]``, the rows of a tensor from ``first`` on, float32 and multiplied by its
        ``scales``."""
        of_rows = scales[(first + np.arange(len(block))) // self.rows]
        spread = np.repeat(of_rows, self.columns, axis=1)[:, : block.shape[1]]
        return block.astype(np.float32) * spread


def read_block_scales(fields: Fields) -> BlockScales:
    """Of a quantization_config with quant_method fp8. Raises `CheckpointError` for another kind."""
    kind = fields.text("fmt", "e4m3")
    if kind != "e4m3":
        raise fields.error(f"fmt={shown(kind)} is not supported; jspec reads e4m3")
    sizes = fields.values.get("weight_block_size")
    if not (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in sizes)
    ):
        raise fields.error(
            f"weight_block_size={shown(sizes)} must be two positive int32, as [128, 128]; jspec "
            "reads no other scales of fp8"
        )
    return BlockScales(*sizes)
