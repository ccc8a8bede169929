"""The parts that decoders are made of: linear maps, norms, and the gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.models.joined import Part, gate_up_parts, joined_shape
from jspec.ops.all_to_all import By, all_reduce
from jspec.ops.linear import linear
from jspec.ops.linear_chain import ChainOp, Sum
from jspec.ops.norm import RMS
from jspec.parts import Activation
from jspec.typing import Array

NextQueries = Callable[[], Array]  # gives the queries of the next layer, of this layer's input


def normal(shape: tuple[int, ...], scale: float, dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    """Normal numbers of deviation ``scale``; without ``rngs`` their shape, for a loader to fill."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    values = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values.astype(dtype))


def constant(shape: tuple[int, ...], value: float, dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    """``value`` throughout; without ``rngs`` its shape, for a loader to fill."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(jnp.full(shape, value, dtype))


def _joined(inputs: int, parts: tuple[Part, ...], dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    shape = (inputs, *joined_shape(parts))
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    kernel = jnp.zeros(shape, dtype)
    for part in parts:
        # Drawn one by one, so that a seed gives the weights of separate projections.
        part_kernel = normal((inputs, part.outputs), inputs**-0.5, dtype, rngs).get_value()
        kernel = kernel.at[part.index].set(part_kernel.reshape(part.of(kernel).shape))
    return nnx.Param(kernel)


def _value(parameter: nnx.Param | None) -> Array | None:
    return None if parameter is None else parameter[...]


class Kernel(nnx.Module):
    """A parameter named ``kernel``, as in linear maps, and a bias of shape ``bias`` or none."""

    def __init__(
        self,
        shape: tuple[int, ...],
        scale: float,
        *,
        bias: tuple[int, ...] | None = None,
        dtype,
        rngs: nnx.Rngs | None,
    ):
        self.kernel = normal(shape, scale, dtype, rngs)
        self.bias = None if bias is None else constant(bias, 0.0, dtype, rngs)


class Linear(nnx.Module):
    """``x @ kernel + bias``, ``kernel [in, out]``; sums in float32, returns the dtype of ``x``.

    ``axes``: axes of an enclosing `jax.shard_map` over which the inputs and the rows of the kernel
    are sharded; an all-reduce by ``reduced_by`` adds the partial outputs of the devices.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype, rngs: nnx.Rngs | None):
        self.kernel = normal((inputs, outputs), inputs**-0.5, dtype, rngs)
        self.bias = constant((outputs,), 0.0, dtype, rngs) if bias else None
        self.axes: tuple[str, ...] = ()
        self.reduced_by: By = "xla"

    def __call__(self, x: Array, *, norm: RMS | None = None, add: Array | None = None) -> Array:
        """Compute ``norm(x) @ kernel + bias + add``.

        Args:
            x: ``[..., in]``.
            norm: applied to ``x``, if any.
            add: ``[..., out]``, such as a residual.

        Returns:
            ``[..., out]``.
        """
        kernel, bias = self.kernel.get_value(), _value(self.bias)
        if not self.axes:
            return linear(x, kernel, bias, norm=norm, add=add)
        reduced = partial(
            all_reduce, self.partial(x, norm=norm), self.axes, by=self.reduced_by, dtype=x.dtype
        )
        if bias is None:
            return reduced(add=add)
        y = reduced()
        y += jnp.expand_dims(bias, range(y.ndim - 1)).astype(y.dtype)
        return y if add is None else add.astype(y.dtype) + y

    def chain_op(self, *, add: Array | int) -> ChainOp | None:
        """This matmul with ``add`` as a `ChainOp`, or None where XLA sums it, or before a bias."""
        kernel, bias = self.kernel.get_value(), _value(self.bias)
        if not self.axes:
            return ChainOp(kernel, bias, add=add)
        if self.reduced_by != "cuda" or bias is not None:
            return None
        return ChainOp(kernel, add=add, sum=Sum(self.axes, self.reduced_by))

    def partial(self, x: Array, *, norm: RMS | None = None) -> Array:
        """``x @ kernel`` of this device's inputs alone, float32, without the bias."""
        return linear(x, self.kernel.get_value(), norm=norm, dtype=jnp.float32)


class JoinedLinear(nnx.Module):
    """Projections of one input as one matmul, ``kernel [in, rows, columns]``.

    `jspec.models.joined` describes the parts.
    """

    def __init__(
        self, inputs: int, parts: tuple[Part, ...], *, bias: bool, dtype, rngs: nnx.Rngs | None
    ):
        self.parts = parts
        self.kernel = _joined(inputs, parts, dtype, rngs)
        self.bias = constant(joined_shape(parts), 0.0, dtype, rngs) if bias else None

    def __call__(self, x: Array, norm: RMS | None = None) -> tuple[Array, ...]:
        """Each part ``[B, T, rows, columns]`` of ``x [B, T, in]`` after ``norm``."""
        return self.split(self.joined(x, norm))

    def joined(self, x: Array, norm: RMS | None = None) -> Array:
        """All parts of ``norm(x)`` as one array ``[..., rows, columns]``."""
        return linear(x, self.kernel.get_value(), _value(self.bias), norm=norm)

    def gated(self, x: Array, norm: RMS | None = None) -> Array:
        """``silu(gate) * up`` of ``x`` after ``norm``, where those are the parts."""
        return linear(x, self.kernel.get_value(), _value(self.bias), norm=norm, gated=True)

    def chain_op(self, norm: RMS, *, gated: bool = False) -> ChainOp:
        """`joined`, or with ``gated`` `gated`, as a `ChainOp`."""
        return ChainOp(self.kernel.get_value(), _value(self.bias), norm, gated=gated)

    def split(self, y: Array) -> tuple[Array, ...]:
        """Split the output of `joined` into its parts."""
        return tuple(part.of(y) for part in self.parts)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(
        self, size: int, *, eps: float, centered: bool = False, dtype, rngs: nnx.Rngs | None
    ):
        self.scale = constant((size,), 0.0 if centered else 1.0, dtype, rngs)
        self.eps, self.centered = eps, centered

    @property
    def rms(self) -> RMS:
        return RMS(self.scale[...], self.eps, self.centered)

    def __call__(self, x: Array) -> Array:
        return self.rms(x)


def add_output(
    x: Array, inputs: Array, out: Linear, norm: RMSNorm | None, scale: float | None
) -> Array:
    """``x`` plus ``out(inputs)``, after ``norm`` and times ``scale`` where they are not None."""
    if norm is None and scale is None:
        return out(inputs, add=x)
    y = out(inputs) if norm is None else norm(out(inputs))
    return x + (y if scale is None else y * jnp.asarray(scale, y.dtype))


class MLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020).

    ``gate`` and ``up`` map ``hidden_size`` to ``intermediate_size``, ``down`` maps back.
    ``post_norm`` is applied to the output of ``down``, which is then multiplied by
    ``residual_scale``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Activation = "silu",
        post_norm: RMSNorm | None = None,
        residual_scale: float | None = None,
        dtype,
        rngs: nnx.Rngs | None,
    ):
        parts = gate_up_parts(intermediate_size)
        self.gate_up = JoinedLinear(hidden_size, parts, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        self.activation: Activation = activation
        self.post_norm, self.residual_scale = post_norm, residual_scale

    def __call__(self, x: Array, norm: RMS | None) -> Array:
        """``x [B, T, D]`` plus the MLP of ``norm(x)``."""
        activated = self._activated(x, norm)
        return add_output(x, activated, self.down, self.post_norm, self.residual_scale)

    def chain_ops(self, norm: RMS, x: int) -> tuple[ChainOp, ChainOp] | None:
        """The MLP as two ops of a chain, of which op ``x`` is the input.

        None where its output is normed or scaled, where it has another activation than SiLU, and
        where the last matmul is no op.
        """
        down = self.down.chain_op(add=x)
        is_plain = self.post_norm is None and self.residual_scale is None
        if not is_plain or self.activation != "silu" or down is None:
            return None
        return self.gate_up.chain_op(norm, gated=True), down

    def partial(self, x: Array, norm: RMS) -> Array:
        """The MLP of ``norm(x)`` over this device's channels, float32, without the last bias."""
        return self.down.partial(self._activated(x, norm))

    def _activated(self, x: Array, norm: RMS | None) -> Array:
        if self.activation == "silu":
            return self.gate_up.gated(x, norm)
        gate, up = (part[..., 0, :] for part in self.gate_up(x, norm))
        return jax.nn.gelu(gate, approximate=True) * up
