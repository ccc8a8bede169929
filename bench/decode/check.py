"""Compares passes with passes of one token each by the reference, the backend ``xla``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode.shapes import part_of
from jspec.cache import Cache
from jspec.decode.state import DecodeState
from jspec.dispatch import Backends, use_backends
from jspec.models.decoder import Decoder
from jspec.policies import Dense, Policy, ScoredPolicy
from jspec.policies.attend import SelectedAttend
from jspec.policies.dense import DENSE, DenseAttend
from jspec.typing import Attend

LAYERS = 2
# Relative to the logits' norm, the mean over the positions of the worst row: a fault shows at all
# positions, while rounding moves a single one by 0.06 where new keys have nearly equal scores.
# Correct passes in bfloat16 are within 0.04, since matmuls round differently for each number of
# rows. Leaving out a block of 128 of 8192 keys gives 0.06 or more, a new key that is left out or
# visible too early 1.3.
TOLERANCE = 0.05
NEW_KEY_SCALE = 6.0  # scale of new keys, so that they matter among thousands of keys
REFERENCE = Backends(attention="xla")
# The reference of passes that read a selection, which they make from the same queries.
SELECTED = Backends(
    REFERENCE,
    gathered_attention="xla",
    hash_encode="xla",
    hash_select="xla",
    hamming_scores="xla",
    collision_scores="xla",
    select="xla",
)
Key = tuple[int, Backends]  # tokens of a pass, and its backends


class Check:
    """Compares passes of a few layers with the reference, on random tokens.

    ``tokens``: of the passes to compare. ``policy``: what they read, with its ``arrays``. The first
    `LAYERS` layers are compared, or only the first layer that selects if the policy scores keys:
    queries of later layers differ by rounding, and their selections among random keys by much more.
    """

    def __init__(
        self,
        model: Decoder,
        context: int,
        tokens: Sequence[int],
        backends: Backends,
        policy: Policy = DENSE,
        arrays: Any = None,
    ):
        self.layers = slice(min(LAYERS, model.config.num_layers))
        if isinstance(policy, ScoredPolicy):
            first = _first_selecting(model, policy)
            self.layers = slice(first, first + 1)
            policy = dataclasses.replace(policy, dense_layers=0)
        self._model = part_of(model, self.layers)
        self._arrays = None if arrays is None else arrays[self.layers]
        self._policy = policy
        self._context, self._longest, self._backends = context, max(tokens), backends
        self._reference = REFERENCE if isinstance(policy, Dense) else SELECTED
        self._keys: list[Key] = [(1, self._reference), *((count, backends) for count in tokens)]

    def lowerings(self, shapes: DecodeState) -> dict[Key, Callable[[], jax.stages.Lowered]]:
        """Functions that lower the programs of the check for a state of these shapes."""
        cache, batch = layers_of(shapes.cache, self.layers), shapes.tokens.shape[0]

        def lower(count: int, backends: Backends) -> jax.stages.Lowered:
            pair = [jax.ShapeDtypeStruct((batch, count), jnp.int32)] * 2
            return _logits.lower(self._model, self._arrays, cache, *pair, backends, self._policy)

        return {key: partial(lower, *key) for key in self._keys}

    def errors(self, state: DecodeState, programs: dict[Key, Any]) -> dict[int, float]:
        """The relative error of the logits by number of tokens: the mean of the worst row.

        Runs on copies of the keys and values of ``state``. NaN where a logit is NaN.
        """
        batch = state.tokens.shape[0]
        vocabulary = self._model.config.vocab_size
        tokens = np.random.default_rng(1).integers(0, vocabulary, (batch, self._longest), np.int32)
        positions = np.broadcast_to(
            self._context + np.arange(self._longest, dtype=np.int32), tokens.shape
        )
        # Copied, because each pass consumes its cache.
        cache, reference_logits = jax.tree.map(jnp.copy, layers_of(state.cache, self.layers)), []
        for index in range(self._longest):
            at = slice(index, index + 1)
            one, cache = programs[1, self._reference](
                self._model, self._arrays, cache, tokens[:, at], positions[:, at]
            )
            reference_logits.append(one)
        del cache
        logits, errors = jnp.concatenate(reference_logits, axis=1), {}
        for count, backends in self._keys[1:]:
            program, cache = programs[count, backends], layers_of(state.cache, self.layers)
            actual, _ = program(
                self._model,
                self._arrays,
                jax.tree.map(jnp.copy, cache),
                tokens[:, :count],
                positions[:, :count],
            )
            errors[count] = float(_distance(actual, logits[:, :count]))
        return errors


def layers_of(cache: Cache, layers: slice) -> Cache:
    """Some layers of a cache."""
    return dataclasses.replace(
        cache,
        columns=cache.columns[layers],
        specs=cache.specs[layers],
        layouts=cache.layouts[layers],
        pages=cache.pages[layers],
    )


def counted(layers: slice) -> str:
    """The number of compared layers in words, for a row's ``checked``."""
    count = layers.stop - (layers.start or 0)
    return "1 layer" if count == 1 else f"{count} layers"


def _first_selecting(model: Decoder, policy: ScoredPolicy) -> int:
    """The first layer that selects; `ValueError` where none does."""
    for layer, spec in enumerate(model.config.layers):
        if spec.window is None and layer >= policy.dense_layers:
            return layer
    raise ValueError(
        f"{policy} selects in none of {model.config.num_layers} layers; time more of them"
    )


@partial(jax.jit, static_argnames=("backends", "policy"), donate_argnames="cache")
def _logits(
    model: Decoder,
    arrays: Any,
    cache: Cache,
    tokens: Any,
    positions: Any,
    backends: Backends,
    policy: Policy,
) -> tuple[jax.Array, Cache]:
    """Logits ``[B, T, V]`` of a pass that appends ``tokens [B, T]``, and the updated cache."""
    if isinstance(policy, Dense):
        inner = DenseAttend(positions)
    else:
        inner = SelectedAttend(
            *(positions, positions[:, 0], positions.shape[1]),
            policy=policy,
            policy_params=arrays,
        )

    class ScaledKeys(Attend):
        def __call__(self, layer, q, k, v, cache, /, **rest: Any) -> Any:
            return inner(layer, q, jnp.asarray(NEW_KEY_SCALE, k.dtype) * k, v, cache, **rest)

    with use_backends(backends):
        hidden, cache = model(tokens, positions, ScaledKeys(), cache)
        return model.logits(hidden), cache


@jax.jit
def _distance(actual: jax.Array, expected: jax.Array) -> jax.Array:
    distances = jnp.linalg.norm(actual - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)
    return distances.mean(axis=1).max()
