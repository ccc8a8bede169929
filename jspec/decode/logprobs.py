"""Log-probabilities of tokens, from the logits of the pass that made or scored them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.ops.distribution import cleaned, smallest_kept
from jspec.ops.sample import settings_of
from jspec.ops.vocabulary import Axes, Vocabulary
from jspec.typing import Array, Model

CHUNK = 64  # tokens a row whose logits are in memory at once

if TYPE_CHECKING:
    from jspec.decode.state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Log-probabilities at each of n tokens, natural logarithms.

    Attributes:
        logprobs: float32 ``[n]``, of the tokens.
        top_tokens: int32 ``[n, count]``, the likeliest tokens there, the likeliest first.
        top_logprobs: float32 ``[n, count]``, of these.
    """

    logprobs: Any
    top_tokens: Any
    top_logprobs: Any

    def first(self, n: int) -> TokenScores:
        """Those of the first ``n`` tokens."""
        return jax.tree.map(lambda x: x[:n], self)

    def likeliest(self, count: int) -> TokenScores:
        """With the first ``count`` of the likeliest tokens at each."""
        top = self.top_tokens[:, :count], self.top_logprobs[:, :count]
        return TokenScores(self.logprobs, *top)

    def by_token(self, tokens: Sequence[int]) -> tuple[dict[int, float], ...]:
        """For each of ``tokens`` log-probabilities by token: its own, then those of the likeliest.

        The scores must be numpy arrays.
        """
        chosen = zip(tokens, self.logprobs.tolist(), strict=True)
        likely = zip(self.top_tokens.tolist(), self.top_logprobs.tolist(), strict=True)
        return tuple(
            {token: value} | dict(zip(ids, values, strict=True))
            for (token, value), (ids, values) in zip(chosen, likely, strict=True)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of n generated tokens, from the passes that verified them.

    Attributes:
        model: Under the model's own distribution: at temperature 1, without filters and logits
            processors, as `jspec.score_tokens` gives them.
        sampling: Under the distribution that the token was drawn from: of processed logits, at the
            request's temperature, without what its filters remove, of which the log-probability is
            minus infinity. A greedy token has log-probability 0.
        passing_counts: int32 ``[n]``: tokens that pass the filters; 1 for a greedy request.
    """

    model: TokenScores
    sampling: TokenScores
    passing_counts: Any

    @classmethod
    def empty(cls, shape: tuple[int, ...], count: int) -> Logprobs:
        """Zeros of numpy for tokens ``[*shape]``, with ``count`` likeliest tokens at each."""
        top = np.zeros((*shape, count), np.int32)
        scores = TokenScores(np.zeros(shape, np.float32), top, top.astype(np.float32))
        return cls(scores, scores, np.zeros(shape, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Logprobs], count: int) -> Logprobs:
        """``parts`` one after the other as numpy arrays, each with its first ``count`` tokens."""
        if not parts:
            return cls.empty((0,), count)
        whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        scores = whole.model.likeliest(count), whole.sampling.likeliest(count)
        return cls(*scores, whole.passing_counts)


def token_scores(logits: Array, tokens: Array, count: int, axes: Axes | None) -> TokenScores:
    """Of ``tokens [B, T]`` by ``logits`` float32 ``[B, T, V]``, sharded over ``axes``.

    The bits of a token follow from its own logits alone.
    """
    vocabulary = Vocabulary(logits.shape[-1], axes)
    highest = vocabulary.max(logits.max(axis=-1))
    total = vocabulary.sum(_sum_by_halves(jnp.exp(logits - highest[..., None])))
    log_total = jnp.log(total)
    top, top_tokens = vocabulary.top(logits, count)
    chosen = vocabulary.of_tokens(logits, tokens) - highest - log_total
    return TokenScores(chosen, top_tokens, top - highest[..., None] - log_total[..., None])


def scores_of_hidden(
    model: Model, hidden: Array, tokens: Array, count: int, axes: Axes | None
) -> TokenScores:
    """Of ``tokens [B, T]``, each by the hidden state before it, ``[B, T, D]``.

    ``axes`` as in `token_scores`. Logits of `CHUNK` tokens a row are in memory at once.
    """

    def score(piece: tuple[Array, Array]) -> TokenScores:
        logits = model.logits(piece[0]).astype(jnp.float32)
        return token_scores(logits, piece[1], count, axes)

    batch, size = tokens.shape
    if size <= CHUNK:
        return score((hidden, tokens))
    padding = -size % CHUNK

    def pieces(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(batch, -1, CHUNK, *x.shape[2:]), 0, 1)

    def whole(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :size]

    return jax.tree.map(whole, lax.map(score, (pieces(hidden), pieces(tokens))))


def verified_logprobs(
    state: DecodeState, logits: Array, processed: Array, tokens: Array, axes: Axes | None
) -> Logprobs:
    """Of ``tokens [B, T]``, those that a step committed; others are -1, and get any numbers.

    ``logits [B, T, V]``: the target's; ``processed``: the same after logits processors. ``axes`` as
    in `token_scores`.
    """
    count = state.logprobs
    assert count is not None
    tokens = jnp.maximum(tokens, 0)
    model = token_scores(logits.astype(jnp.float32), tokens, count, axes)
    vocabulary, settings = Vocabulary(processed.shape[-1], axes), settings_of(state.sampling)
    processed = cleaned(processed)
    passes = processed > -jnp.inf
    if state.mode == "filtered":
        passes &= processed >= smallest_kept(processed, settings, vocabulary)[..., None]
    is_token = vocabulary.ids[None, None] == tokens[..., None]
    is_empty = vocabulary.sum(passes.sum(axis=-1, dtype=jnp.int32)) == 0
    is_certain = (settings.rate[:, None] == 0) | is_empty
    passes = jnp.where(is_certain[..., None], is_token, passes)
    # Differences, as the product of a large logit and a small temperature's rate overflows.
    below = processed - vocabulary.max(processed.max(axis=-1))[..., None]
    powers = below * (settings.rate * np.float32(np.log(2)))[:, None, None]
    powers = jnp.where(is_certain[..., None], jnp.zeros_like(powers), powers)
    sampling = token_scores(jnp.where(passes, powers, -jnp.inf), tokens, count, axes)
    return Logprobs(model, sampling, vocabulary.sum(passes.sum(axis=-1, dtype=jnp.int32)))


def _sum_by_halves(x: Array) -> Array:
    """The sum over the last axis. Its order, unlike that of a reduction, is that of its size alone.

    So the bits of a row do not depend on its batch. The barriers keep the halves apart: fused, each
    number of the last one would compute all those before it.
    """
    while x.shape[-1] > 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        first, second = jnp.split(x, 2, axis=-1)
        x = lax.optimization_barrier(first + second)
    return x[..., 0]
