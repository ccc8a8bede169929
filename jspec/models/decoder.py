"""One Flax NNX decoder for every family: RMSNorm, RoPE, grouped-query attention, gated MLP.

The attention itself is an argument, so dense, sparse and sharded decoding share this code.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jspec.config import LayerSpec, ModelConfig
from jspec.models.experts import MixtureOfExperts
from jspec.models.joined import qkv_parts
from jspec.models.latent import LatentAttention
from jspec.models.modules import (
    MLP,
    JoinedLinear,
    Linear,
    NextQueries,
    RMSNorm,
    add_output,
    constant,
    normal,
)
from jspec.models.rope import rope_angles, rope_frequencies
from jspec.ops.append import QKRope
from jspec.ops.attention.softmax import capped
from jspec.ops.linear import linear
from jspec.ops.linear_chain import ChainOp, linear_chain
from jspec.ops.norm import RMS
from jspec.typing import Array, Attend


def _norm(config: ModelConfig, size: int, *, dtype, rngs: nnx.Rngs | None) -> RMSNorm:
    centered = config.centered_norms
    return RMSNorm(size, eps=config.norm_eps, centered=centered, dtype=dtype, rngs=rngs)


def _rms(norm: RMSNorm | None) -> RMS | None:
    return None if norm is None else norm.rms


class Attention(nnx.Module):
    """Projections, optional QK norm and rotation around ``attend``."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, dtype, rngs: nnx.Rngs | None):
        width, outputs = config.hidden_size, config.num_heads * spec.value_size
        parts = qkv_parts(config.num_heads, spec)
        self.qkv = JoinedLinear(width, parts, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(outputs, width, bias=config.out_bias, dtype=dtype, rngs=rngs)
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.joint_norm = config.joint_qk_norm
        q_heads, k_heads = (config.num_heads, spec.kv_heads) if self.joint_norm else (1, 1)
        size = spec.key_size
        self.q_norm = _norm(config, q_heads * size, **options) if config.qk_norm else None
        self.k_norm = _norm(config, k_heads * size, **options) if config.qk_norm else None
        self.post_norm = _norm(config, width, **options) if config.post_norms else None
        self.residual_scale = config.residual_scale
        self.sinks = constant((config.num_heads,), 0.0, dtype, rngs) if config.sinks else None

    def __call__(
        self,
        x: Array,
        norm: RMS | None,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
        joined: Array | None = None,
    ):
        """Add attention of ``norm(x)`` to ``x``.

        Args:
            x: ``[B, T, D]``.
            norm: applied to ``x`` in front of the projections, if any.
            layer: index of the layer, for ``attend``.
            angles: rotary cosine and sine.
            attend: reads and writes ``cache``, as `jspec.typing.Attend`.
            cache: passed to ``attend``.
            next_queries: computes the queries of the next layer, for policies that prefetch.
            joined: the projections of ``norm(x)``, if the previous layer computed them.

        Returns:
            ``[B, T, D]`` and the cache.
        """
        joined = self.qkv.joined(x, norm) if joined is None else joined
        out, cache = self.attended(joined, layer, angles, attend, cache, next_queries)
        return add_output(x, out, self.out, self.post_norm, self.residual_scale), cache

    def attended(
        self,
        joined: Array,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
    ):
        """The outputs of heads ``[B, T, N * H']`` for projections ``joined``, and the cache."""
        q, k, v, qk_rope = self._projections(joined, angles)
        more: dict[str, Any] = {}
        if self.sinks is not None:
            more["sinks"] = self.sinks[...].astype(jnp.float32)
        if getattr(attend, "accepts_qk_rope", False):  # a plain function does not
            if next_queries is not None:
                more["next_queries"] = next_queries
            out, cache = attend(layer, q, k, v, cache, qk_rope=qk_rope, **more)
        else:
            out, cache = attend(layer, *qk_rope(q, k), v, cache, **more)
        return out.reshape(*out.shape[:2], -1), cache

    def queries(self, x: Array, norm: RMS | None, angles: tuple[Array, Array]) -> Array:
        """The rotated queries ``[B, T, N, H]`` of ``norm(x)``."""
        q, k, _, qk_rope = self._projections(self.qkv.joined(x, norm), angles)
        return qk_rope(q, k)[0]

    def _projections(
        self, joined: Array, angles: tuple[Array, Array]
    ) -> tuple[Array, Array, Array, QKRope]:
        """Queries ``[B, T, N, H]``, keys and values, and what is left to do with the first two."""
        q, k, v = self.qkv.split(joined)
        q_norm, k_norm = _rms(self.q_norm), _rms(self.k_norm)
        if self.joint_norm and q_norm is not None and k_norm is not None:
            q, k = (norm(x.reshape(*x.shape[:2], -1)) for norm, x in ((q_norm, q), (k_norm, k)))
            k = k.reshape(*v.shape[:-1], -1)
            qk_rope = QKRope(*angles)
        else:
            qk_rope = QKRope(*angles, q_norm, k_norm, joined)
        return q.reshape(*joined.shape[:2], -1, k.shape[-1]), k, v, qk_rope


class Block(nnx.Module):
    """The decoder layer of number ``layer``."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
        width, experts = config.hidden_size, config.experts
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = _norm(config, width, **options) if config.pre_norms else None
        if config.latent is None:
            self.attention = Attention(config, config.layers[layer], **options)
        else:
            self.attention = LatentAttention(config, **options)
        self.mlp_norm = _norm(config, width, **options) if config.pre_norms else None
        if experts is None or layer in experts.dense_layers:
            post_norm = _norm(config, width, **options) if config.post_norms else None
            options |= {"activation": config.activation, "post_norm": post_norm}
            options["residual_scale"] = config.residual_scale
            self.mlp = MLP(width, config.intermediate_size, bias=config.mlp_bias, **options)
        else:
            self.mlp = MixtureOfExperts(width, experts, **options)

    def __call__(
        self,
        x: Array,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
        joined: Array | None = None,
        following: Block | None = None,
    ):
        """Compute the layer and, where one chain of matmuls can, the next layer's projections.

        Args:
            x: ``[B, T, D]``.
            layer: index of the layer, for ``attend``.
            angles: rotary cosine and sine.
            attend: reads and writes ``cache``, as `jspec.typing.Attend`.
            cache: passed to ``attend``.
            next_queries: computes the queries of the next layer, for policies that prefetch.
            joined: the attention projections of this layer, if the previous layer computed them.
            following: the next layer.

        Returns:
            The output ``[B, T, D]``, the attention projections of ``following`` or None, and the
            cache.
        """
        norm, ops = _rms(self.attention_norm), self._chain_ops(x, following)
        attention: Any = self.attention
        mlp: Any = self.mlp
        if ops is None:
            projections = {} if joined is None else {"joined": joined}
            x, cache = attention(x, norm, layer, angles, attend, cache, next_queries, **projections)
            return mlp(x, _rms(self.mlp_norm)), None, cache
        joined = attention.qkv.joined(x, norm) if joined is None else joined
        out, cache = attention.attended(joined, layer, angles, attend, cache, next_queries)
        _attended, _activated, x, *projections = linear_chain(out, ops)
        return x, projections[0] if projections else None, cache

    def _chain_ops(self, x: Array, following: Block | None) -> list[ChainOp] | None:
        """The matmuls from attention to the next layer's projections, None if not one chain."""
        attention, mlp, norm = self.attention, self.mlp, _rms(self.mlp_norm)
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP) or norm is None:
            return None
        out = attention.out.chain_op(add=x)
        mlp_ops = mlp.chain_ops(norm, x=0)  # None where the output is normed or scaled
        if out is None or mlp_ops is None:
            return None
        ops = [out, *mlp_ops]
        if following is not None and isinstance(following.attention, Attention):
            norm = _rms(following.attention_norm)
            assert norm is not None, "all layers have the norms of one config"
            ops.append(following.attention.qkv.chain_op(norm))
        return ops

    def queries(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """The queries of its attention for ``x``, which may be the input of another layer."""
        attention: Any = self.attention
        return attention.queries(x, _rms(self.attention_norm), angles)


class Decoder(nnx.Module):
    """A causal language model such as Llama, Gemma or DeepSeek; implements `jspec.typing.Model`.

    Args:
        config: sizes and options of the architecture.
        dtype: of parameters, activations and the cache.
        rngs: draws the parameters. None leaves `jax.ShapeDtypeStruct` in their places, for a
            loader to fill.

    Attributes:
        vocabulary_axes: axes of an enclosing `jax.shard_map` over which the vocabulary is sharded,
            in the embedding and in the logits.

    Raises:
        ValueError: a layer has ``values_in_keys`` without `ModelConfig.latent`.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None
    ):
        for index, spec in enumerate(config.layers):
            if spec.values_in_keys and config.latent is None:
                raise ValueError(
                    f"layers[{index}] has values_in_keys=True, which Decoder does not compute "
                    "without ModelConfig.latent; give it, or pass a model of your own that calls "
                    "attend with v=None"
                )
        self.config = config
        self.vocabulary_axes: tuple[str, ...] = ()
        self.embedding = normal((config.vocab_size, config.hidden_size), 0.02, dtype, rngs)
        self.layers = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.norm = _norm(config, config.hidden_size, dtype=dtype, rngs=rngs)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs
            )

    @property
    def dtype(self):
        return self.embedding.get_value().dtype

    def angles(self, positions: Array, spec: LayerSpec) -> tuple[Array, Array]:
        """Compute the rotary angles of a layer.

        Args:
            positions: int32 ``[B, T]``.
            spec: the layer.

        Returns:
            Cosine and sine, float32 ``[B, T, 1, H / 2]``; 1 and 0 where nothing is rotated. H is
            the size of a key, with latents that of its rotated part.
        """
        rope, latent = self.config.ropes[spec.rope], self.config.latent
        size = spec.key_size if latent is None else latent.rope_size
        frequencies, factor = rope_frequencies(size, rope)
        angles = jnp.asarray(frequencies)
        if rope.rotated is None:
            return rope_angles(positions, angles, factor)
        # Channels that are not rotated are not scaled either.
        factors = np.where(frequencies > 0, factor, 1.0).astype(np.float32)
        return rope_angles(positions, angles, factors)

    def embed(self, tokens: Array) -> Array:
        """Look up token embeddings, scaled by ``config.embedding_scale``.

        Args:
            tokens: int32 ``[B, T]``; padding (-1) gets the embedding of another token.

        Returns:
            ``[B, T, D]``, of the model's dtype.
        """
        embedded, scale = self._lookup(tokens), self.config.embedding_scale
        return embedded if scale is None else embedded * jnp.asarray(scale, embedded.dtype)

    def _lookup(self, tokens: Array) -> Array:
        """The rows of the embedding."""
        embedding = self.embedding[...]
        if not self.vocabulary_axes:
            return jnp.take(embedding, tokens, axis=0, mode="clip")
        tokens = tokens - lax.axis_index(self.vocabulary_axes) * len(embedding)
        embedded = jnp.take(embedding, tokens, axis=0, mode="clip")
        is_local = (tokens >= 0) & (tokens < len(embedding))
        return lax.psum(jnp.where(is_local[..., None], embedded, 0), self.vocabulary_axes)

    def __call__(self, tokens: Array, positions: Array, attend: Attend, cache):
        """Run all layers.

        Args:
            tokens: int32 ``[B, T]``, -1 for padding.
            positions: int32 ``[B, T]``, -1 for padding.
            attend: reads and writes ``cache``, as `jspec.typing.Attend`.
            cache: passed to ``attend``.

        Returns:
            The output of the last layer ``[B, T, D]``, before the final norm, and the cache.
        """
        x = self.embed(tokens)
        kinds = [(spec.rope, spec.key_size) for spec in self.config.layers]
        specs = dict(zip(kinds, self.config.layers, strict=True))
        angles = {kind: self.angles(positions, spec) for kind, spec in specs.items()}
        accepts_next_queries = getattr(attend, "accepts_next_queries", False)
        blocks, joined = list(self.layers), None
        for index, (block, following) in enumerate(zip(blocks, [*blocks[1:], None], strict=True)):
            more = {}
            if accepts_next_queries and following is not None:
                next_angles = angles[kinds[index + 1]]
                more = {"next_queries": functools.partial(following.queries, x, next_angles)}
            x, joined, cache = block(
                *(x, index, angles[kinds[index]], attend, cache),
                joined=joined,
                following=following,
                **more,
            )
        return x, cache

    def logits(self, hidden: Array) -> Array:
        """Compute next-token logits.

        Args:
            hidden: ``[..., D]``, the output of `__call__`.

        Returns:
            float32 ``[..., V]``.
        """
        embedding, norm = self.embedding[...], self.norm.rms
        if self.head is None:
            logits = linear(hidden, embedding, norm=norm, transposed=True, dtype=jnp.float32)
        else:
            logits = linear(hidden, self.head.kernel.get_value(), norm=norm, dtype=jnp.float32)
        scale = self.config.logit_scale
        return capped(logits if scale is None else logits * scale, self.config.logit_softcap)
