"""A mixture of experts in place of a decoder's feed-forward, without dropped tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.models.modules import MLP, Kernel, constant, normal
from jspec.ops.norm import RMS
from jspec.parts import Experts
from jspec.typing import Array


class Router(nnx.Module):
    """Which experts a token takes, and with what weights."""

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        self.experts = experts
        self.kernel = normal((width, experts.routed), width**-0.5, dtype, rngs)
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

    ``axes``: those of an enclosing `jax.shard_map` over which they are sharded, the experts where
    ``owned``, else the channels of each; what devices give is then added up.
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        count, size = experts.routed, experts.size
        self.gate_up = Kernel((count, width, 2, size), width**-0.5, dtype=dtype, rngs=rngs)
        self.down = Kernel((count, size, width), size**-0.5, dtype=dtype, rngs=rngs)
        self.axes: tuple[str, ...] = ()
        self.owned = False

    def __call__(self, x: Array, chosen: Array, weights: Array) -> Array:
        """The weighted sum over the experts that each token of ``x [M, D]`` has chosen."""
        tokens, count = chosen.shape
        gate_up, down = self.gate_up.kernel[...], self.down.kernel[...]
        held = len(down)
        if self.owned:
            # Those of other devices come behind the ones of this.
            own = chosen - lax.axis_index(self.axes) * held
            is_own = (own >= 0) & (own < held)
            chosen, weights = jnp.where(is_own, own, held), jnp.where(is_own, weights, 0)
        # Tokens of one expert lie side by side, however many there are.
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=held + 1)[:held].astype(jnp.int32)
        both = _ragged(x[order // count], gate_up.reshape(*gate_up.shape[:2], -1), sizes)
        gate, up = jnp.split(both, 2, axis=1)
        found = _ragged((jax.nn.silu(gate) * up).astype(x.dtype), down, sizes)
        if self.owned:
            # What no expert of this device multiplied is not specified.
            found = jnp.where(jnp.arange(len(found))[:, None] < sizes.sum(), found, 0)
        found = found[jnp.argsort(order)].reshape(tokens, count, -1)
        found = jnp.einsum("mcd,mc->md", found, weights)
        return (lax.psum(found, self.axes) if self.axes else found).astype(x.dtype)


class MixtureOfExperts(nnx.Module):
    """The experts that a token chooses, and one that every token takes."""

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        own: Any = {"dtype": dtype, "rngs": rngs}
        self.router = Router(width, experts, **own)
        self.experts = ExpertMLPs(width, experts, **own)
        shared = experts.shared_size
        self.shared = None if shared is None else MLP(width, shared, bias=False, **own)

    def __call__(self, x: Array, norm: RMS) -> Array:
        """``x [B, T, D]`` plus what it gives after ``norm``."""
        normed = norm(x)
        tokens = normed.reshape(-1, x.shape[-1])
        found = self.experts(tokens, *self.router(tokens)).reshape(x.shape)
        return (x if self.shared is None else self.shared(x, norm)) + found


def _ragged(x: Array, kernels: Array, sizes: Array) -> Array:
    """``x [rows, in]`` times ``kernels [E, in, out]``, the first ``sizes[0]`` rows by the first."""
    return lax.ragged_dot(x, kernels, sizes, preferred_element_type=jnp.float32)
