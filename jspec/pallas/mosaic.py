"""What the Mosaic GPU kernels share: who can run them, and how a vector lies over a warpgroup.

A kernel's vectors have static sizes, powers of 2. A run of n elements is covered by pieces of one
such size, the last of them laid so that it ends with the run: where it overlaps the one before,
both compute or write the same.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.gpu import refuses_gpu
from jspec.typing import Array

WARPS, LANES = 4, 32  # of a warpgroup, which is what runs a program


def too_old() -> str | None:
    """Which jax the kernels need, where this one is too old for them, or None."""
    if jax.__version_info__ >= (0, 11):
        return None
    return f"Mosaic GPU kernels need jax 0.11 or newer (Python >= 3.12), not {jax.__version__}"


def refuses_pallas() -> str | None:
    """Why no kernel of this package can run here, or None."""
    return too_old() or refuses_gpu((9, 0), "Mosaic GPU")


def floor_power(n: int) -> int:
    """The largest power of 2 that is at most ``n >= 1``."""
    return 1 << (n.bit_length() - 1)


def starts(n: int, size: int) -> list[int]:
    """Where pieces of ``size <= n`` begin that cover ``n`` elements."""
    return [*range(0, n - size, size), n - size]


@dataclasses.dataclass(frozen=True)
class Spread:
    """How ``size`` elements lie over a warpgroup: ``vector`` neighbours a lane, lanes, then warps.

    ``warps`` of the four share the elements where there are enough of them; the other warps, and
    lanes that are left over, hold copies. All are powers of 2. A single element is a scalar.
    """

    size: int
    vector: int = 1
    warps: int = 1

    def layout(self):
        """The same as Mosaic GPU says it."""
        vector = min(self.vector, self.size // 2)
        lanes = min(LANES, self.size // vector)
        warps = min(self.warps, self.size // (lanes * vector))
        tiles = [(lanes * vector,), (vector,)]
        lane_dims: list[int | plgpu.Replicated] = [-2]
        warp_dims: list[int | plgpu.Replicated] = []
        if warps > 1:
            tiles.insert(0, (warps * lanes * vector,))
            warp_dims = [-3]
        if lanes < LANES:
            lane_dims.insert(0, plgpu.Replicated(LANES // lanes))
        if warps < WARPS:
            warp_dims.insert(0, plgpu.Replicated(WARPS // warps))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tuple(tiles)), tuple(warp_dims), tuple(lane_dims), vector_dim=-1
        )


def tile_layout(rows: int, columns: int, max_vector: int = 1):
    """How a tile ``[rows, columns]`` lies over a warpgroup: warps over rows, lanes over columns.

    Warps that the rows leave over share the columns. A lane has up to ``max_vector`` neighbours of
    a row. All are powers of 2, and a warp's columns are at most `LANES` times ``max_vector``.
    """
    down = min(rows, WARPS)
    vector = max(min(columns * down // (WARPS * LANES), max_vector), 1)
    across = min(WARPS // down, columns // vector)
    lanes = min(columns // across // vector, LANES)
    # The dimensions are rows, warps of a row, lanes, neighbours; the middle ones where there are
    # several.
    tiles: list[tuple[int, ...]] = [(down, columns)]
    if across > 1:
        tiles.append((lanes * vector,))
    if lanes > 1:
        tiles.append((vector,))
    lane_dims: list[int | plgpu.Replicated] = [-2] * (lanes > 1)
    warp_dims: list[int | plgpu.Replicated] = []
    if down > 1:
        warp_dims.append(-2 - (lanes > 1) - (across > 1))
    if across > 1:
        warp_dims.append(-2 - (lanes > 1))
    if lanes < LANES:
        lane_dims.insert(0, plgpu.Replicated(LANES // lanes))
    if down * across < WARPS:
        warp_dims.insert(0, plgpu.Replicated(WARPS // (down * across)))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)), tuple(warp_dims), tuple(lane_dims), vector_dim=-1
    )


def load(ref, spread: Spread) -> Array:
    """What ``ref`` holds: a scalar, or a vector that lies as ``spread`` says."""
    if spread.size == 1:
        return ref[...]
    layout = spread.layout()
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref, value: Array) -> None:
    """Make ``ref`` hold ``value``, a vector or a scalar."""
    if value.ndim and hasattr(plgpu, "store"):
        # From jax 0.12 on, a plain assignment refuses vectors shorter than a cache line.
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def iota(spread: Spread) -> Array:
    """0 .. size - 1, int32."""
    if spread.size == 1:
        return jnp.int32(0)
    return plgpu.broadcasted_iota(jnp.int32, (spread.size,), 0, layout=spread.layout())


def largest(x: Array) -> Array:
    """The maximum of a vector, or the scalar itself."""
    return jnp.max(x) if x.ndim else x
