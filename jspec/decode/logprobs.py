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
FUSED_HALVINGS = 3  # of a sum in one kernel: with 4 each term would be computed 16 times

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
            minus infinity. A greedy token has log-probability 0. At temperature 1, without filters
            and processors, they are those of the model.
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
    (total,) = vocabulary.sum(_sums_by_halves(jnp.exp(logits - highest[..., None])))
    chosen = vocabulary.of_tokens(logits, tokens)
    return _scores(vocabulary, logits, chosen, count, highest, jnp.log(total))


def _scores(
    vocabulary: Vocabulary,
    logits: Array,
    chosen: Array,
    count: int,
    highest: Array,
    log_total: Array,
) -> TokenScores:
    """Of tokens with the logits ``chosen [B, T]``, and of the likeliest of ``logits [B, T, V]``.

    ``highest``, ``log_total [B, T]``: the largest logit, and the logarithm of the sum of
    ``exp(logits - highest)``.
    """
    top, top_tokens = vocabulary.top(logits, count)
    top = top - highest[..., None] - log_total[..., None]
    return TokenScores(chosen - highest - log_total, top_tokens, top)


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
    tokens, logits = jnp.maximum(tokens, 0), logits.astype(jnp.float32)
    vocabulary, settings = Vocabulary(processed.shape[-1], axes), settings_of(state.sampling)
    is_token = vocabulary.ids[None, None] == tokens[..., None]
    if state.mode == "greedy":
        model, zeros = token_scores(logits, tokens, count, axes), jnp.zeros(tokens.shape)
        certain = jnp.where(is_token, zeros[..., None], -jnp.inf)
        sampling = _scores(vocabulary, certain, zeros, count, zeros, zeros)
        return Logprobs(model, sampling, jnp.ones_like(tokens))
    processed = cleaned(processed)
    least = jnp.full(tokens.shape, -jnp.inf)
    if state.mode == "filtered":
        least = smallest_kept(processed, settings, vocabulary)
    # Rates have 16 bits; at temperature 1 the factor is 1, so that the bits are the model's.
    factors = jnp.where(state.sampling.temperature == 1, 1, settings.rate * np.float32(np.log(2)))
    highest = vocabulary.max(logits.max(axis=-1))
    highest_processed = vocabulary.max(processed.max(axis=-1))
    passes = (processed > -jnp.inf) & (processed >= least[..., None])
    passing_counts = vocabulary.sum(passes.sum(axis=-1, dtype=jnp.int32))
    is_certain = (settings.rate[:, None] == 0) | (passing_counts == 0)

    def powers_of(x: Array, is_token: Any) -> Array:
        """Of processed logits ``x [B, T, n]``, the largest of which is 0; -inf without a share."""
        # Differences, as the product of a large logit and a small temperature's rate overflows.
        below = x - highest_processed[..., None]
        powers = below * factors[:, None, None]
        passes = (x > -jnp.inf) & (x >= least[..., None])
        powers = jnp.where(passes, powers, -jnp.inf)
        return jnp.where(is_certain[..., None], jnp.where(is_token, 0.0, -jnp.inf), powers)

    powers = powers_of(processed, is_token)
    sums = _sums_by_halves(jnp.exp(logits - highest[..., None]), jnp.exp(powers))
    of_model, of_sampling = jnp.log(vocabulary.sum(sums))
    chosen = vocabulary.of_tokens(logits, tokens)
    model = _scores(vocabulary, logits, chosen, count, highest, of_model)
    chosen = powers_of(vocabulary.of_tokens(processed, tokens)[..., None], True)[..., 0]
    sampling = _scores(vocabulary, powers, chosen, count, jnp.zeros_like(highest), of_sampling)
    return Logprobs(model, sampling, jnp.where(is_certain, 1, passing_counts))


def _sums_by_halves(*terms: Array) -> Array:
    """The sum of each of ``terms [..., V]`` over the last axis, stacked.

    Its order, unlike that of a reduction, is that of its size alone, so that the bits of a row do
    not depend on its batch. The barriers end a kernel every `FUSED_HALVINGS`: without
    them XLA would compute each partial sum again wherever it is used.
    """
    sums = jnp.stack([_halved(x) for x in terms])
    while sums.shape[-1] > 1:
        sums = _halved(lax.optimization_barrier(sums))
    return sums[..., 0]


def _halved(x: Array) -> Array:
    """``x [..., V]`` after a few halvings: each adds the second half of the last axis to the first
    one."""
    for _ in range(FUSED_HALVINGS):
        if x.shape[-1] > 1:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
            first, second = jnp.split(x, 2, axis=-1)
            x = first + second
    return x
