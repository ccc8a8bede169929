"""Decoding with a model that lies on a mesh of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax

from jspec.cache import Layout
from jspec.sharding import with_auto_axes
from jspec.typing import Model

if TYPE_CHECKING:
    from jspec.decode.settings import StepConfig
    from jspec.decode.state import Models


class MeshModel(Model, Protocol):
    """A `Model` that runs on a mesh of its own, such as `jspec.helix.Sharded`.

    What it is handed has the arrays of all devices; each device runs the same code on its part.
    """

    def over_mesh(self, function: Callable[..., Any], *arguments: Any, like: Any) -> Any:
        """``function(*arguments)`` on every device; ``like``: arrays in the structure of its
        results."""
        ...

    def layouts(self, capacity: int) -> tuple[Layout, ...]:
        """The layout of each layer's cache with room for ``capacity`` positions."""
        ...

    def placing(self, name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
        """Where an array of the state lies, as `jspec.start_decoding` takes it."""
        ...

    def placed(self, models: Models) -> Models:
        """``models`` with what a policy takes on the mesh, of which this one is the target."""
        ...

    def check(self, config: StepConfig) -> None:
        """Raise `ValueError` for a config whose steps cannot run on the mesh."""
        ...


def mesh_model(model: Model) -> MeshModel | None:
    """``model`` where it is on a mesh of its own, else None."""
    return cast(MeshModel, model) if hasattr(model, "over_mesh") else None


def on_mesh_of(
    model: Model, config: StepConfig, function: Callable[..., Any], *arguments: Any, like: Any
) -> Any:
    """``function(*arguments)`` on the mesh of ``model``, for steps of ``config``.

    As `jspec.sharding.with_auto_axes` for a model that has no mesh of its own.
    """
    sharded = mesh_model(model)
    if sharded is None:
        return with_auto_axes(function, *arguments, like=like)
    sharded.check(config)
    return sharded.over_mesh(function, *arguments, like=like)
