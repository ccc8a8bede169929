"""A mixture of experts in place of a decoder's feed-forward, without dropped tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.models.modules import MLP, Kernel, constant, normal
from jspec.ops.grouped import grouped_linear
from jspec.ops.norm import RMS
from jspec.parts import Experts
from jspec.typing import Array


class Router(nnx.Module):
    """Which experts a token takes, and with what weights."""

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        self.experts = experts
        self.kernel = normal((width, experts.routed), width**-0.5, dtype, rngs)
        self.bias = constant((experts.routed,), 0.0, dtype, rngs) if experts.bias else None
        # Differences of scores that it decides are smaller than bfloat16 tells.
        self.correction = (
            constant((experts.routed,), 0.0, jnp.float32, rngs) if experts.corrected else None
        )

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Experts int32 ``[M, chosen]`` of tokens ``x [M, D]``, and their weights, float32."""
        settings = self.experts
        logits = jnp.dot(
            x.astype(jnp.float32),
            self.kernel[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        if self.bias is not None:
            logits += self.bias[...].astype(jnp.float32)[None]
        positive = jax.nn.softmax if settings.score == "softmax" else jax.nn.sigmoid
        scores = positive(logits)
        ranked = scores if self.correction is None else scores + self.correction[...][None]
        if settings.chosen_groups < settings.groups:
            ranked = self._within_groups(ranked)
        chosen = lax.top_k(ranked, settings.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if settings.normalized:
            weights /= weights.sum(axis=1, keepdims=True) + 1e-20
        return chosen, weights * settings.factor

    def _within_groups(self, scores: Array) -> Array:
        """``scores [M, routed]``, -inf in the groups that are not taken."""
        settings = self.experts
        grouped = scores.reshape(len(scores), settings.groups, -1)
        count = 1 if settings.group_score == "highest" else 2
        best = lax.top_k(grouped, count)[0].sum(axis=2)
        taken = lax.top_k(best, settings.chosen_groups)[1]
        is_taken = (taken[:, :, None] == jnp.arange(settings.groups)[None, None]).any(axis=1)
        return jnp.where(is_taken[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


class ExpertMLPs(nnx.Module):
    """The SwiGLU of every expert: ``gate_up [E, D, 2, size]`` and ``down [E, size, D]``.

    Biases have these shapes without the second axis.
    ``axes``: those of an enclosing `jax.shard_map` over which the experts are sharded. The channels
    of each may be sharded too: what a device gives is its part of a sum.
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        count, size = experts.routed, experts.size
        wide, narrow = ((count, 2, size), (count, width)) if experts.bias else (None, None)
        own: Any = {"dtype": dtype, "rngs": rngs}
        self.gate_up = Kernel((count, width, 2, size), width**-0.5, bias=wide, **own)
        self.down = Kernel((count, size, width), size**-0.5, bias=narrow, **own)
        self.clamped = experts.clamped
        self.axes: tuple[str, ...] = ()

    def __call__(self, x: Array, chosen: Array, weights: Array) -> Array:
        """The weighted sum over the experts that each token of ``x [M, D]`` has chosen, float32."""
        tokens, count = chosen.shape
        gate_up, down = self.gate_up.kernel[...], self.down.kernel[...]
        held, own = len(down), chosen
        if self.axes:
            # Those of other devices come behind the ones of this.
            own = chosen - lax.axis_index(self.axes) * held
            is_own = (own >= 0) & (own < held)
            own, weights = jnp.where(is_own, own, held), jnp.where(is_own, weights, 0)
        # Tokens of one expert lie side by side, however many there are.
        order = jnp.argsort(own.reshape(-1), stable=True)
        sizes = jnp.bincount(own.reshape(-1), length=held + 1)[:held].astype(jnp.int32)
        both = grouped_linear(x[order // count], gate_up.reshape(*gate_up.shape[:2], -1), sizes)
        if self.gate_up.bias is not None:
            bias = self.gate_up.bias[...].reshape(held, -1).astype(jnp.float32)
            both += jnp.take(bias, own.reshape(-1)[order], axis=0, mode="clip")
        gate, up = jnp.split(both, 2, axis=1)
        found = grouped_linear(self._gated(gate, up).astype(x.dtype), down, sizes)
        if self.axes:
            # What no expert of this device multiplied is not specified.
            found = jnp.where(jnp.arange(len(found))[:, None] < sizes.sum(), found, 0)
        found = found[jnp.argsort(order)].reshape(tokens, count, -1)
        return jnp.einsum("mcd,mc->md", found, weights)

    def last_bias(self, chosen: Array, weights: Array) -> Array | None:
        """What biases of ``down``, whole on each device, add to that sum: float32 ``[M, D]``."""
        bias = self.down.bias
        return None if bias is None else _weighted_sum(bias[...], chosen, weights)

    def _gated(self, gate: Array, up: Array) -> Array:
        if self.clamped is None:
            return jax.nn.silu(gate) * up
        limit, alpha = self.clamped.limit, self.clamped.alpha
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class MixtureOfExperts(nnx.Module):
    """The experts that a token chooses, and one that every token takes.

    ``axes``: those of an enclosing `jax.shard_map` over which both are sharded. One all-reduce adds
    up what devices give: it is the sum inside a group of devices that share an expert and the sum
    over groups at once (Bhatia et al. 2025, section 2.2, takes an all-reduce and a gather).
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        own: Any = {"dtype": dtype, "rngs": rngs}
        self.router = Router(width, experts, **own)
        self.experts = ExpertMLPs(width, experts, **own)
        shared = experts.shared_size
        self.shared = None if shared is None else MLP(width, shared, bias=False, **own)
        self.axes: tuple[str, ...] = ()

    def __call__(self, x: Array, norm: RMS) -> Array:
        """``x [B, T, D]`` plus what it gives after ``norm``."""
        normed = norm(x)
        tokens = normed.reshape(-1, x.shape[-1])
        routed = self.router(tokens)
        found = self.experts(tokens, *routed).reshape(x.shape)
        if self.shared is not None:
            found += self.shared.partial(normed)
        found = lax.psum(found, self.axes) if self.axes else found
        if (bias := self.experts.last_bias(*routed)) is not None:
            found += bias.reshape(x.shape)
        return x + found.astype(x.dtype)


def _weighted_sum(bias: Array, chosen: Array, weights: Array) -> Array:
    """``bias [E, D]`` of the experts ``chosen [M, c]`` by ``weights``, float32 ``[M, D]``."""
    spread = jnp.zeros((len(chosen), len(bias)), jnp.float32)
    spread = spread.at[jnp.arange(len(chosen))[:, None], chosen].set(weights)
    return jnp.dot(spread, bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)
