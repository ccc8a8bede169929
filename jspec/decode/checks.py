"""Checks of models and requests, and the settings of requests as arrays."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from jspec.config import (
    LayerSpec,
    ModelConfig,
    SamplingMode,
    SamplingParams,
    shown,
    token_ids,
    whole_number,
)
from jspec.decode.on_mesh import is_shared, mesh_model
from jspec.decode.state import Exact, Models
from jspec.dispatch import BackendError
from jspec.models.decoder import Decoder
from jspec.models.experts import routing_shape
from jspec.models.traced_check import check_traced
from jspec.ops.sample import Sampling
from jspec.policies import Policy
from jspec.processes import check_same, digest, from_first, versions
from jspec.triton.attention import DTYPES, MAX_CHANNELS
from jspec.triton.call import refuses_triton
from jspec.typing import Model

# What jspec reads of a model and of its config: see `jspec.Model`.
OF_A_MODEL = ("config", "dtype", "logits", "__call__")
OF_A_CONFIG = ("vocab_size", "layers", "max_context", "stop_tokens")
Prompt = Sequence[int] | np.ndarray
MODES: tuple[SamplingMode, ...] = ("greedy", "sampled", "filtered")  # each serves those before it


def one_each(
    params: SamplingParams | Sequence[SamplingParams], batch: int
) -> tuple[SamplingParams, ...]:
    """One `SamplingParams` for each of ``batch`` rows, each with a seed.

    A request without a seed gets one of its own, drawn afresh from the system's randomness.
    """
    if not batch:
        raise ValueError("no prompts were given; pass at least one")
    one = isinstance(params, SamplingParams)
    if not one and not isinstance(params, Sequence):
        raise TypeError(f"params={shown(params)} must be a SamplingParams, or a list of one each")
    rows = (params,) * batch if one else tuple(params)
    for row in rows:
        if not isinstance(row, SamplingParams):
            raise TypeError(f"params hold {shown(row)}, which is no SamplingParams")
    if len(rows) != batch:
        raise ValueError(f"got {batch} prompts but {len(rows)} sampling params; pass one or each")
    return tuple(
        dataclasses.replace(row, seed=secrets.randbits(32)) if row.seed is None else row
        for row in rows
    )


def agreed_params(
    models: Models,
    prompts: Sequence[np.ndarray],
    params: SamplingParams | Sequence[SamplingParams],
    settings: Any,
) -> tuple[SamplingParams, ...]:
    """`one_each`, with the same seeds on all processes that share the model.

    ``settings``: what else they decode with. Raises `ValueError` on all of them where they made
    different calls.
    """
    rows = one_each(params, len(prompts))
    if not is_shared(models.target):
        return rows
    check_same(
        {
            **versions(),
            "models": digest([model and model.config for model in (models.target, models.draft)]),
            "prompts": digest([prompt.tolist() for prompt in prompts]),
            "sampling params": digest(params),
            "settings": digest(settings),
        }
    )
    seeds = from_first([row.seed for row in rows])
    return tuple(dataclasses.replace(row, seed=s) for row, s in zip(rows, seeds, strict=True))


def as_ids(prompts: Iterable[Prompt]) -> list[np.ndarray]:
    """``prompts`` as one array of integers each.

    Raises `TypeError` where they hold anything but whole numbers, `ValueError` for one beyond 63
    bits.
    """
    if isinstance(prompts, (str, bytes)) or not _is_listing(prompts):
        raise TypeError(
            f"prompts={shown(prompts)} must be a list of prompts, each the token ids of one, as in "
            "[tokenizer.encode(text)]"
        )
    return [_ids_of(index, prompt) for index, prompt in enumerate(prompts)]


def _ids_of(index: int, prompt: Any) -> np.ndarray:
    if isinstance(prompt, (str, bytes)):
        raise TypeError(f"prompt {index} is text, {shown(prompt)}; pass tokenizer.encode(text)")
    if isinstance(prompt, (np.ndarray, jax.Array)) and prompt.ndim == 1:
        if np.issubdtype(prompt.dtype, np.integer):
            return np.asarray(prompt)
        raise TypeError(f"prompt {index} is an array of {prompt.dtype}; it must hold integers")
    if not _is_listing(prompt):
        raise TypeError(
            f"prompt {index} is {shown(prompt)}; each must be a list of token ids: [[1, 2]] is one"
        )
    tokens = list(prompt)
    if set(map(type, tokens)) - {int}:  # a quick look, as prompts are long
        numbers = [whole_number(token) for token in tokens]
        if None in numbers:
            bad = shown(tokens[numbers.index(None)])
            raise TypeError(f"prompt {index} holds {bad}, which is no token id")
        tokens = numbers
    try:
        return np.array(tokens, np.int64)
    except OverflowError:
        raise ValueError(f"prompt {index} holds a token id of more than 63 bits") from None


def _is_listing(value: Any) -> bool:
    """Whether ``value`` has items in an order."""
    unordered = isinstance(value, (Set, Mapping)) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not unordered


def check_models(models: Models) -> None:
    """Raise `TypeError` or `ValueError` for a model that is not what `jspec.Model` says."""
    _check_model("model", models.target)
    if models.draft is not None:
        _check_model("draft_model", models.draft)


def _check_model(name: str, model: Any) -> None:
    if isinstance(model, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(str(model))} is a path; pass jspec.load_model(path)")
    if isinstance(model, type):
        raise TypeError(f"{name}={model.__name__} is a class; pass a model that was made of it")
    for what, value, needed in (
        (name, model, OF_A_MODEL),
        (f"{name}.config", getattr(model, "config", None), OF_A_CONFIG),
    ):
        missing = [member for member in needed if not hasattr(value, member)]
        if missing:
            raise TypeError(
                f"{what} of type {type(value).__name__} lacks {', '.join(missing)}; it must have "
                f"{', '.join(needed)}, as docs/models.md says"
            )
    if any(leaf is model for leaf in jax.tree.leaves(model)):
        raise TypeError(
            f"{name} of type {type(model).__name__} is no pytree; make it a flax.nnx.Module, or "
            "register its class with jax.tree_util"
        )
    config = model.config
    for member in ("vocab_size", "max_context"):
        value = getattr(config, member)
        if (whole_number(value) or 0) < 1:
            raise ValueError(f"{name}.config: {member}={shown(value)} must be a positive int")
    layers = config.layers
    if not isinstance(layers, Sequence) or not all(isinstance(x, LayerSpec) for x in layers):
        raise ValueError(
            f"{name}.config: layers={shown(layers)} must be a LayerSpec for each layer"
        )
    token_ids(f"{name}.config: stop_tokens", config.stop_tokens)
    check_traced(name, model)


def check_request(models: Models, prompt: Prompt, params: SamplingParams) -> None:
    """Raise `ValueError` where the models cannot serve a request.

    A prompt without tokens, with ids outside the vocabulary, or too long for the context of the
    target or of the draft model.
    """
    config = models.target.config
    if not len(prompt):
        raise ValueError("the prompt is empty; give it at least one token")
    low, high = int(np.min(prompt)), int(np.max(prompt))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"the prompt holds token {low if low < 0 else high}, outside the vocabulary "
            f"0..{config.vocab_size - 1}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.vocab_size:
            raise ValueError(
                f"{name}={getattr(params, name)} must be at most the {config.vocab_size} tokens "
                "that there are"
            )
    if params.routed_experts and routing_shape(config) is None:
        raise ValueError(
            "routed_experts=True needs a model with a mixture of experts, whose config says so by "
            "experts=jspec.Experts(...); this one has none"
        )
    biased = [*params.banned_tokens, *dict(params.logit_bias)]
    if biased and max(biased) >= config.vocab_size:
        raise ValueError(
            f"logit_bias or banned_tokens hold token {max(biased)}, outside the vocabulary "
            f"0..{config.vocab_size - 1}"
        )
    for whose, model in (("", models.target), ("for the draft model: ", models.draft)):
        if model is None or len(prompt) + params.max_new_tokens <= model.config.max_context:
            continue
        raise ValueError(
            f"{whose}the prompt has {len(prompt)} tokens, which with max_new_tokens="
            f"{params.max_new_tokens} exceeds the context of {model.config.max_context}; shorten "
            "the prompt, lower max_new_tokens or raise max_context of the config (--context)"
        )


def check_requests(
    models: Models, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> None:
    """`check_request` for each; the error says which."""
    for index, (prompt, row) in enumerate(zip(prompts, params, strict=True)):
        try:
            check_request(models, prompt, row)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None


def mode_of(params: Sequence[SamplingParams]) -> SamplingMode:
    """The simplest sampling mode that serves every request of a batch."""
    return strongest([p.mode for p in params])


def strongest(modes: Sequence[SamplingMode]) -> SamplingMode:
    """The one of ``modes`` that serves all of them."""
    return MODES[max(map(MODES.index, modes))]


def logprobs_of(params: Sequence[SamplingParams]) -> int | None:
    """The largest ``logprobs`` of a batch, None where no request asks for any."""
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)


def prompt_logprobs_of(params: Sequence[SamplingParams]) -> int | None:
    """The largest ``prompt_logprobs`` of a batch, None where no request asks for any."""
    return max((p.prompt_logprobs for p in params if p.prompt_logprobs is not None), default=None)


def asks_experts(params: Sequence[SamplingParams]) -> bool:
    """Whether a request of a batch asks for the experts of its tokens."""
    return any(p.routed_experts for p in params)


def sampling_of(params: Sequence[SamplingParams]) -> Sampling:
    """The settings of a batch of requests, which have seeds, as numpy arrays."""

    def column(name: str, dtype) -> Any:
        return np.array([getattr(p, name) for p in params], dtype)

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seeds=column("seed", np.uint32),
    )


# --- bit-exact decoding -----------------------------------------------------------------------


def check_exact(model: Model, cache_policy: Policy, exact: Exact) -> None:
    """Raise `BackendError` where passes of ``model`` cannot be exact here, with the reason.

    docs/batch_invariance.md says why a token's bits follow from its own row alone where they can.
    ``cache_policy``: the policy whose columns its cache keeps.
    """
    reason = refuses_exact(model, cache_policy, exact)
    if reason is not None:
        raise BackendError(f'exact="{exact}" cannot serve this request: {reason}; leave exact out')


def check_started(exact: Exact | None, step_exact: Exact | None) -> None:
    """Raise `ValueError` unless a state started with ``exact`` has steps with ``step_exact``."""
    if exact != step_exact:
        raise ValueError(
            f"a state that was started with exact={exact!r} has no steps with exact={step_exact!r};"
            f" give start_decoding a config with exact={step_exact!r}"
            + (", or pass the state through jspec.convert_state" if exact else "")
        )


def refuses_exact(model: Model, cache_policy: Policy, exact: Exact) -> str | None:
    """Why this model's passes over a cache with this policy's columns cannot be exact, or None."""
    if reason := refuses_triton():
        return reason
    if (on_mesh := mesh_model(model)) is not None:
        if reason := on_mesh.refuses_exact(exact):
            return reason
        model = on_mesh.model
    elif any(len(x.sharding.device_set) > 1 for x in _arrays(model)):
        return "XLA sums over the devices of its mesh in an order of its own"
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is no jspec.Decoder, whose products jspec runs"
    if str(model.dtype) not in DTYPES:
        return f"its weights of {model.dtype} are none of {', '.join(DTYPES)}"
    return _refuses_config(model.config, cache_policy)


def _arrays(model: Model) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(model) if isinstance(x, jax.Array)]


def _refuses_config(config: ModelConfig, cache_policy: Policy) -> str | None:
    """Why no model of this config can be exact, or None."""
    largest = max(max(spec.key_size, spec.value_size) for spec in config.layers)
    storage = cache_policy.storage
    reasons = {
        "tiles of a mixture of experts follow its routing": config.experts is not None,
        "XLA computes the products of latent attention": config.latent is not None,
        "its norms scale by 1 + scale, which XLA computes": config.centered_norms,
        "XLA computes its norms after attention and MLP": config.post_norms,
        "XLA scales what its layers add": config.residual_scale is not None,
        "XLA computes the norm of all its heads together": config.joint_qk_norm,
        f"XLA computes its activation {config.activation}": config.activation != "silu",
        "XLA computes the sigmoid of its sinks": config.sinks,
        "XLA computes the soft cap of its logits": config.logit_softcap is not None,
        f"heads of {largest} channels are over {MAX_CHANNELS}": largest > MAX_CHANNELS,
        f"{shown(cache_policy)} keeps keys in the host's memory, which the kernels do not read": (
            storage is not None and bool(storage.layers(config.layers))
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
