"""An all-to-all and an all-reduce between the devices of a mesh, by XLA or by one-sided kernels.

In a one-sided exchange, a device stores what it has for its peers directly in their memory, and
waits until they have stored theirs (docs/helix_exchange.md).
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
    """A kernel for a one-sided exchange.

    Attributes:
        run: ``run(pieces, axes)`` exchanges ``pieces [ranks, ...]``, one for each rank of ``axes``,
            and returns those of each rank. It is called inside `jax.shard_map` over the first
            devices of the process, in their order; ``axes`` are the last of the mesh.
        refuses: ``refuses(devices)`` returns why so many devices cannot run it, or None.
        max_bytes: to one peer; None is no limit.
        reduce: ``reduce(x, axes, dtype, add)`` is `all_reduce` with the ranks summed in their
            order, called as ``run`` is; it returns None for what it does not take. None where there
            is no such kernel.
        merge: ``merge(out, lse, axes)`` is an all-to-all of attention over parts of the keys with
            its merge, as `jspec.helix.attention.all_to_all_merge`, called as ``run`` is; it returns
            None for shapes that it does not take. None where there is no such kernel.
    """

    run: Callable[[Array, Axes], Array]
    refuses: Callable[[int], str | None]
    max_bytes: int | None = None
    reduce: Callable[[Array, Axes, Any, Array | None], Array | None] | None = None
    merge: Callable[[Array, Array, Axes], tuple[Array, Array] | None] | None = None


_ONE_SIDED = {"pallas": "jspec.pallas.all_to_all", "cuda": "jspec.cuda_ffi.all_to_all"}


def all_to_all(x: Array, axes: Axes, *, axis: int, by: By = "xla") -> Array:
    """Exchange pieces between the ranks of mesh axes, inside `jax.shard_map`.

    The calls of a program must depend on each other, so that all devices run them in the same
    order.

    Args:
        x: ``[..., ranks, ...]``, with a piece for each rank of ``axes``.
        axes: mesh axes.
        axis: the axis of ``x`` with the ranks.
        by: how to exchange. All but ``xla`` need devices that `refuses_all_to_all` accepts; pieces
            that are too large for them are exchanged by XLA.

    Returns:
        ``[ranks, ...]``, the pieces from each rank in their order, bit for bit.
    """
    if by != "xla" and takes(by, x.nbytes // x.shape[axis]):
        return _one_sided(by).run(jnp.moveaxis(x, axis, 0), axes)
    return lax.all_to_all(x, axes, split_axis=axis, concat_axis=0)


def all_reduce(
    x: Array, axes: Axes, *, by: By = "xla", dtype: Any = None, add: Array | None = None
) -> Array:
    """Sum ``x`` over the ranks of mesh axes, inside `jax.shard_map`.

    Each device of a one-sided all-reduce sends ``x`` whole to all others: one message where a ring
    has several steps, so that few bytes take the time of one. The calls of a program must depend on
    each other, as those of `all_to_all`.

    Args:
        x: of the same shape on all ranks.
        axes: mesh axes.
        by: how to send. ``cuda`` takes float32 up to its largest message, and in exact passes
            several messages, one after the other. It sums in the order of the ranks, so that all
            have the same bits at any size. XLA sums whatever else there is.
        dtype: of the sum; None is that of ``x``.
        add: added to the sum in ``dtype``, such as a residual, the same on all ranks.

    Returns:
        The sum, in the shape of ``x``.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    kernel = None if by == "xla" else _one_sided(by).reduce
    if kernel is not None and (total := kernel(x, axes, dtype, add)) is not None:
        return total
    total = lax.psum(x, axes).astype(dtype)
    return total if add is None else add.astype(dtype) + total


def merged_one_sided(out: Array, lse: Array, axes: Axes, by: By) -> tuple[Array, Array] | None:
    """`jspec.helix.attention.all_to_all_merge` in one kernel; None where ``by`` has none for it."""
    kernel = None if by == "xla" else _one_sided(by).merge
    return None if kernel is None else kernel(out, lse, axes)


def takes(by: By, piece_bytes: int) -> bool:
    """Whether pieces of so many bytes are exchanged by ``by``, not by XLA instead."""
    limit = None if by == "xla" else _one_sided(by).max_bytes
    return limit is None or piece_bytes <= limit


def refuses_all_to_all(by: By, devices: Sequence[Any]) -> str | None:
    """Why the ``devices`` of a mesh, in its order, cannot exchange by ``by``, or None."""
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
