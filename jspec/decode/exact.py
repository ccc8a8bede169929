"""Bit-exact decoding: what its backends, those of `settings.EXACT_BACKENDS`, cannot serve.

docs/batch_invariance.md says why a token's bits then follow from its own row alone.
"""

from __future__ import annotations

from typing import Any

import jax

from jspec.config import ModelConfig, shown
from jspec.decode.on_mesh import mesh_model
from jspec.dispatch import BackendError
from jspec.models.decoder import Decoder
from jspec.policies import Policy
from jspec.triton.attention import DTYPES, MAX_CHANNELS
from jspec.triton.call import refuses_triton
from jspec.typing import Model


def check_exact(model: Model, cache_policy: Policy) -> None:
    """Raise `BackendError` where passes of ``model`` cannot be exact here, with the reason.

    ``cache_policy``: the policy whose columns its cache keeps.
    """
    reason = refuses_triton() or _refuses(model) or _refuses_policy(model, cache_policy)
    if reason is not None:
        raise BackendError(f"exact=True cannot serve this request: {reason}; leave exact out")


def check_started(exact: bool, step_exact: bool) -> None:
    """Raise `ValueError` unless a state started with ``exact`` has steps with ``step_exact``."""
    if exact != step_exact:
        raise ValueError(
            f"a state that was started with exact={exact} has no steps with exact={step_exact}; "
            f"give start_decoding a config with exact={step_exact}"
            + (", or pass the state through jspec.convert_state" if exact else "")
        )


def _refuses(model: Model) -> str | None:
    """Why this model's passes cannot be exact, or None."""
    if mesh_model(model) is not None or any(_devices(x) > 1 for x in jax.tree.leaves(model)):
        return "its weights lie on a mesh, where sums over devices follow the mesh"
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is no jspec.Decoder, whose products jspec runs"
    if str(model.dtype) not in DTYPES:
        return f"its weights of {model.dtype} are none of {', '.join(DTYPES)}"
    return _refuses_config(model.config)


def _refuses_config(config: ModelConfig) -> str | None:
    """Why no model of this config can be exact, or None."""
    reasons = {
        "tiles of a mixture of experts follow its routing": config.experts is not None,
        "XLA computes the products of latent attention": config.latent is not None,
        "its norms scale by 1 + scale, which XLA computes": config.centered_norms,
        "XLA computes its norms after attention and MLP": config.post_norms,
        f"XLA computes its activation {config.activation}": config.activation != "silu",
        "XLA computes the sigmoid of its sinks": config.sinks,
        "XLA computes the soft cap of its logits": config.logit_softcap is not None,
    }
    largest = max(max(spec.key_size, spec.value_size) for spec in config.layers)
    reasons[f"heads of {largest} channels are over {MAX_CHANNELS}"] = largest > MAX_CHANNELS
    return next((reason for reason, holds in reasons.items() if holds), None)


def _refuses_policy(model: Model, cache_policy: Policy) -> str | None:
    """Why a cache that keeps this policy's columns cannot be read exactly, or None."""
    storage = cache_policy.storage
    if storage is not None and storage.layers(model.config.layers):
        return (
            f"{shown(cache_policy)} keeps keys in the host's memory, which the kernels do not read"
        )
    return None


def _devices(leaf: Any) -> int:
    """How many devices an array of the model is on."""
    return len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1
