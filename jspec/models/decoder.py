"""One Flax NNX decoder for every family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The attention itself is an argument, so dense, sparse and sharded decoding share this code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.config import LayerSpec, ModelConfig
from jspec.models.joined import Part, gate_up_parts, joined_shape, qkv_parts
from jspec.models.rope import rope_angles, rope_frequencies
from jspec.ops.append import Turn
from jspec.ops.linear import linear
from jspec.ops.norm import RMS
from jspec.typing import Array, Attend

Foresee = Callable[[], Array]  # gives the queries of the next layer, of this layer's input


def _normal(shape: tuple[int, ...], scale: float, dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    values = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values.astype(dtype))


def _constant(shape: tuple[int, ...], value: float, dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(jnp.full(shape, value, dtype))


def _joined(inputs: int, parts: tuple[Part, ...], dtype, rngs: nnx.Rngs | None) -> nnx.Param:
    shape = (inputs, *joined_shape(parts))
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    kernel = jnp.zeros(shape, dtype)
    for part in parts:
        # Drawn apart: a seed gives the weights that it gave before projections were joined.
        own = _normal((inputs, part.outputs), inputs**-0.5, dtype, rngs).get_value()
        kernel = kernel.at[part.index].set(own.reshape(part.of(kernel).shape))
    return nnx.Param(kernel)


def _value(parameter: nnx.Param | None) -> Array | None:
    return None if parameter is None else parameter[...]


class Linear(nnx.Module):
    """``x @ kernel + bias``, ``kernel [in, out]``; sums in float32, returns the dtype of ``x``.

    ``axes``: those of an enclosing `jax.shard_map` over which the inputs are sharded, with the rows
    of the kernel; what devices give is then added up.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype, rngs: nnx.Rngs | None):
        self.kernel = _normal((inputs, outputs), inputs**-0.5, dtype, rngs)
        self.bias = _constant((outputs,), 0.0, dtype, rngs) if bias else None
        self.axes: tuple[str, ...] = ()

    def __call__(self, x: Array, *, norm: RMS | None = None, add: Array | None = None) -> Array:
        """Of ``x`` after ``norm``, with ``add`` added in the end."""
        kernel, bias = self.kernel.get_value(), _value(self.bias)
        if not self.axes:
            return linear(x, kernel, bias, norm=norm, add=add)
        part = linear(x, kernel, norm=norm, dtype=jnp.float32)
        y = lax.psum(part, self.axes).astype(x.dtype)
        y = y if bias is None else y + jnp.expand_dims(bias, range(y.ndim - 1)).astype(y.dtype)
        return y if add is None else add.astype(y.dtype) + y


class JoinedLinear(nnx.Module):
    """Projections of one input as one product, ``kernel [in, rows, columns]``; see `joined`."""

    def __init__(
        self, inputs: int, parts: tuple[Part, ...], *, bias: bool, dtype, rngs: nnx.Rngs | None
    ):
        self.parts = parts
        self.kernel = _joined(inputs, parts, dtype, rngs)
        self.bias = _constant(joined_shape(parts), 0.0, dtype, rngs) if bias else None

    def __call__(self, x: Array) -> tuple[Array, ...]:
        """Each part ``[B, T, rows, columns]`` of ``x [B, T, in]``."""
        return self.split(self.joined(x))

    def joined(self, x: Array, norm: RMS | None = None) -> Array:
        """All parts of ``x`` after ``norm``, side by side."""
        return linear(x, self.kernel.get_value(), _value(self.bias), norm=norm)

    def gated(self, x: Array, norm: RMS | None = None) -> Array:
        """``silu(gate) * up`` of ``x`` after ``norm``, where those are the parts."""
        return linear(x, self.kernel.get_value(), _value(self.bias), norm=norm, gated=True)

    def split(self, y: Array) -> tuple[Array, ...]:
        """Each part of what `joined` gives."""
        return tuple(part.of(y) for part in self.parts)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype, rngs: nnx.Rngs | None):
        self.scale = _constant((size,), 1.0, dtype, rngs)
        self.eps = eps

    @property
    def rms(self) -> RMS:
        return RMS(self.scale[...], self.eps)

    def __call__(self, x: Array) -> Array:
        return self.rms(x)


class Attention(nnx.Module):
    """Projections, optional QK norm and rotation around ``attend``."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, dtype, rngs: nnx.Rngs | None):
        width, outputs = config.hidden_size, config.num_heads * spec.value_size
        parts = qkv_parts(config.num_heads, spec)
        self.qkv = JoinedLinear(width, parts, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(outputs, width, bias=config.out_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(spec.key_size, eps=config.norm_eps, dtype=dtype, rngs=rngs)
            self.k_norm = RMSNorm(spec.key_size, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        else:
            self.q_norm = self.k_norm = None

    def __call__(
        self,
        x: Array,
        norm: RMS,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        foresee: Foresee | None = None,
    ):
        """``x`` plus what attention gives for it after ``norm``, and the cache."""
        joined = self.qkv.joined(x, norm)
        q, k, v = self.qkv.split(joined)
        q = q.reshape(*x.shape[:2], -1, k.shape[-1])
        turn = self.turn(angles, joined)
        if getattr(attend, "turns", False):
            turning: Any = attend  # it takes more than `Attend` says
            more = {} if foresee is None else {"foresee": foresee}
            out, cache = turning(layer, q, k, v, cache, turn=turn, **more)
        else:
            out, cache = attend(layer, *turn(q, k), v, cache)
        return self.out(out.reshape(*out.shape[:2], -1), add=x), cache

    def queries(self, x: Array, norm: RMS, angles: tuple[Array, Array]) -> Array:
        """The queries ``[B, T, N, H]`` of ``x`` after ``norm``, turned."""
        joined = self.qkv.joined(x, norm)
        q, k, _ = self.qkv.split(joined)
        return self.turn(angles, joined)(q.reshape(*x.shape[:2], -1, k.shape[-1]), k)[0]

    def turn(self, angles: tuple[Array, Array], joined: Array) -> Turn:
        """What is to be done to queries and keys that are slices of ``joined``."""
        q_norm, k_norm = (None if norm is None else norm.rms for norm in (self.q_norm, self.k_norm))
        return Turn(*angles, q_norm, k_norm, joined)


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        wide, narrow, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        parts = gate_up_parts(wide)
        self.gate_up = JoinedLinear(narrow, parts, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(wide, narrow, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, norm: RMS) -> Array:
        """``x`` plus what it gives after ``norm``."""
        return self.down(self.gate_up.gated(x, norm), add=x)


class Block(nnx.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, dtype, rngs: nnx.Rngs | None):
        self.attention_norm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, dtype=dtype, rngs=rngs
        )
        self.attention = Attention(config, spec, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        foresee: Foresee | None = None,
    ):
        norm = self.attention_norm.rms
        x, cache = self.attention(x, norm, layer, angles, attend, cache, foresee)
        return self.mlp(x, self.mlp_norm.rms), cache

    def queries(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """The queries of its attention for ``x``, which may be the input of another layer."""
        return self.attention.queries(x, self.attention_norm.rms, angles)


class Decoder(nnx.Module):
    """A causal language model of the Llama lineage; see `jspec.typing.Model` for its contract.

    Parameters are of ``dtype``, which is also the dtype of activations and of the cache. ``rngs``
    draws them; None leaves `jax.ShapeDtypeStruct` in their places, for a loader to fill.
    ``vocabulary_axes``: those of an enclosing `jax.shard_map` over which the vocabulary is sharded,
    in the embedding and in the logits.
    Raises `ValueError` for a layer whose values are in its keys, which no family here has.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs | None):
        for index, spec in enumerate(config.layers):
            if spec.values_in_keys:
                raise ValueError(
                    f"layers[{index}] has values_in_keys=True, which Decoder does not compute; "
                    "pass a model of your own that calls attend with v=None"
                )
        self.config = config
        self.vocabulary_axes: tuple[str, ...] = ()
        self.embedding = _normal((config.vocab_size, config.hidden_size), 0.02, dtype, rngs)
        self.layers = nnx.List(
            [Block(config, spec, dtype=dtype, rngs=rngs) for spec in config.layers]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs
            )

    @property
    def dtype(self):
        return self.embedding[...].dtype

    def angles(self, positions: Array, spec: LayerSpec) -> tuple[Array, Array]:
        """Rotary cosine and sine of ``positions [B, T]`` in a layer of ``spec``."""
        rope = self.config.ropes[spec.rope]
        frequencies, factor = rope_frequencies(spec.key_size, rope.theta, rope.scaling)
        return rope_angles(positions, jnp.asarray(frequencies), factor)

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[B, T, D]`` of ``tokens [B, T]``; padding takes any."""
        embedding = self.embedding[...]
        if not self.vocabulary_axes:
            return jnp.take(embedding, tokens, axis=0, mode="clip")
        tokens = tokens - lax.axis_index(self.vocabulary_axes) * len(embedding)
        found = jnp.take(embedding, tokens, axis=0, mode="clip")
        here = (tokens >= 0) & (tokens < len(embedding))
        return lax.psum(jnp.where(here[..., None], found, 0), self.vocabulary_axes)

    def __call__(self, tokens: Array, positions: Array, attend: Attend, cache):
        """What the last layer gives ``[B, T, D]`` for ``tokens [B, T]``, and the cache after it."""
        x = self.embed(tokens)
        kinds = [(spec.rope, spec.key_size) for spec in self.config.layers]
        specs = dict(zip(kinds, self.config.layers, strict=True))
        angles = {kind: self.angles(positions, spec) for kind, spec in specs.items()}
        foresees = getattr(attend, "foresees", False)
        for index, block in enumerate(self.layers):
            more = {}
            if foresees and index + 1 < len(kinds):
                following, turned = self.layers[index + 1], angles[kinds[index + 1]]
                more = {"foresee": functools.partial(following.queries, x, turned)}
            x, cache = block(x, index, angles[kinds[index]], attend, cache, **more)
        return x, cache

    def logits(self, hidden: Array) -> Array:
        """Next-token logits, float32 ``[..., V]``, of what `__call__` gives."""
        embedding, norm = self.embedding[...], self.norm.rms
        if self.head is None:
            return linear(hidden, embedding, norm=norm, transposed=True, dtype=jnp.float32)
        return linear(hidden, self.head.kernel.get_value(), norm=norm, dtype=jnp.float32)
