"""Multi-head latent attention: one latent a token in the cache, which all heads read."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.joined import down_parts
from jspec.models.modules import JoinedLinear, Kernel, Linear, NextQueries, RMSNorm
from jspec.models.rope import rotate_pairs
from jspec.ops.norm import RMS
from jspec.typing import Array, Attend

EPS = 1e-6  # of the norms of both latents, whatever config.json says of the others


class LatentAttention(nnx.Module):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434, section 2.1), absorbed.

    The key and the value of a head are linear maps of the cached latent. The query is multiplied by
    the transposed map of the key, so that heads attend to the latents themselves, and the output is
    multiplied by the map of the value: keys and values of heads are never computed.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        latent = config.latent
        assert latent is not None
        self.latent, self.num_heads = latent, config.num_heads
        queries = config.num_heads * latent.query_size
        parts = down_parts(config.num_heads, latent)
        plain: Any = {"bias": False, "dtype": dtype, "rngs": rngs}
        norm: Any = {"eps": EPS, "dtype": dtype, "rngs": rngs}
        self.down = JoinedLinear(config.hidden_size, parts, **plain)
        if latent.query_rank is None:
            self.q_norm = self.q_up = None
        else:
            self.q_norm = RMSNorm(latent.query_rank, **norm)
            self.q_up = Linear(latent.query_rank, queries, **plain)
        self.kv_norm = RMSNorm(latent.rank, **norm)
        heads = config.num_heads * (latent.plain_size + latent.value_size)
        self.kv_up = Kernel((latent.rank, heads), latent.rank**-0.5, dtype=dtype, rngs=rngs)
        self.out = Linear(config.num_heads * latent.value_size, config.hidden_size, **plain)

    def __call__(
        self,
        x: Array,
        norm: RMS,
        layer: int,
        angles: tuple[Array, Array],
        attend: Attend,
        cache,
        next_queries: NextQueries | None = None,
    ):
        """Add attention of ``norm(x)`` to ``x``; arguments and results as in `Attention`."""
        q, projected = self.down(x, norm)
        latents, shared = jnp.split(projected, [self.latent.rank], axis=-1)
        k = jnp.concatenate([self.kv_norm(latents), rotate_pairs(shared, *angles)], axis=-1)
        up = jnp.moveaxis(self._maps[1], 1, 0)
        attending: Any = attend  # it takes more than `Attend` says
        more = {} if next_queries is None else {"next_queries": next_queries}
        out, cache = attending(layer, self._absorbed(q, angles), k, None, cache, up=up, **more)
        return self.out(out.reshape(*out.shape[:2], -1), add=x), cache

    def queries(self, x: Array, norm: RMS, angles: tuple[Array, Array]) -> Array:
        """The queries ``[B, T, N, rank + rope_size]`` of ``norm(x)``."""
        return self._absorbed(self.down(x, norm)[0], angles)

    @property
    def _maps(self) -> tuple[Array, Array]:
        """The maps of the latent to keys and values.

        They are ``[rank, N, plain_size]`` and ``[rank, N, value_size]``.
        """
        maps = self.kv_up.kernel[...].reshape(self.latent.rank, self.num_heads, -1)
        return maps[..., : self.latent.plain_size], maps[..., self.latent.plain_size :]

    def _absorbed(self, q: Array, angles: tuple[Array, Array]) -> Array:
        """Queries over latents and rotated keys, ``[B, T, N, rank + rope_size]``.

        ``q``: the latent of the queries ``[B, T, 1, query_rank]``, or the queries themselves
        ``[B, T, 1, N * query_size]`` where they have no latent.
        """
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(q[:, :, 0], norm=self.q_norm.rms)
        q = q.reshape(*q.shape[:2], self.num_heads, self.latent.query_size)
        plain, rotated = jnp.split(q, [self.latent.plain_size], axis=-1)
        absorbed = jnp.einsum(
            "btnp,rnp->btnr", plain, self._maps[0], preferred_element_type=jnp.float32
        )
        rotated = rotate_pairs(rotated, *angles)
        return jnp.concatenate([absorbed.astype(q.dtype), rotated], axis=-1)
