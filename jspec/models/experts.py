"""A mixture of experts in place of a decoder's feed-forward, without dropped tokens."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.models.modules import MLP, Kernel, Linear, constant, normal
from jspec.ops.all_to_all import By, all_reduce
from jspec.ops.grouped import grouped_linear
from jspec.ops.norm import RMS
from jspec.ops.route import Routed, route
from jspec.parts import Experts
from jspec.typing import Array, ModelShape

_RECORD: contextvars.ContextVar[list[Array] | None] = contextvars.ContextVar(
    "jspec_routed_experts", default=None
)


@contextlib.contextmanager
def recorded_experts() -> Iterator[list[Array]]:
    """A context in which each mixture appends the experts of its tokens, int32 ``[M, c]``."""
    token = _RECORD.set(record := [])
    try:
        yield record
    finally:
        _RECORD.reset(token)


def stacked_experts(record: Sequence[Array], tokens: Array) -> Array:
    """``record`` of a pass over ``tokens [B, T]`` in one array, int32 ``[B, T, mixtures, c]``."""
    if not record:
        raise TypeError(
            "routed_experts=True records the experts of jspec.models.experts.MixtureOfExperts, of "
            "which the model has none; leave it out"
        )
    return jnp.stack([x.reshape(*tokens.shape, -1) for x in record], axis=2)


def routing_shape(config: ModelShape) -> tuple[int, int] | None:
    """Mixtures of a model, and experts that a token takes in each; None without mixtures."""
    experts = getattr(config, "experts", None)
    if not isinstance(experts, Experts):
        return None
    mixtures = len(config.layers) - len(set(experts.dense_layers))
    return (mixtures, experts.chosen) if mixtures else None


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
        """Choose the experts of tokens.

        Args:
            x: ``[M, D]``.
            norm: applied to ``x``.

        Returns:
            The chosen experts and their weights.
        """
        bias, correction = (None if p is None else p[...] for p in (self.bias, self.correction))
        return route(x, self.kernel[...], bias, correction, norm=norm, experts=self.experts)


class ExpertMLPs(nnx.Module):
    """The SwiGLU of every expert: ``gate_up [E, D, 2, size]`` and ``down [E, size, D]``.

    Kernels may be `MXFP4`. Biases have these shapes without the second axis.
    ``axes``: axes of an enclosing `jax.shard_map` over which the experts are sharded. The channels
    of each expert may be sharded too. The output of a device is then a partial sum.
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
        """The weighted sum over the experts that each token has chosen.

        Args:
            x: ``[M, D]``.
            norm: applied to ``x``.
            routed: the choice of `Router`.
            is_part: whether to leave out the biases of ``down``, which every device holds whole;
                `last_bias` adds them after the sum over devices.

        Returns:
            float32 ``[M, D]``.
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
            # Rows that no expert of this device computed are undefined.
            outputs = jnp.where(is_local[..., None], outputs, 0)
        # Not a reduction: XLA fuses sums of slices with whatever follows.
        return functools.reduce(jnp.add, (outputs[:, i] for i in range(outputs.shape[1])))

    def last_bias(self, routed: Routed) -> Array | None:
        """The term of the biases of ``down`` in that sum, float32 ``[M, D]``; None without."""
        bias = self.down.bias
        if bias is None:
            return None
        return _weighted_sum(bias[...], routed.chosen, routed.weights)


class MixtureOfExperts(nnx.Module):
    """A router, its experts, and a shared expert that every token takes.

    ``axes``: axes of an enclosing `jax.shard_map` over which both are sharded. One all-reduce, by
    ``reduced_by``, sums over the devices of a group, which share an expert, and over groups (Bhatia
    et al. 2025, section 2.2, uses an all-reduce and an all-gather).
    """

    def __init__(self, width: int, experts: Experts, *, dtype, rngs: nnx.Rngs | None):
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.router = Router(width, experts, **options)
        self.experts = ExpertMLPs(width, experts, **options)
        shared = experts.shared_size
        self.shared = None if shared is None else MLP(width, shared, bias=False, **options)
        self.shared_gate = Linear(width, 1, bias=False, **options) if experts.shared_gated else None
        self.axes: tuple[str, ...] = ()
        self.reduced_by: By = "xla"

    def __call__(self, x: Array, norm: RMS) -> Array:
        """``x [B, T, D]`` plus the experts' output for ``norm(x)``."""
        tokens = x.reshape(-1, x.shape[-1])
        routed = self.router(tokens, norm)
        if (record := _RECORD.get()) is not None:
            record.append(routed.chosen)
        outputs = self.experts(tokens, norm, routed, is_part=bool(self.axes)).reshape(x.shape)
        if self.shared is not None:
            shared = self.shared.partial(x, norm)
            if self.shared_gate is not None:
                shared *= nnx.sigmoid(self.shared_gate.partial(x, norm=norm))
            outputs += shared
        if self.axes:
            reduced = functools.partial(all_reduce, outputs, self.axes, by=self.reduced_by)
            if (bias := self.experts.last_bias(routed)) is None:
                return reduced(dtype=x.dtype, add=x)
            outputs = reduced() + bias.reshape(x.shape)
        return x + outputs.astype(x.dtype)


def _weighted_sum(bias: Array, chosen: Array, weights: Array) -> Array:
    """``bias [E, D]`` of the experts ``chosen [M, c]`` by ``weights``, float32 ``[M, D]``."""
    spread = jnp.zeros((len(chosen), len(bias)), jnp.float32)
    spread = spread.at[jnp.arange(len(chosen))[:, None], chosen].set(weights)
    return jnp.dot(spread, bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)
