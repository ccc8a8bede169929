"""A batch of requests: checked, and their settings as arrays."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec.config import SamplingMode, SamplingParams
from jspec.decode.state import Models
from jspec.ops.sample import Sampling
from jspec.typing import Array, ModelShape

MODES: tuple[SamplingMode, ...] = ("greedy", "sampled", "filtered")  # each serves those before it


def one_each(
    params: SamplingParams | Sequence[SamplingParams], batch: int
) -> tuple[SamplingParams, ...]:
    """One `SamplingParams` for each of ``batch`` rows, each with a seed.

    A request without a seed gets one of its own, drawn afresh from the system's randomness.
    """
    if not batch:
        raise ValueError("no prompts were given; pass at least one")
    rows = (params,) * batch if isinstance(params, SamplingParams) else tuple(params)
    if len(rows) != batch:
        raise ValueError(f"got {batch} prompts but {len(rows)} sampling params; pass one or each")
    return tuple(
        dataclasses.replace(row, seed=secrets.randbits(32)) if row.seed is None else row
        for row in rows
    )


def check_request(models: Models, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise `ValueError` where the models cannot serve a request.

    A prompt without tokens, with ids outside the vocabulary, or too long for the context of the
    target or of the draft model.
    """
    _check_for(models.target.config, prompt, params)
    if models.draft is not None:
        try:
            _check_for(models.draft.config, prompt, params)
        except ValueError as error:
            raise ValueError(f"for the draft model: {error}") from None


def _check_for(config: ModelShape, prompt: Sequence[int], params: SamplingParams) -> None:
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


def check_requests(
    models: Models, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> None:
    """`check_request` for each; the error says which."""
    for index, (prompt, row) in enumerate(zip(prompts, params, strict=True)):
        try:
            check_request(models, prompt, row)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None


def mode_of(params: Sequence[SamplingParams]) -> SamplingMode:
    """The least machinery that serves every request of a batch."""
    return strongest([p.mode for p in params])


def strongest(modes: Sequence[SamplingMode]) -> SamplingMode:
    """The one of ``modes`` that serves all of them."""
    return MODES[max(map(MODES.index, modes))]


def sampling_of(params: Sequence[SamplingParams]) -> Sampling:
    """The settings of a batch of requests, which have seeds, as arrays."""

    def column(name: str, dtype) -> Array:
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seeds=column("seed", np.uint32),
    )
