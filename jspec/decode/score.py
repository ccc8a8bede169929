"""Log-probabilities that a model gives to the tokens of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from jspec.cache import Cache
from jspec.checks import shown, whole_number
from jspec.config import SamplingParams
from jspec.decode.checks import agreed_params, as_ids, check_exact, check_models, check_requests
from jspec.decode.draft import NoDraft
from jspec.decode.logprobs import CHUNK, Logprobs, TokenScores, scores_of_hidden
from jspec.decode.on_mesh import jit_steps, layouts_for, mesh_model, on_mesh_of
from jspec.decode.prefill import rounded_capacity
from jspec.decode.rows import padded
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models, vocabulary_axes
from jspec.dispatch import Backends
from jspec.policies.dense import DenseAttend
from jspec.sharding import place
from jspec.typing import Array, Model


def score_tokens(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    backends: Mapping[str, str] = Backends(),
    exact: Literal["bits"] | None = None,
) -> list[np.ndarray]:
    """Log-probability of every token of ``texts`` but the first, given the tokens before it.

    The law is the model's own, at temperature 1 and without filters. Costs a prefill. Where several
    processes share the model's devices, all of them must make the same call.

    Args:
        model: The model.
        texts: Token ids of each text, of any lengths.
        backends: Backends of operations by name.
        exact: ``"bits"`` for the logits of ``generate(exact="bits")``.

    Returns:
        For each text a float32 array of natural logarithms, shorter than the text by one.

    Raises:
        ValueError: As `jspec.start_decoding` does, and for ``exact="tokens"``.
    """
    scores = score_top_tokens(model, texts, 0, backends=backends, exact=exact)
    return [score.logprobs for score in scores]


def score_top_tokens(
    model: Model,
    texts: Sequence[Sequence[int]],
    count: int,
    *,
    backends: Mapping[str, str] = Backends(),
    exact: Literal["bits"] | None = None,
) -> list[TokenScores]:
    """`score_tokens`, and the ``count`` likeliest tokens at each position.

    Args:
        model: As in `score_tokens`.
        texts: As in `score_tokens`.
        count: How many of the likeliest tokens to give with each token.
        backends: As in `score_tokens`.
        exact: As in `score_tokens`.

    Returns:
        For each text its `TokenScores`, shorter than the text by one.

    Raises:
        ValueError: As `score_tokens` does.
    """
    models, ids = Models(model), as_ids(texts)
    if not ids:
        return []
    check_models(models)
    if (number := whole_number(count)) is None or not 0 <= number <= model.config.vocab_size:
        raise ValueError(
            f"count={shown(count)} must be a whole number, at most the {model.config.vocab_size} "
            "tokens of the model"
        )
    one = agreed_params(models, ids, SamplingParams(max_new_tokens=1), Backends(backends))
    check_requests(models, [text[-1:] for text in ids], one)
    # A text of n tokens needs the context of a prompt of n - 1 and one new token.
    check_requests(models, [text[:-1] if len(text) > 1 else text for text in ids], one)
    config = StepConfig(0, NoDraft(), backends, exact=exact)
    if config.exact == "tokens":
        raise ValueError(
            'exact="tokens" leaves prompts to an ordinary prefill, which scoring is; pass '
            'exact="bits" or leave exact out'
        )
    if config.exact:
        check_exact(model, config.cache_policy, config.exact)
    capacity = rounded_capacity(max(map(len, ids)))
    tokens, lengths = padded(ids, capacity)
    layouts = layouts_for(model, capacity, CHUNK, rings=not exact)
    on_mesh = mesh_model(model)
    sharding = None if on_mesh is None else on_mesh.placing
    cache = Cache.create(model.config.layers, layouts, len(ids), model.dtype, sharding=sharding)
    cache = place({"cache": cache}, sharding)["cache"]
    chunks: list[TokenScores] = []
    for begin in range(0, int(lengths.max()) - 1, CHUNK):
        index = begin + np.arange(CHUNK)
        positions = np.where(index < (lengths - 1)[:, None], index, -1).astype(np.int32)
        piece = tokens[:, begin : begin + CHUNK]
        following = np.pad(tokens[:, begin + 1 : begin + 1 + CHUNK], ((0, 0), (0, 1)))[:, :CHUNK]
        cache, part = _score_chunk(model, cache, piece, positions, following, config, count)
        chunks.append(jax.tree.map(np.asarray, part))
    if not chunks:
        chunks = [Logprobs.empty((len(ids), 0), count).model]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *chunks)
    return [
        jax.tree.map(lambda x, row=row, end=length - 1: x[row, :end], whole)
        for row, length in enumerate(lengths)
    ]


@jit_steps(static_argnames=("config", "count"), donate_argnames="cache")
def _score_chunk(
    model: Model,
    cache: Cache,
    tokens: Array,
    positions: Array,
    following: Array,
    config: StepConfig,
    count: int,
) -> tuple[Cache, TokenScores]:
    """Append ``tokens [B, T]``; returns the scores of ``following``, ``[B, T, ...]``.

    ``following [B, T]``: the tokens after them.
    """

    def piece(model, cache, tokens, positions, following):
        with config.of_target():
            attend = DenseAttend(positions)
            hidden, cache = model(tokens, positions, attend, cache)
            return cache, scores_of_hidden(
                *(model, hidden, following, count, vocabulary_axes(model))
            )

    like = cache, Logprobs.empty(tokens.shape, count).model
    arguments = (model, cache, tokens, positions, following)
    return on_mesh_of(model, config, piece, *arguments, like=like)
