"""The state that a speculative step takes and returns, and how a batch of requests starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import KVCache, dense
from jspec.config import SamplingMode, SamplingParams
from jspec.ops.sample import Sampling
from jspec.typing import Array, Model, ModelShape

CAPACITY_STEP = 256  # capacities are rounded up to this, so that close ones share a program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What the last step did.

    ``drafted``, ``accepted``, ``committed`` int32 ``[B]`` (draft tokens behind a stop token count
    in none of them); ``tokens`` int32 ``[B, gamma + 1]``: the committed block, -1 behind its end.
    """

    drafted: Array
    accepted: Array
    committed: Array
    tokens: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of requests in the middle of decoding.

    ``cache``: the target's; it holds every known token of a row but the last, which the next step
    feeds. ``tokens`` int32 ``[B, S]``: prompt and committed tokens, -1 behind them. ``limits``
    int32 ``[B]``: most tokens a row may know, prompt included. ``done`` bool ``[B]``. ``sampling``:
    settings. ``stop_tokens`` int32 ``[B, M]``, -1 for none. ``draft_limits`` int32
    ``[B]``. ``draft_cache``: a separate draft model's, or None.
    """

    cache: KVCache
    tokens: Array
    limits: Array
    done: Array
    sampling: Sampling
    stop_tokens: Array
    draft_limits: Array
    draft_cache: KVCache | None = None

    @property
    def lengths(self) -> Array:
        """Known tokens of each row, prompt included, int32 ``[B]``."""
        return self.cache.lengths + 1


def least_sampling(params: Sequence[SamplingParams]) -> SamplingMode:
    """The least machinery that serves every request of a batch."""
    kinds = {p.sampling for p in params}
    return next(k for k in ("filtered", "sampled", "greedy") if k in kinds)


def start(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    draft_model: Model | None = None,
    capacity: int | None = None,
    chunk: int | None = None,
    attention: str | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    run: Callable[..., Any] | None = None,
) -> DecodeState:
    """Check a batch of requests and prefill their prompts in chunks of ``chunk`` tokens a row.

    ``capacity`` (slots a row) defaults to what the longest request needs. ``on_prefill(done,
    total)`` hears of prompt tokens a row; ``run(function, *args, **static)`` may stand between and
    the jitted prefill. Raises `ValueError` where a prompt is empty, holds ids outside the
    vocabulary, or would outgrow the capacity or the model's context.
    """
    params = per_row(params, len(prompts))
    _check(model, prompts, params, draft_model)
    needed = max(len(p) + s.max_new_tokens for p, s in zip(prompts, params, strict=True))
    capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP if capacity is None else capacity
    if needed > capacity:
        raise ValueError(
            f"a request needs {needed} slots (prompt and max_new_tokens) but capacity={capacity}; "
            "raise the capacity or lower max_new_tokens"
        )
    chunk = _default_chunk(len(prompts)) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"a prefill chunk of {chunk} tokens must be at least 1")
    tokens, lengths = _padded(prompts, capacity)
    fill = {"chunk": chunk, "attention": attention, "on_prefill": on_prefill, "run": run}
    cache = _prefill(model, tokens, lengths, **fill)
    draft_cache = None if draft_model is None else _prefill(draft_model, tokens, lengths, **fill)
    limits = lengths + np.array([p.max_new_tokens for p in params], np.int32)
    stops = [(*p.stop_tokens, *model.config.stop_tokens) for p in params]
    no_limit = np.iinfo(np.int32).max
    return DecodeState(
        cache=cache,
        tokens=jnp.asarray(tokens),
        limits=jnp.asarray(limits),
        done=jnp.zeros((len(prompts),), bool),
        sampling=sampling_of(params),
        stop_tokens=jnp.asarray(_padded(stops, max(1, *map(len, stops)))[0]),
        draft_limits=jnp.asarray(
            [no_limit if p.draft_limit is None else p.draft_limit for p in params], jnp.int32
        ),
        draft_cache=draft_cache,
    )


def per_row(
    params: SamplingParams | Sequence[SamplingParams], batch: int
) -> tuple[SamplingParams, ...]:
    """One `SamplingParams` for each of ``batch`` rows."""
    if not batch:
        raise ValueError("no prompts were given; pass at least one")
    if isinstance(params, SamplingParams):
        return (params,) * batch
    if len(params) != batch:
        raise ValueError(f"got {batch} prompts but {len(params)} sampling params; pass one or each")
    return tuple(params)


def check_request(config: ModelShape, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise `ValueError` where a model cannot serve a request: no tokens, foreign ids, too long."""
    if not len(prompt):
        raise ValueError("the prompt is empty; give it at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"the prompt holds token {low if low < 0 else high}, outside the vocabulary "
            f"0..{config.vocab_size - 1}"
        )
    if len(prompt) + params.max_new_tokens > config.max_context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which with max_new_tokens="
            f"{params.max_new_tokens} exceeds the context of {config.max_context}; shorten the "
            "prompt, lower max_new_tokens or raise the context"
        )


def _check(model: Model, prompts, params, draft_model: Model | None) -> None:
    config = model.config
    for index, (prompt, row) in enumerate(zip(prompts, params, strict=True)):
        try:
            check_request(config, prompt, row)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    if draft_model is not None and draft_model.config.vocab_size != config.vocab_size:
        raise ValueError(
            f"the draft model's vocabulary of {draft_model.config.vocab_size} differs from the "
            f"target's {config.vocab_size}; they must be the same"
        )


def _default_chunk(batch: int) -> int:
    """Prefill tokens a row: enough work to fill the device, and few enough to keep memory low."""
    if jax.default_backend() == "cpu":
        return 256
    return max(256, min(2048, 16384 // batch))


def _padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as int32 ``[B, width]`` padded with -1, and their lengths ``[B]``."""
    out = np.full((len(rows), width), -1, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = np.asarray(row, np.int32)
    return out, np.array([len(row) for row in rows], np.int32)


def sampling_of(params: Sequence[SamplingParams]) -> Sampling:
    """The settings of a batch of requests, as arrays."""

    def column(name: str, dtype) -> Array:
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seeds=column("seed", np.uint32),
    )


@jax.jit(static_argnames="attention", donate_argnames="cache")
def prefill_chunk(
    model: Model, cache: KVCache, tokens: Array, positions: Array, attention: str | None
) -> KVCache:
    """Append ``tokens [B, T]`` at ``positions [B, T]``, -1 for padding; lengths stay."""
    _, cache = model(tokens, positions, dense(positions, attention), cache)
    return cache


def _prefill(model, tokens, lengths, *, chunk, attention, on_prefill, run) -> KVCache:
    """Cache every prompt token but the last of each row, which the first step feeds."""
    batch, capacity = tokens.shape
    dtypes = (leaf.dtype for leaf in jax.tree.leaves(model))
    dtype = next(d for d in dtypes if jnp.issubdtype(d, jnp.floating))
    cache = KVCache.create(model.config, batch, capacity, dtype)
    total = int(lengths.max()) - 1
    # A power of two up to the chunk, so that short prompts pay little and share programs.
    chunk = min(chunk, 1 << max(total - 1, 0).bit_length())
    for begin in range(0, total, chunk):
        index = begin + np.arange(chunk)
        positions = np.where(index < (lengths - 1)[:, None], index, -1).astype(np.int32)
        piece = np.full((batch, chunk), -1, np.int32)
        piece[:, : min(chunk, capacity - begin)] = tokens[:, begin : begin + chunk]
        args = (model, cache, jnp.asarray(piece), jnp.asarray(positions))
        call = prefill_chunk if run is None else (lambda *a, **s: run(prefill_chunk, *a, **s))
        cache = call(*args, attention=attention)
        if on_prefill is not None:
            jax.block_until_ready(cache)
            on_prefill(min(begin + chunk, total), total)
    return cache.with_lengths(jnp.asarray(lengths - 1))
