"""A mixture of experts in place of a decoder's feed-forward, without dropped tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.models.modules import MLP, Kernel, constant, normal
from jspec.ops.grouped import grouped_linear
from jspec.ops.norm import RMS
from jspec.ops.route import Routed, route
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

    def __call__(self, x: Array, norm: RMS) -> Routed:
        """What tokens ``x [M, D]`` choose after ``norm``."""
        bias, correction = (None if p is None else p[...] for p in (self.bias, self.correction))
        return route(x, self.kernel[...], bias, correction, norm=norm, experts=self.experts)


class ExpertMLPs(nnx.Module):
    """The SwiGLU of every expert: ``gate_up [E, D, 2, size]`` and ``down [E, size, D]``.

    Kernels may be `MXFP4`. Biases have these shapes without the second axis.
    ``axes``: those of an enclosing `jax.shard_map` over which the experts are sharded. The channels
    of each may be sharded too: what a device gives is its part of a sum.
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        count, size = experts.routed, experts.size
        gate_up_bias, down_bias = (
            ((count, 2, size), (count, width)) if experts.bias else (None, None)
        )
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.gate_up = Kernel((count, width, 2, size), width**-0.5, bias=gate_up_bias, **options)
        self.down = Kernel((count, size, width), size**-0.5, bias=down_bias, **options)
        self.clamped = experts.clamped
        self.axes: tuple[str, ...] = ()

    def __call__(self, x: Array, norm: RMS, routed: Routed, *, is_part: bool = False) -> Array:
        """The weighted sum over what each token of ``x [M, D]``, after ``norm``, has chosen.

        Float32. ``is_part``: without the biases of ``down``, which are whole on each device.
        """
        order, starts, is_local = routed.order, routed.starts, None
        if self.axes:
            # The pairs of this device's experts come first, and the others belong to no group.
            local_experts = len(self.down.kernel.get_value())
            first = lax.axis_index(self.axes) * local_experts
            starts = lax.dynamic_slice_in_dim(starts, first, local_experts + 1)
            order, starts = jnp.roll(order, -starts[0]), starts - starts[0]
            is_local = (routed.chosen >= first) & (routed.chosen < first + local_experts)
        gate_up, down = self.gate_up, self.down
        activated = grouped_linear(
            *(
                x,
                gate_up.kernel.get_value(),
                starts,
                None if gate_up.bias is None else gate_up.bias[...],
            ),
            gather_indices=order,
            norm=norm,
            gated=True,
            clamped=self.clamped,
        )
        outputs = grouped_linear(
            *(activated, down.kernel.get_value(), starts),
            None if is_part or down.bias is None else down.bias[...],
            scatter_indices=order,
            weights=routed.weights.reshape(-1),
            dtype=jnp.float32,
        )
        outputs = outputs.reshape(*routed.chosen.shape, -1)
        if is_local is not None:
            # What no expert of this device multiplied is not specified.
            outputs = jnp.where(is_local[..., None], outputs, 0)
        # Not a reduction: XLA fuses sums of slices with whatever follows.
        return functools.reduce(jnp.add, (outputs[:, i] for i in range(outputs.shape[1])))

    def last_bias(self, routed: Routed) -> Array | None:
        """What biases of ``down``, whole on each device, add to that sum: float32 ``[M, D]``."""
        bias = self.down.bias
        if bias is None:
            return None
        return _weighted_sum(bias[...], routed.chosen, routed.weights)


class MixtureOfExperts(nnx.Module):
    """The experts that a token chooses, and one that every token takes.

    ``axes``: those of an enclosing `jax.shard_map` over which both are sharded. One all-reduce adds
    up what devices give: it is the sum inside a group of devices that share an expert and the sum
    over groups at once (Bhatia et al. 2025, section 2.2, takes an all-reduce and a gather).
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.router = Router(width, experts, **options)
        self.experts = ExpertMLPs(width, experts, **options)
        shared = experts.shared_size
        self.shared = None if shared is None else MLP(width, shared, bias=False, **options)
        self.axes: tuple[str, ...] = ()

    def __call__(self, x: Array, norm: RMS) -> Array:
        """``x [B, T, D]`` plus what it gives after ``norm``."""
        tokens = x.reshape(-1, x.shape[-1])
        routed = self.router(tokens, norm)
        outputs = self.experts(tokens, norm, routed, is_part=bool(self.axes)).reshape(x.shape)
        if self.shared is not None:
            outputs += self.shared.partial(x, norm)
        if self.axes:
            outputs = lax.psum(outputs, self.axes)
            if (bias := self.experts.last_bias(routed)) is not None:
                outputs += bias.reshape(x.shape)
        return x + outputs.astype(x.dtype)


def _weighted_sum(bias: Array, chosen: Array, weights: Array) -> Array:
    """``bias [E, D]`` of the experts ``chosen [M, c]`` by ``weights``, float32 ``[M, D]``."""
    spread = jnp.zeros((len(chosen), len(bias)), jnp.float32)
    spread = spread.at[jnp.arange(len(chosen))[:, None], chosen].set(weights)
    return jnp.dot(spread, bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)
