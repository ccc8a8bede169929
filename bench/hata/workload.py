"""A decoding layer's attention through a policy: the program, its cache, and the bytes it needs.

The program is what a model's layer runs between its projections: a new token's key and value, and
what the policy keeps of it, go into the cache; the policy selects; attention reads the selection.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.caches import DTYPE, bytes_of
from bench.cases import heads
from bench.decode.shapes import noise
from bench.policies import policies as named
from bench.policies import scored_bytes
from jspec.cache import Cache, LinearLayout
from jspec.config import LayerSpec
from jspec.ops.append import QKRope
from jspec.policies import Dense, Policy
from jspec.policies.attend import SelectedAttend
from jspec.policies.pass_state import PassState
from jspec.policies.policy import create_cache, with_pages
from jspec.typing import Array

CHUNK = 1024  # tokens whose columns are made at once
Output = tuple[Array, Array | None]  # of attention, and the positions that were selected


def policies(case: Mapping[str, Any]) -> dict[str, Policy]:
    """The policies of a case by name."""
    return named(case["n"], bits=case["R"], channels=case["channels"])


def spec_of(case: Mapping[str, Any]) -> LayerSpec:
    """The layer of a case."""
    return LayerSpec(heads(case)[1], case["H"], case["H"])


def needed(policy: Policy, case: Mapping[str, Any]) -> int:
    """Bytes that a step must read and write: what the policy scores, and what attention reads.

    The policy's columns of every token, for exact top-k its key; keys and values of the selected
    tokens and the new one; queries and outputs.
    """
    batch, slots = case["B"], case["S"]
    reads = slots if isinstance(policy, Dense) else case["n"] + 1
    scored = batch * slots * scored_bytes(policy, spec_of(case), DTYPE)
    return int(scored) + bytes_of(batch * reads, {**case, "T": 1})


@dataclasses.dataclass(frozen=True)
class Token:
    """The projections of the new token: ``joined [B, 1, K, G * H + 2 * H]``.

    The rotation by ``cosine`` and ``sine [B, 1, 1, H / 2]`` is by 0 degrees, so that queries and
    keys are known exactly. ``context_len`` int32 ``[B]``: the position.
    """

    joined: Array
    cosine: Array
    sine: Array
    context_len: Array

    def parts(self) -> tuple[Array, Array, Array]:
        """Queries ``[B, 1, N, H]``, key and value ``[B, 1, K, H]``."""
        size = 2 * self.cosine.shape[-1]
        queries = self.joined.shape[-1] - 2 * size
        q, k, v = jnp.split(self.joined, [queries, queries + size], axis=-1)
        return q.reshape(*q.shape[:2], -1, size), k, v


jax.tree_util.register_dataclass(Token)


def token(case: Mapping[str, Any]) -> Token:
    """The new token of every row, at the last slot."""
    (query_heads, kv_heads), batch, size = heads(case), case["B"], case["H"]
    rng = np.random.default_rng([workload.SEED, batch, query_heads])
    columns = (query_heads // kv_heads + 2) * size
    joined = rng.standard_normal((batch, 1, kv_heads, columns), np.float32)
    angles = (batch, 1, 1, size // 2)
    context_len = np.full(batch, case["S"] - 1, np.int32)
    return Token(
        jnp.asarray(joined, DTYPE), jnp.ones(angles), jnp.zeros(angles), jnp.asarray(context_len)
    )


@functools.cache
def program(policy: Policy) -> Callable[..., tuple[Cache, Output]]:
    """``(policy_params, cache, token) -> cache, output`` of a layer; the cache is to be donated."""

    def step(policy_params: Any, cache: Cache, token: Token) -> tuple[Cache, Output]:
        q, k, v = token.parts()
        qk_rope = QKRope(token.cosine, token.sine, joined=token.joined)
        context_len = token.context_len
        attend: Any = SelectedAttend(
            context_len[:, None], context_len, 1, policy=policy, policy_params=policy_params
        )
        out, pass_state = attend(0, q, k, v, PassState(cache), qk_rope=qk_rope)
        after = with_pages(policy, policy_params, pass_state.cache, context_len, context_len + 1, 1)
        return after, (out, pass_state.selections[0])

    return step


def empty(policy: Policy, case: Mapping[str, Any]) -> Cache:
    """A layer's cache as shapes."""
    spec, layout = spec_of(case), LinearLayout(case["S"])
    return jax.eval_shape(lambda: create_cache(policy, [spec], [layout], case["B"], DTYPE))


def filled(policy: Policy, policy_params: Any, case: Mapping[str, Any]) -> Cache:
    """The cache with random keys and values, and the policy's columns and pages for them."""
    cache = empty(policy, case)
    columns = {
        name: noise(seed, jnp.float32(1), x.shape, x.dtype, parts=case["B"])
        for seed, name in enumerate(("keys", "values"))
        for x in (cache.columns[0][name],)
    }
    encoded = _encoded(policy, policy_params, columns["keys"])
    columns |= {name: x.astype(cache.columns[0][name].dtype) for name, x in encoded.items()}
    context_len = np.full(case["B"], case["S"] - 1, np.int32)
    pages = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache.pages)
    cache = dataclasses.replace(
        cache, columns=(columns,), lengths=jnp.asarray(context_len), pages=pages
    )
    return _folded(policy, policy_params, cache, np.zeros_like(context_len), context_len, case["S"])


_folded = jax.jit(with_pages, static_argnums=(0, 5), donate_argnums=2)


@functools.partial(jax.jit, static_argnums=0)
def _encoded(policy: Policy, policy_params: Any, k: Array) -> dict[str, Array]:
    """The policy's columns of all keys ``[B, S, K, H]``, computed in chunks."""
    batch, slots = k.shape[:2]
    chunks = k.reshape(batch, -1, math.gcd(slots, CHUNK), *k.shape[2:])
    encode = policy.encoder(policy_params, 0)
    columns = jax.lax.map(lambda x: encode(x, None), jnp.moveaxis(chunks, 1, 0))
    return {
        name: jnp.moveaxis(x, 0, 1).reshape(batch, slots, *x.shape[3:])
        for name, x in columns.items()
    }
