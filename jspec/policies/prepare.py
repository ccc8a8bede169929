"""Parameters of a policy, computed before decoding from a model and the keys of a sample text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, LinearLayout
from jspec.config import token_ids
from jspec.dispatch import Backends, use_backends
from jspec.policies.dense import DenseAttend
from jspec.policies.policy import Policy, check_policy
from jspec.processes import whole
from jspec.typing import Array, Model

CHUNK = 256  # tokens of the sample that the model takes up at once


def prepare_params(
    policy: Policy,
    model: Model,
    tokens: Sequence[int] | None = None,
    *,
    backends: Mapping[str, str] = Backends(),
) -> Any:
    """The parameters of ``policy`` for decoding with ``model``; None where it needs none.

    They are the ``policy_params`` of `jspec.generate`, and ``Models.policy``. Costs a prefill of
    the sample where the policy needs its keys.

    Args:
        policy: The policy.
        model: The target.
        tokens: Token ids of a sample text, of which some thousand suffice; its kind matters little.
        backends: Named backends of operations.

    Raises:
        ValueError: Where the policy needs a sample and there is none, and for a sample that is no
            list of the model's token ids.
    """
    check_policy("policy", policy)
    if tokens is None:
        return policy.prepare(model, None)
    sample = _sample(model, tokens)
    return policy.prepare(model, lambda: _keys_of(model, sample, backends))


def sample_keys(model: Model, tokens: Sequence[int]) -> list[np.ndarray]:
    """Keys of every layer after a sample text, float32 ``[M, K, H]``."""
    return _keys_of(model, _sample(model, tokens), Backends())


def _sample(model: Model, tokens: Any) -> np.ndarray:
    """``tokens`` as int32, all of the model's vocabulary."""
    ids = token_ids("tokens", tokens)
    vocab_size = model.config.vocab_size
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"the sample holds token {max(ids)}, outside the vocabulary 0..{vocab_size - 1}; "
            "encode it with the model's own tokenizer"
        )
    return np.array(ids, np.int32)


def _keys_of(model: Model, tokens: np.ndarray, backends: Mapping[str, str]) -> list[np.ndarray]:
    """Keys of every layer after a text, float32 ``[M, K, H]``."""
    size = -(-len(tokens) // CHUNK) * CHUNK
    if not 1 <= len(tokens) <= model.config.max_context:
        raise ValueError(
            f"a sample of {len(tokens)} tokens must have at least 1, and at most the model's "
            f"context of {model.config.max_context}"
        )
    specs = model.config.layers
    cache = Cache.create(specs, [LinearLayout(size)] * len(specs), 1, model.dtype)
    for begin in range(0, size, CHUNK):
        index = np.arange(begin, begin + CHUNK)
        positions = np.where(index < len(tokens), index, -1).astype(np.int32)[None]
        piece = np.full((1, CHUNK), -1, np.int32)
        piece[0, : len(tokens) - begin] = tokens[begin : begin + CHUNK]
        cache = _chunk(model, cache, jnp.asarray(piece), jnp.asarray(positions), Backends(backends))
    return [
        whole(cache.keys(layer)[0, : len(tokens)]).astype(np.float32) for layer in range(len(specs))
    ]


@functools.partial(jax.jit, static_argnames="backends", donate_argnames="cache")
def _chunk(
    model: Model, cache: Cache, tokens: Array, positions: Array, backends: Backends
) -> Cache:
    with use_backends(backends):
        return model(tokens, positions, DenseAttend(positions), cache)[1]
