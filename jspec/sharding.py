"""Meshes: inside `jax.shard_map`, and with Explicit axes.

Inside `jax.shard_map` with ``check_vma=True``, its default, the type of a value says over which
mesh axes it varies. Values that meet in a loop's carry or in a kernel must vary over the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jspec.host import KIND, in_host
from jspec.typing import Array

# One for every array, or a function of an array's name and shape; None is as `placed` says.
Sharding = jax.sharding.Sharding
Placing = Sharding | Callable[[str, tuple[int, ...]], Sharding | None] | None


def placed(name: str, shape: tuple[int, ...], sharding: Placing) -> jax.sharding.Sharding | None:
    """The sharding of the array ``name``, None for the default device.

    Raises `ValueError` where ``shape`` cannot be divided by it.
    """
    chosen = sharding(name, shape) if callable(sharding) else sharding
    if chosen is not None:
        try:
            chosen.shard_shape(shape)
        except (ValueError, IndexError) as error:  # IndexError: the spec has too many axes
            raise ValueError(f"{name} {shape} cannot be placed by {chosen}: {error}") from None
    return chosen


def bytes_on_device(tree: Any) -> int:
    """Bytes of the arrays of ``tree`` that one device holds; NumPy arrays count as a whole."""

    def shard_bytes(x: Array | np.ndarray) -> int:
        shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(shard_bytes, jax.tree.leaves(tree)))


def place(tree: Any, sharding: Placing) -> Any:
    """``tree`` with every array placed; names of arrays are such as ``cache.columns.0.keys``.

    Arrays in the host's memory stay there. NumPy arrays without a sharding go to the default
    device.
    """

    def of(path: Any, x: Array | np.ndarray) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        where = placed(name, x.shape, sharding)
        if where is None:
            return x if isinstance(x, jax.Array) else jax.device_put(x)
        return put(x, where.with_memory_kind(KIND) if in_host(x) else where)

    return jax.tree.map_with_path(of, tree)


def put(x: Array | np.ndarray, sharding: Sharding) -> Array:
    """`jax.device_put`, also where ``sharding`` has devices of other processes.

    In that case each process must pass the same ``x``, which is not checked.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or is_global:
        return jax.device_put(x, sharding)
    host_array = np.asarray(x)
    return jax.make_array_from_callback(host_array.shape, sharding, host_array.__getitem__)


def explicit_mesh_sharding(tree: Any) -> NamedSharding | None:
    """A sharding that replicates over the Explicit mesh of the arrays of ``tree``; None without
    one.

    An array without a sharding counts as replicated there, but XLA may lay it out in another way,
    and it cannot be donated then.
    """
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes:
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def device_sharding(tree: Any) -> Sharding | None:
    """The one device of the arrays of ``tree``; None where that is the default one, or several.

    Arrays that JAX traces have none.
    """
    leaves = jax.tree.leaves(tree)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    devices = {device for x in arrays for device in x.sharding.device_set}
    with jax.ensure_compile_time_eval():  # also where JAX traces
        default = jax.device_put(0).devices()
    return SingleDeviceSharding(*devices) if len(devices) == 1 and devices != default else None


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some array of ``tree`` varies."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))


def varying_over(axes: frozenset[str], tree: Any) -> Any:
    """``tree`` with the types of its arrays varying over ``axes`` at least; no data is moved."""

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def opaque(function: Callable[..., Any], *arrays: Any) -> Any:
    """``function(*arrays)`` for a kernel, whose results JAX cannot relate to its arguments.

    All arguments and results vary over the union of the axes that the arguments vary over.
    """
    axes = varying_axes(arrays)
    return varying_over(axes, function(*varying_over(axes, arrays)))


def with_auto_axes(function: Callable[..., Any], *arguments: Any, like: Any) -> Any:
    """``function(*arguments)``, traced as if every Explicit mesh axis were Auto.

    With Explicit axes each operation has to say how its result is sharded, which a model that knows
    nothing of meshes does not. ``like``: arrays in the structure of the results, whose shardings
    the results get, cut or padded with None to their ranks.
    """
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves((arguments, like))}
    explicit = [mesh for mesh in meshes if mesh.explicit_axes]
    if not explicit:
        return function(*arguments)
    mesh = explicit[0]

    def of(x: Array) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*jax.typeof(x).sharding.spec))

    automatic = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=jax.tree.map(of, like)
    )
    return automatic(*arguments)


def _varying(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
