"""Decoding with a model on a mesh of its own, whose devices several processes may share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
from jax.core import Tracer

from jspec.cache import Layout
from jspec.cache.layout import layouts_of
from jspec.decode.settings import StepConfig
from jspec.decode.state import Exact, Models
from jspec.processes import from_first, in_time
from jspec.sharding import Placing, device_sharding, explicit_mesh_sharding, with_auto_axes
from jspec.typing import Model


class MeshModel(Model, Protocol):
    """A `Model` that runs on a mesh of its own, such as `jspec.helix.Sharded`.

    It gets the arrays of all devices; each device runs the same code on its part.
    """

    @property
    def model(self) -> Model:
        """The model that each device runs, with the arrays of all."""
        ...

    @property
    def processes(self) -> int:
        """How many processes have devices of the mesh."""
        ...

    def over_mesh(self, function: Callable[..., Any], *arguments: Any, like: Any) -> Any:
        """``function(*arguments)`` on every device, with its share of the arrays.

        ``like``: arrays in the structure of the results, which say how these are sharded.
        """
        ...

    def layouts(self, capacity: int, gamma: int, longest: int | None = None) -> tuple[Layout, ...]:
        """The layout of each layer's cache with room for ``capacity`` positions.

        ``gamma``: most draft tokens of a step; ``longest`` as `layouts_for` takes it.
        """
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

    def refuses_exact(self, exact: Exact) -> str | None:
        """Why passes on the mesh are not exact at this level, or None."""
        ...

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Options that XLA needs for steps on the mesh."""
        ...


def mesh_model(model: Model) -> MeshModel | None:
    """``model`` if it has a mesh of its own, else None."""
    return cast(MeshModel, model) if hasattr(model, "over_mesh") else None


def is_on_mesh(models: Models) -> bool:
    """Whether ``models`` are on a mesh of the target's own, or on an Explicit one."""
    return mesh_model(models.target) is not None or explicit_mesh_sharding(models) is not None


def placing_of(models: Models) -> Placing:
    """Where arrays lie that are computed with ``models``, as `jspec.start_decoding` takes it.

    As the target's own mesh says, replicated over their Explicit mesh, or on the target's device.
    """
    on_mesh = mesh_model(models.target)
    if on_mesh is not None:
        return on_mesh.placing
    return explicit_mesh_sharding(models) or device_sharding(models.target)


def layouts_for(
    model: Model, capacity: int, gamma: int, longest: int | None = None, *, rings: bool = True
) -> tuple[Layout, ...]:
    """The layout of each layer's cache, with room for ``capacity`` positions, on the model's mesh.

    ``longest``: positions of a row at the end, where the capacity is to grow, else None. ``rings``:
    whether layers with a sliding window have ring layouts, on a single device.
    """
    sharded = mesh_model(model)
    if sharded is None:
        return layouts_of(model.config.layers, capacity, gamma, longest, rings=rings)
    return sharded.layouts(capacity, gamma, longest)


def jit_steps(**settings: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `jax.jit`, for a function of models and more, with the compiler options of their mesh.

    ``settings``: those of `jax.jit`.
    """
    return lambda function: _Jitted(function, settings)


class _Jitted:
    """A jitted function that acts as `jax.jit` for models without compiler options."""

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._plain: Any = jax.jit(function, **settings)
        self._with_options = functools.cache(
            lambda options: jax.jit(function, compiler_options=dict(options), **settings)
        )

    def __call__(self, models: Any, *args: Any, **static: Any) -> Any:
        try:
            return self._jitted(models, args)(models, *args, **static)
        except (RuntimeError, ValueError):
            arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
            if any(not isinstance(x, Tracer) and x.is_deleted() for x in arrays):
                raise ValueError(
                    "this state was donated to an earlier call; continue with the one it returned"
                ) from None
            raise

    def lower(self, models: Any, *args: Any, **static: Any) -> jax.stages.Lowered:
        return self._jitted(models, args).lower(models, *args, **static)

    def clear_cache(self) -> None:
        self._plain.clear_cache()
        self._with_options.cache_clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _jitted(self, models: Any, args: tuple[Any, ...]) -> Any:
        model = mesh_model(Models.of(models).target)
        options = {} if model is None else model.compiler_options
        # A program inside another one is compiled as that one is.
        if not options or any(isinstance(x, Tracer) for x in jax.tree.leaves((models, args))):
            return self._plain
        return self._with_options(tuple(sorted(options.items())))


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


def is_shared(model: Model) -> bool:
    """Whether ``model`` is on devices of several processes."""
    on_mesh = mesh_model(model)
    return on_mesh is not None and on_mesh.processes > 1


def agreed(value: Any) -> Any:
    """The ``value`` of process 0, on all processes that share a model."""
    with in_time():
        return from_first(value)
