"""A pass of a prefill over a piece of each prompt, and the sizes of pieces."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.decode.draft import TargetPass
from jspec.decode.logprobs import Logprobs, scores_of_hidden
from jspec.decode.on_mesh import mesh_model, on_mesh_of
from jspec.decode.settings import StepConfig
from jspec.decode.state import FlatModels, Models, PromptRecord, vocabulary_axes
from jspec.dispatch import use_backends
from jspec.models.experts import recorded_experts, routing_shape, stacked_experts
from jspec.policies.collect import run_prompt
from jspec.policies.dense import DenseAttend
from jspec.policies.policy import with_pages
from jspec.typing import Array

SHORTEST_PASS = 16  # tokens per row of the smallest prefill pass: fewer take as long
BUSY_PASS = 128  # tokens of a pass: shorter ones take about as long as reading the weights does


@jax.jit(
    static_argnames=("config", "size", "selects", "prompt_logprobs", "routed_experts"),
    donate_argnames=("cache", "drafter_state"),
)
def prefill_chunk(
    models: Models | FlatModels,
    cache: Cache,
    drafter_state: Any,
    tokens: Array,
    begin: Array,
    config: StepConfig,
    size: int,
    selects: bool = False,
    prompt_logprobs: int | None = None,
    routed_experts: bool = False,
) -> tuple[Cache, Any, PromptRecord]:
    """Append the ``size`` prompt tokens from position ``begin`` on, up to the cache's lengths.

    ``tokens`` int32 ``[B, S]``: the prompts, whose lengths are those of the cache, and stay.
    ``begin``: int32, of all rows or ``[B]``. ``selects``: whether a row's last query of this pass
    selects what a guided draft reads, as that of the prompt's last piece must. Cache and drafter's
    state are donated, and returned with the tokens.

    ``prompt_logprobs``: how many of the likeliest tokens to score with each prompt token that
    follows one of the ``size``, None for no scores. ``routed_experts``: whether to record the
    experts of these. The record has arrays ``[B, size, ...]``.
    """

    def piece(models: Models, cache: Cache, drafter_state: Any, tokens: Array, begin: Array):
        lengths = cache.lengths
        before, after = jnp.minimum(begin, lengths), jnp.minimum(begin + size, lengths)
        positions = begin.reshape(-1, 1) + jnp.arange(size, dtype=jnp.int32)[None]
        positions = jnp.where(positions < after[:, None], positions, -1)
        index = jnp.minimum(jnp.maximum(positions, 0), tokens.shape[1] - 1)
        new = jnp.where(positions >= 0, jnp.take_along_axis(tokens, index, axis=1), -1)
        policy, params = config.cache_policy, models.policy
        guided, target_pass = config.draft.collect_policy if selects else None, {}
        with use_backends(config.of_prefill), recorded_experts() as experts:
            if guided is None:
                attend = DenseAttend(positions, policy=policy, policy_params=params)
                hidden, cache = models.target(new, positions, attend, cache)
            else:
                context_len = jnp.maximum(after - (config.gamma + 1), 0)
                hidden, cache, collected = run_prompt(
                    *(models.target, new, positions, cache, context_len),
                    policy=guided,
                    policy_params=params,
                )
                target_pass = {"target_pass": TargetPass(positions, hidden, collected)}
            scores = None
            if prompt_logprobs is not None:
                next_index = jnp.minimum(index + 1, tokens.shape[1] - 1)
                following = jnp.take_along_axis(tokens, next_index, axis=1)
                axes = vocabulary_axes(models.target)
                scores = scores_of_hidden(
                    *(models.target, hidden, following, prompt_logprobs, axes)
                )
        cache = with_pages(policy, params, cache, before, after, size)
        drafter_state = config.draft.sync(models, drafter_state, tokens, after, size, **target_pass)
        record = PromptRecord(scores, stacked_experts(experts, new) if routed_experts else None)
        return cache, drafter_state, record

    models = Models.of(models)
    with config.of_models():
        args = (models, cache, drafter_state, tokens, begin)
        like = empty_record(models, (len(tokens), size), prompt_logprobs, routed_experts)
        return on_mesh_of(models.target, config, piece, *args, like=(cache, drafter_state, like))


def empty_record(
    models: Models, shape: tuple[int, int], prompt_logprobs: int | None, routed_experts: bool
) -> PromptRecord:
    """Zeros of numpy for tokens ``[*shape]``, in the structure that `prefill_chunk` returns."""
    count, routing = prompt_logprobs, routing_shape(models.target.config)
    return PromptRecord(
        None if count is None else Logprobs.empty(shape, count).model,
        np.zeros((*shape, *routing), np.int32) if routed_experts and routing else None,
    )


@jax.jit(static_argnames=("config", "batch", "capacity"))
def init_drafter_state(
    models: Models | FlatModels, config: StepConfig, batch: int, capacity: int
) -> Any:
    """The drafter's state before any prompt, of ``batch`` rows of ``capacity`` positions."""
    models = Models.of(models)

    def init(models: Models) -> Any:
        drafter_state = config.draft.init(models, batch, capacity, config.gamma)
        for shape in map(np.shape, jax.tree.leaves(drafter_state)):
            if shape[:1] != (batch,):
                raise ValueError(
                    f"{type(config.draft).__name__}.init returned an array of shape {shape}; each "
                    f"must begin with the batch axis, here {batch} rows"
                )
        return drafter_state

    if mesh_model(models.target) is None:
        return init(models)
    return on_mesh_of(models.target, config, init, models, like=jax.eval_shape(init, models))


def pass_sizes(max_tokens: int, least: int = SHORTEST_PASS) -> list[int]:
    """Tokens per row of prefill passes, ascending to ``max_tokens``, none of them below ``least``.

    Each is a fourth of the next one, so that few programs serve prompts of all lengths.
    """
    sizes = [max_tokens]
    while sizes[0] >= 4 * least:
        sizes.insert(0, sizes[0] // 4)
    return sizes


def pass_size(left: int, sizes: Sequence[int]) -> int:
    """Tokens of the next pass over a prompt of which so many are ``left``, padding included.

    Two passes in place of one that is half padding, where they are long enough to save time.
    """
    at = bisect.bisect_left(sizes[:-1], left)
    size, shorter = sizes[at], sizes[max(at - 1, 0)]
    return shorter if size > BUSY_PASS and left <= 2 * shorter else size


def passes_over(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and size of each pass over a prompt of ``total`` tokens."""
    begin = 0
    while begin < total:
        yield begin, (size := pass_size(total - begin, sizes))
        begin += size


def default_chunk(batch: int) -> int:
    """Prompt tokens per row and prefill pass: they fill the device, and fit its memory."""
    if jax.default_backend() == "cpu":
        return 256
    return max(256, min(2048, 16384 // batch))
