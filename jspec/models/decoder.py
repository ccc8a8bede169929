"""One Flax NNX decoder for every family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The attention itself is an argument, so dense, sparse and sharded decoding share this code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.rope import rope_angles, rope_frequencies, rotate
from jspec.typing import Array, Attend


class Linear(nnx.Module):
    """``x @ kernel + bias``, ``kernel [in, out]``; sums in float32, returns the dtype of ``x``."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        scale = inputs**-0.5
        kernel = scale * jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = jnp.dot(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[None, None]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(self.scale[...], range(x.ndim - 1))


class Attention(nnx.Module):
    """Projections, optional QK norm and rotation around ``attend``."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        queries = config.num_heads * config.layers[0].key_size
        keys = config.layers[0].kv_heads * config.layers[0].key_size
        bias = config.qkv_bias
        self.q = Linear(config.hidden_size, queries, bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(config.hidden_size, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(config.hidden_size, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.out = Linear(queries, config.hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.layers[0].key_size, eps=config.norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.layers[0].key_size, eps=config.norm_eps, dtype=dtype)
        else:
            self.q_norm = self.k_norm = None
        self.head_size = config.layers[0].key_size

    def __call__(self, x: Array, layer: int, angles: tuple[Array, Array], attend: Attend, cache):
        def heads(y: Array) -> Array:
            return y.reshape(*y.shape[:2], -1, self.head_size)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(layer, rotate(q, *angles), rotate(k, *angles), v, cache)
        return self.out(out.reshape(*out.shape[:2], -1)), cache


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        wide, narrow, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate = Linear(narrow, wide, bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(narrow, wide, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(wide, narrow, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, layer: int, angles: tuple[Array, Array], attend: Attend, cache):
        y, cache = self.attention(self.attention_norm(x), layer, angles, attend, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A causal language model of the Llama lineage; see `jspec.typing.Model` for its contract.

    Parameters are of ``dtype``, which is also the dtype of activations and of the cache.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        embedding = 0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.embedding = nnx.Param(embedding.astype(dtype))
        self.layers = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs
            )

    @property
    def dtype(self):
        return self.embedding[...].dtype

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Rotary cosine and sine of ``positions [B, T]``."""
        config = self.config
        frequencies, factor = rope_frequencies(
            config.layers[0].key_size, config.ropes[0].theta, config.ropes[0].scaling
        )
        return rope_angles(positions, jnp.asarray(frequencies), factor)

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[B, T, D]`` of ``tokens [B, T]``; padding takes any."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def __call__(self, tokens: Array, positions: Array, attend: Attend, cache):
        """Final hidden states ``[B, T, D]`` of ``tokens [B, T]``, and the cache ``attend`` left."""
        x = self.embed(tokens)
        angles = self.angles(positions)
        for index, block in enumerate(self.layers):
            x, cache = block(x, index, angles, attend, cache)
        return self.norm(x), cache

    def logits(self, hidden: Array) -> Array:
        """Next-token logits, float32 ``[..., V]``."""
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
