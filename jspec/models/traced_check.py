"""Checks of a user's model: one pass of it is traced, and its calls of attend are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer  # pyright: ignore[reportMissingImports]

from jspec.models.decoder import Decoder
from jspec.ops.append import QKRope
from jspec.typing import Array, Attend, Model

BATCH, TOKENS = 2, 3  # of the pass: two sizes, so that swapped axes are noticed


def check_traced(name: str, model: Model) -> None:
    """Trace a pass of a model that jspec does not know, and check what it does.

    JAX keeps the trace for the next check of the model. A `Decoder` is not traced, nor is a model
    on a mesh, which passes the shapes of a device.

    Args:
        name: what errors call the model.
        model: has the members of `jspec.Model`.

    Raises:
        TypeError: the model or one of its calls of ``attend`` has arguments or results of another
            kind.
        ValueError: they have other shapes or dtypes than ``model.config`` says, or layers are
            skipped or repeated.
    """
    is_on_mesh = getattr(model, "helix", None) is not None
    if isinstance(model, Decoder) or is_on_mesh:
        return
    try:
        jax.eval_shape(_passed, model)
    except _ModelError as error:
        raise error.kind(f"{name} of type {type(model).__name__}: {error}") from None


class _ModelError(Exception):
    """An error to raise as ``kind``."""

    def __init__(self, message: str, kind: type[Exception] = ValueError) -> None:
        super().__init__(message)
        self.kind = kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _PassedLayers:
    """Takes the place of the cache, and counts the layers that attended."""

    array: Array
    count: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class _CheckedAttend(Attend):
    """Checks arguments, and returns zeros for an output."""

    model: Model

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        cache: Any,
        /,
        *,
        sinks: Array | None = None,
        up: Array | None = None,
        qk_rope: QKRope | None = None,
        next_queries: Callable[[], Array] | None = None,
    ) -> tuple[Array, Any]:
        layers = self.model.config.layers
        if isinstance(layer, Tracer) or not isinstance(layer, (int, np.integer)):
            raise _ModelError(
                f"attend got {_kind(layer)} for its layer, which must be a Python int; layers in "
                "jax.lax.scan, nnx.scan or nn.scan cannot run: loop over slices of the stacked "
                "parameters (docs/models.md)",
                TypeError,
            )
        if not isinstance(cache, _PassedLayers):
            raise _ModelError(
                f"attend of layer {layer} got {_kind(cache)} for its cache; pass the one "
                "that the model or the last call of attend got",
                TypeError,
            )
        if layer != cache.count or layer >= len(layers):
            raise _ModelError(
                f"attend was called for layer {layer} with the cache that {cache.count} layer(s) "
                f"extended; call it once for each layer from 0 to {len(layers) - 1}, in order, and "
                "pass on the cache that it returned"
            )
        spec, heads = layers[layer], q.shape[2] if q.ndim == 4 else 0
        keys = (BATCH, TOKENS, spec.kv_heads, spec.key_size)
        values = (*keys[:3], spec.value_size)
        self._check(layer, "k", k, keys)
        self._check(layer, "q", q, (*keys[:2], heads, spec.key_size))
        if heads < 1 or heads % spec.kv_heads:
            raise _ModelError(
                f"q of layer {layer} has {heads} heads; it must be a multiple of "
                f"kv_heads={spec.kv_heads} in config.layers[{layer}]"
            )
        if (v is None) != spec.values_in_keys:
            raise _ModelError(
                f"v of layer {layer} is {'None' if v is None else 'an array'}, and "
                f"config.layers[{layer}] says values_in_keys={spec.values_in_keys}"
            )
        if v is not None:
            self._check(layer, "v", v, values)
        size = spec.value_size if up is None else up.shape[-1]
        out = jnp.zeros((*q.shape[:3], size), q.dtype)
        return out, _PassedLayers(cache.array, cache.count + 1)

    def _check(self, layer: int, name: str, x: Array, shape: tuple[int, ...]) -> None:
        dtype = jnp.dtype(self.model.dtype)
        if x.shape != shape:
            raise _ModelError(
                f"{name} of layer {layer} is {x.shape}; config.layers[{layer}] says {shape} for "
                f"{BATCH} rows of {TOKENS} tokens"
            )
        if name != "q" and x.dtype != dtype:
            raise _ModelError(f"{name} of layer {layer} is {x.dtype}; model.dtype is {dtype}")


def _kind(value: Any) -> str:
    """What an argument or a result is."""
    if isinstance(value, Tracer):
        return f"a traced {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def _passed(model: Model) -> Array:
    """A pass of ``model``, and its logits."""
    tokens = jnp.zeros((BATCH, TOKENS), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), tokens.shape)
    cache = _PassedLayers(jnp.zeros((), jnp.int32), 0)
    result: Any = model(tokens, positions, _CheckedAttend(model), cache)
    if not isinstance(result, tuple) or len(result) != 2:
        raise _ModelError(f"it returns {_kind(result)}; it must return (hidden, cache)", TypeError)
    hidden, cache = result
    layers = len(model.config.layers)
    if not isinstance(cache, _PassedLayers) or cache.count != layers:
        counted = cache.count if isinstance(cache, _PassedLayers) else "no"
        raise _ModelError(
            f"the cache that it returns was extended by {counted} layer(s), and config.layers has "
            f"{layers}; call attend once a layer, and return the last cache"
        )
    if getattr(hidden, "ndim", 0) != 3 or hidden.shape[:2] != tokens.shape:
        raise _ModelError(
            f"hidden states are {getattr(hidden, 'shape', _kind(hidden))} for tokens "
            f"{tokens.shape}; they must be [B, T, D]"
        )
    logits = model.logits(hidden)
    expected = (*tokens.shape, model.config.vocab_size)
    if logits.shape != expected or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise _ModelError(
            f"logits are {logits.dtype} {logits.shape}; config.vocab_size says {expected}, and "
            "they must be floats"
        )
    return logits
