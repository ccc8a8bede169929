"""New weights for a model that decodes: matched by name, in its dtypes and shardings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jspec.decode.on_mesh import mesh_model
from jspec.decode.state import FlatModels
from jspec.sharding import put
from jspec.typing import Array, Model

VariableAndValue = tuple[nnx.Variable, Any]


class Weight(NamedTuple):
    """A weight of a model without its arrays: a variable of Flax, or an array that is in none.

    Attributes:
        name: Its path in the model.
        types: Shapes, dtypes and shardings of its leaves.
        structure: The structure of its leaves.
        is_optional: Whether new weights may lack it: variables that are no `nnx.Param`.
    """

    name: str
    types: list[jax.ShapeDtypeStruct]
    structure: Any
    is_optional: bool


class NewTarget(NamedTuple):
    """A model with new weights.

    Attributes:
        model: The model.
        leaves: Its leaves.
        structure: Their structure.
        variables: As `variables_of` returns them.
    """

    model: Model
    leaves: list[Array]
    structure: Any
    variables: list[VariableAndValue]


class WeightTypes:
    """What new weights of a model must be like. It holds no array.

    The model is flattened here alone. New weights are matched by name once for each structure that
    they have: flattening a model of 30 layers, and naming its weights, takes milliseconds.

    Attributes:
        blank: The model with `jax.ShapeDtypeStruct` for its arrays.
    """

    def __init__(self, model: Model) -> None:
        named, self._structure = jax.tree.flatten_with_path(model, is_leaf=_is_variable)
        self._weights = [_weight_of(name_of(path), node) for path, node in named]
        self._types = [x for weight in self._weights for x in weight.types]
        self._model_type, self._is_on_mesh = type(model), mesh_model(model) is not None
        nodes, _ = self._nodes_of(self._types)
        self.blank: Model = self._structure.unflatten(nodes)
        self._flat_structure = jax.tree.structure(self.blank)
        self._matched: tuple[Any, list[slice | None]] | None = None

    def matched(self, weights: Any, current: FlatModels) -> list[Any]:
        """The arrays of ``weights`` in the order of the model's leaves; none is copied.

        Names decide, so that a model, an `nnx.State`, a nested dict and any pytree of the model's
        structure serve, and for a model on a mesh also those of the model that was sharded. What
        ``weights`` may lack are variables that are no `nnx.Param`, which the model keeps: they are
        those of ``current``.

        Raises `ValueError` for a weight that is missing, unknown, or of another shape or kind.
        """
        leaves, structure = jax.tree.flatten(weights)
        if self._matched is None or structure != self._matched[0]:
            self._matched = structure, self._slices_of(weights)
        old_leaves, arrays = iter(jax.tree.leaves(current)), []
        for weight, where in zip(self._weights, self._matched[1], strict=True):
            old = list(itertools.islice(old_leaves, len(weight.types)))
            new = old if where is None else leaves[where]
            if len(weight.types) != len(new) or not all(map(_serves, new, weight.types)):
                raise ValueError(
                    f"the weight {weight.name!r} is {_shown(new)}, and that of the model "
                    f"{_shown(weight.types)}; pass one of that shape, plain or quantised as the "
                    "model has it"
                )
            arrays += new
        return arrays

    def model_of(self, arrays: list[Any], *, donate: bool) -> NewTarget:
        """The model with ``arrays``, cast and moved where they must be; the list is emptied.

        ``donate`` as in `array_like`.
        """
        leaves = _arrays_like(arrays, self._types, donate=donate)
        nodes, variables = self._nodes_of(leaves)
        return NewTarget(self._structure.unflatten(nodes), leaves, self._flat_structure, variables)

    def _nodes_of(self, leaves: Sequence[Any]) -> tuple[list[Any], list[VariableAndValue]]:
        """Variables of Flax and other arrays, of the leaves of a model; and the variables again."""
        left = iter(leaves)
        nodes = [x.structure.unflatten(itertools.islice(left, len(x.types))) for x in self._weights]
        return nodes, _with_values(nodes)

    def _slices_of(self, weights: Any) -> list[slice | None]:
        """The leaves of each of the model's weights among those of ``weights``, None if missing."""
        slices, end = {}, 0
        prefix = "model." if self._is_on_mesh and not isinstance(weights, self._model_type) else ""
        for path, node in jax.tree.leaves_with_path(weights, is_leaf=_is_variable):
            begin, end = end, end + jax.tree.structure(node).num_leaves
            slices[prefix + name_of(path)] = slice(begin, end)
        names = [weight.name for weight in self._weights]
        if unknown := sorted(slices.keys() - set(names)):
            raise ValueError(
                f"the model has no weight {unknown[0]!r}; pass weights of its own structure, such "
                f"as nnx.state(model), which has {', '.join(names[:3])}, ..."
            )
        for weight in self._weights:
            if weight.name not in slices and not weight.is_optional:
                raise ValueError(f"the weight {weight.name!r} is missing; pass all of the model's")
        return [slices.get(name) for name in names]


def _weight_of(name: str, node: Any) -> Weight:
    leaves, structure = jax.tree.flatten(node)
    is_optional = _is_variable(node) and not isinstance(node, nnx.Param)
    return Weight(name, list(map(shape_of, leaves)), structure, is_optional)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _serves(new: Any, old: Any) -> bool:
    """Whether ``new`` has the shape of ``old``, and a dtype that can be cast to its dtype."""
    if not isinstance(new, jax.Array | np.ndarray) or new.shape != old.shape:
        return False
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in (new, old))
    return new.dtype == old.dtype or all(floats)


def _shown(arrays: list[Any]) -> str:
    types = (f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x) for x in arrays)
    return f"{', '.join(types)}"[:200]


def variables_of(models: Any) -> list[VariableAndValue]:
    """Variables of Flax modules, whose values a trainer replaces in place, with their values."""
    return _with_values(jax.tree.leaves(models, is_leaf=_is_variable))


def _with_values(nodes: Sequence[Any]) -> list[VariableAndValue]:
    return [(x, x.get_raw_value()) for x in nodes if _is_variable(x)]


def shape_of(x: Array) -> jax.ShapeDtypeStruct:
    """What a program depends on in an array, which holds no memory."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def array_like(x: Array | np.ndarray, like: jax.ShapeDtypeStruct, *, donate: bool) -> Array:
    """``x`` in dtype and sharding of ``like``: ``x`` itself where it has these already.

    ``donate``: whether the memory of ``x`` is freed where it has to be copied.
    """
    if not isinstance(x, jax.Array):
        assert like.sharding is not None
        return put(x.astype(like.dtype), like.sharding)
    cast = x if x.dtype == like.dtype else x.astype(like.dtype)
    if cast is not x and donate:
        x.delete()
    if cast.sharding == like.sharding:
        return cast
    return jax.device_put(cast, like.sharding, donate=donate or cast is not x)


def _arrays_like(
    arrays: list[Any], likes: Sequence[jax.ShapeDtypeStruct], *, donate: bool
) -> list[Array]:
    """`array_like` of each; ``arrays`` is emptied.

    One by one where that frees memory in between. Otherwise arrays that are where they must be are
    cast by one program: a call for each takes the host longer than the device.
    """
    if not donate:
        arrays[:] = map(_copy_on_device, arrays, likes)
        pairs = enumerate(zip(arrays, likes, strict=True))
        cast = [i for i, (x, like) in pairs if _is_cast_alone(x, like)]
        if cast:
            dtypes = tuple(likes[i].dtype for i in cast)
            for i, x in zip(cast, _cast(tuple(arrays[i] for i in cast), dtypes), strict=True):
                arrays[i] = x
    arrays.reverse()
    return [array_like(arrays.pop(), like, donate=donate) for like in likes]


def _copy_on_device(x: Any, like: jax.ShapeDtypeStruct) -> Any:
    """The copy of a replicated ``x`` that the one device of ``like`` has; else ``x``.

    `jax.device_put` finds it too, and takes the host several times as long.
    """
    if not isinstance(like.sharding, SingleDeviceSharding) or not isinstance(x, jax.Array):
        return x
    if isinstance(x.sharding, SingleDeviceSharding) or not x.is_fully_replicated:
        return x
    device = like.sharding.device_set
    return next((shard.data for shard in x.addressable_shards if shard.device in device), x)


def _is_cast_alone(x: Any, like: jax.ShapeDtypeStruct) -> bool:
    return isinstance(x, jax.Array) and x.dtype != like.dtype and x.sharding == like.sharding


@functools.partial(jax.jit, static_argnames="dtypes")
def _cast(arrays: tuple[Array, ...], dtypes: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))
