"""One Flax NNX decoder for every family: RMSNorm, RoPE, grouped-query attention, gated MLP.

The attention itself is an argument, so dense, sparse and sharded decoding share this code.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jspec.config import LayerSpec, ModelConfig
from jspec.models.experts import MixtureOfExperts
from jspec.models.joined import qkv_parts
from jspec.models.latent import LatentAttention
from jspec.models.modules import MLP, JoinedLinear, Linear, NextQueries, RMSNorm, constant, normal
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


class Attention(nnx.Module):
    """Projections, optional QK norm and rotation around ``attend``."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, dtype, rngs: nnx.Rngs | None):
        width, outputs = config.hidden_size, config.num_heads * spec.value_size
        parts = qkv_parts(config.num_heads, spec)
        self.qkv = JoinedLinear(width, parts, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(outputs, width, bias=config.out_bias, dtype=dtype, rngs=rngs)
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.q_norm = _norm(config, spec.key_size, **options) if config.qk_norm else None
        self.k_norm = _norm(config, spec.key_size, **options) if config.qk_norm else None
        self.post_norm = _norm(config, width, **options) if config.post_norms else None
        self.sinks = constant((config.num_heads,), 0.0, dtype, rngs) if config.sinks else None

    def __call__(
        self,
        x: Array,
        norm: RMS,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
        joined: Array | None = None,
    ):
        """``x`` plus what attention gives for it after ``norm``, and the cache.

        ``joined``: the projections, where the layer before gave them.
        """
        joined = self.qkv.joined(x, norm) if joined is None else joined
        out, cache = self.attended(joined, layer, angles, attend, cache, next_queries)
        if self.post_norm is None:
            return self.out(out, add=x), cache
        return x + self.post_norm(self.out(out)), cache

    def attended(
        self,
        joined: Array,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
    ):
        """What heads read ``[B, T, N * H']`` for their projections ``joined``, and the cache."""
        q, k, v = self.qkv.split(joined)
        q = q.reshape(*joined.shape[:2], -1, k.shape[-1])
        qk_rope = self.qk_rope(angles, joined)
        more: dict[str, Any] = {}
        if self.sinks is not None:
            more["sinks"] = self.sinks[...].astype(jnp.float32)
        if getattr(attend, "accepts_qk_rope", False):
            rotating: Any = attend  # it takes more than `Attend` says
            if next_queries is not None:
                more["next_queries"] = next_queries
            out, cache = rotating(layer, q, k, v, cache, qk_rope=qk_rope, **more)
        else:
            out, cache = attend(layer, *qk_rope(q, k), v, cache, **more)
        return out.reshape(*out.shape[:2], -1), cache

    def queries(self, x: Array, norm: RMS, angles: tuple[Array, Array]) -> Array:
        """The queries ``[B, T, N, H]`` of ``x`` after ``norm``, rotated."""
        joined = self.qkv.joined(x, norm)
        q, k, _ = self.qkv.split(joined)
        return self.qk_rope(angles, joined)(q.reshape(*x.shape[:2], -1, k.shape[-1]), k)[0]

    def qk_rope(self, angles: tuple[Array, Array], joined: Array) -> QKRope:
        """What is to be done to queries and keys that are slices of ``joined``."""
        q_norm, k_norm = (None if norm is None else norm.rms for norm in (self.q_norm, self.k_norm))
        return QKRope(*angles, q_norm, k_norm, joined)


class Block(nnx.Module):
    """A pre-norm decoder layer, the one of number ``layer``."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
        width, experts = config.hidden_size, config.experts
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = _norm(config, width, **options)
        if config.latent is None:
            self.attention = Attention(config, config.layers[layer], **options)
        else:
            self.attention = LatentAttention(config, **options)
        self.mlp_norm = _norm(config, width, **options)
        if experts is None or layer in experts.dense_layers:
            post_norm = _norm(config, width, **options) if config.post_norms else None
            options |= {"activation": config.activation, "post_norm": post_norm}
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
        """What it gives for ``x``, the projections of the next layer, and the cache.

        ``joined``: its own projections, where the layer before gave them. ``following``: the next
        layer. Projections are None where the products behind attention are no chain.
        """
        norm, ops = self.attention_norm.rms, self._chain_ops(x, following)
        attention: Any = self.attention
        if ops is None:
            projections = {} if joined is None else {"joined": joined}
            x, cache = attention(x, norm, layer, angles, attend, cache, next_queries, **projections)
            return self.mlp(x, self.mlp_norm.rms), None, cache
        joined = attention.qkv.joined(x, norm) if joined is None else joined
        out, cache = attention.attended(joined, layer, angles, attend, cache, next_queries)
        _attended, _activated, x, *projections = linear_chain(out, ops)
        return x, projections[0] if projections else None, cache

    def _chain_ops(self, x: Array, following: Block | None) -> list[ChainOp] | None:
        """What comes behind attention up to the projections of the next layer, or None."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
            return None
        out = attention.out.chain_op(add=x)
        behind = mlp.chain_ops(
            self.mlp_norm.rms, x=0
        )  # none with norms behind, as behind attention
        if out is None or behind is None:
            return None
        ops = [out, *behind]
        if following is not None and isinstance(following.attention, Attention):
            ops.append(following.attention.qkv.chain_op(following.attention_norm.rms))
        return ops

    def queries(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """The queries of its attention for ``x``, which may be the input of another layer."""
        return self.attention.queries(x, self.attention_norm.rms, angles)


class Decoder(nnx.Module):
    """A causal language model as Llama, Gemma or DeepSeek; `jspec.typing.Model` is its contract.

    Parameters are of ``dtype``, which is also the dtype of activations and of the cache. ``rngs``
    draws them; None leaves `jax.ShapeDtypeStruct` in their places, for a loader to fill.
    ``vocabulary_axes``: those of an enclosing `jax.shard_map` over which the vocabulary is sharded,
    in the embedding and in the logits.
    Raises `ValueError` for a layer whose values are in its keys without `ModelConfig.latent`.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs | None):
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
        """Rotary cosine and sine of ``positions [B, T]`` in a layer of ``spec``."""
        rope, latent = self.config.ropes[spec.rope], self.config.latent
        size = spec.key_size if latent is None else latent.rope_size
        frequencies, factor = rope_frequencies(size, rope.theta, rope.scaling)
        return rope_angles(positions, jnp.asarray(frequencies), factor)

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[B, T, D]`` of ``tokens [B, T]``, scaled; padding takes any."""
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
        """What the last layer gives ``[B, T, D]`` for ``tokens [B, T]``, and the cache after it."""
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
        """Next-token logits, float32 ``[..., V]``, of what `__call__` gives."""
        embedding, norm = self.embedding[...], self.norm.rms
        if self.head is None:
            logits = linear(hidden, embedding, norm=norm, transposed=True, dtype=jnp.float32)
        else:
            logits = linear(hidden, self.head.kernel.get_value(), norm=norm, dtype=jnp.float32)
        return capped(logits, self.config.logit_softcap)
