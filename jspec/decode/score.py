"""How likely a model finds given texts: log-probabilities of their tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.cache.layout import layouts_of
from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.exact import check_exact
from jspec.decode.on_mesh import mesh_model
from jspec.decode.prefill import padded, rounded_capacity
from jspec.decode.requests import check_requests
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.dispatch import Backends
from jspec.policies.attend import dense_attend
from jspec.typing import Array, Model

CHUNK = 64  # tokens a row whose logits are in memory at once


def score(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    backends: Mapping[str, str] = Backends(),
    exact: bool = False,
) -> list[np.ndarray]:
    """Log-probability of every token of ``texts`` behind the first, given those before it.

    ``texts`` are token ids, a ragged batch; for each a float32 array shorter by one. The law is the
    model's own, at temperature 1 and without filters, in natural logarithms. Costs a prefill.
    ``exact``: by the logits of ``generate(exact=True)``. Raises `ValueError` as
    `jspec.start_decoding` does.
    """
    if not texts:
        return []
    if mesh_model(model) is not None:
        raise ValueError(
            "score takes logits of the whole vocabulary, and this model shares it among devices; "
            "pass one that is not on a mesh of its own"
        )
    models, one = Models(model), [SamplingParams(max_new_tokens=1)] * len(texts)
    check_requests(models, [text[-1:] for text in texts], one)
    # A text of n tokens needs the context of a prompt of n - 1 and one new token.
    check_requests(models, [text[:-1] or text for text in texts], one)
    config = StepConfig(0, NoDraft(), backends, exact=exact)
    if exact:
        check_exact(model, config.keeps)
    capacity = rounded_capacity(max(map(len, texts)))
    tokens, lengths = padded(texts, capacity)
    layouts = layouts_of(model.config.layers, capacity, CHUNK, rings=not exact)
    cache = Cache.create(model.config.layers, layouts, len(texts), model.dtype)
    found = []
    for begin in range(0, int(lengths.max()) - 1, CHUNK):
        index = begin + np.arange(CHUNK)
        positions = np.where(index < (lengths - 1)[:, None], index, -1).astype(np.int32)
        piece = tokens[:, begin : begin + CHUNK]
        following = np.pad(tokens[:, begin + 1 : begin + 1 + CHUNK], ((0, 0), (0, 1)))[:, :CHUNK]
        cache, part = _score_chunk(model, cache, piece, positions, following, config)
        found.append(np.asarray(part))
    rows = np.concatenate(found, axis=1) if found else np.zeros((len(texts), 0), np.float32)
    return [row[: length - 1] for row, length in zip(rows, lengths, strict=True)]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _score_chunk(
    model: Model,
    cache: Cache,
    tokens: Array,
    positions: Array,
    following: Array,
    config: StepConfig,
) -> tuple[Cache, Array]:
    """Append ``tokens [B, T]``; log-probabilities ``[B, T]`` of the tokens that follow them."""
    with config.of_target():
        attend = dense_attend(positions, backends=config.of_verification)
        hidden, cache = model(tokens, positions, attend, cache)
        logits = model.logits(hidden)
    law = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return cache, jnp.take_along_axis(law, following[..., None], axis=-1)[..., 0]
