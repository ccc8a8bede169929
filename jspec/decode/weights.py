"""New weights for a model that decodes: matched by name, in its dtypes and shardings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.decode.on_mesh import mesh_model
from jspec.decode.state import Models
from jspec.sharding import put
from jspec.typing import Array, Model


def matched_arrays(model: Model, weights: Any) -> list[Any]:
    """The arrays of ``weights`` in the order of the leaves of ``model``; none is copied.

    Names decide, so that a model, an `nnx.State`, a nested dict and any pytree of the model's
    structure serve, and for a model on a mesh also those of the model that was sharded. What
    ``weights`` may lack are variables that are no `nnx.Param`, which the model keeps.

    Raises `ValueError` for a weight that is missing, unknown, or of another shape or kind.
    """
    nodes, replacements = _named_nodes(model), _named_nodes(weights)
    if mesh_model(model) is not None and not isinstance(weights, type(model)):
        replacements = {f"model.{name}": node for name, node in replacements.items()}
    if unknown := sorted(replacements.keys() - nodes.keys()):
        raise ValueError(
            f"the model has no weight {unknown[0]!r}; pass weights of its own structure, such as "
            f"nnx.state(model), which has {', '.join(list(nodes)[:3])}, ..."
        )
    arrays = []
    for name, node in nodes.items():
        if name not in replacements and (
            not isinstance(node, nnx.Variable) or isinstance(node, nnx.Param)
        ):
            raise ValueError(f"the weight {name!r} is missing; pass all of the model's")
        replacement = replacements.get(name, node)
        old, new = jax.tree.leaves(node), jax.tree.leaves(replacement)
        if len(old) != len(new) or not all(map(_serves, new, old)):
            raise ValueError(
                f"the weight {name!r} is {_shown(new)}, and that of the model {_shown(old)}; pass "
                "one of that shape, plain or quantised as the model has it"
            )
        arrays += new
    return arrays


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _named_nodes(tree: Any) -> dict[str, Any]:
    """Variables of Flax, and the arrays that are in none, by name."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_is_variable)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in nodes}


def _serves(new: Any, old: Any) -> bool:
    """Whether ``new`` has the shape of ``old``, and a dtype that can be cast to its dtype."""
    if not isinstance(new, jax.Array | np.ndarray) or new.shape != old.shape:
        return False
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in (new, old))
    return new.dtype == old.dtype or all(floats)


def _shown(arrays: list[Any]) -> str:
    types = (f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x) for x in arrays)
    return f"{', '.join(types)}"[:200]


def variables_of(models: Models) -> list[tuple[nnx.Variable, Any]]:
    """Variables of Flax modules, whose values a trainer replaces in place, with their values."""
    nodes = jax.tree.leaves((models.target, models.draft), is_leaf=_is_variable)
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
