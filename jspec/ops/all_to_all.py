"""An all-to-all between the devices of a mesh, by XLA or one-sided.

One-sided, a device stores what it has for a peer in that peer's memory, and waits for what its
peers store in its own (docs/helix.md).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jspec.ops.vocabulary import Axes
from jspec.typing import Array

By = Literal["xla", "pallas", "cuda"]


@dataclasses.dataclass(frozen=True)
class OneSided:
    """A kernel that exchanges one-sided.

    ``run(pieces, axes)``: ``pieces [ranks, ...]``, one for each rank of ``axes``; what comes is of
    each rank. It is called inside `jax.shard_map` over the first devices of the process, in their
    order; ``axes`` are the last of the mesh. ``refuses(devices)``: why so many devices cannot, or
    None. ``max_bytes``: of a piece that it takes, None for any.
    """

    run: Callable[[Array, Axes], Array]
    refuses: Callable[[int], str | None]
    max_bytes: int | None = None


_ONE_SIDED = {"pallas": "jspec.pallas.all_to_all", "cuda": "jspec.cuda_ffi.all_to_all"}


def all_to_all(x: Array, axes: Axes, *, axis: int, by: By = "xla") -> Array:
    """``x [..., ranks, ...]`` has a piece for each rank of ``axes``; what comes is of each rank.

    Returns ``[ranks, ...]``, the pieces in the order of ranks, bit for bit. All but ``xla`` need
    devices that `refuses_all_to_all` has nothing against; pieces that are too large for them go by
    XLA. Their calls in a program have to follow from each other, so that all devices make them in
    one order.
    """
    if by != "xla" and takes(by, x.nbytes // x.shape[axis]):
        return _one_sided(by).run(jnp.moveaxis(x, axis, 0), axes)
    return lax.all_to_all(x, axes, split_axis=axis, concat_axis=0)


def takes(by: By, piece_bytes: int) -> bool:
    """Whether pieces of so many bytes go by ``by``, and not by XLA in its place."""
    limit = None if by == "xla" else _one_sided(by).max_bytes
    return limit is None or piece_bytes <= limit


def refuses_all_to_all(by: By, devices: Sequence[Any]) -> str | None:
    """Why the ``devices`` of a mesh, in its order, cannot exchange so, or None."""
    if by == "xla":
        return None
    if (processes := jax.process_count()) > 1:
        return f"a device reaches no memory of another process, and there are {processes}"
    numbers = [device.local_hardware_id for device in devices]
    if numbers != list(range(len(devices))):
        return f"devices {numbers} are not the first {len(devices)} in their order"
    return _one_sided(by).refuses(len(devices))


def _one_sided(by: str) -> OneSided:
    return importlib.import_module(_ONE_SIDED[by]).ALL_TO_ALL
