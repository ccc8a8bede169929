"""HATA: keys whose hash codes share the most bits with the query's (arXiv 2506.02572)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, LinearLayout
from jspec.cache.cache import Shapes
from jspec.config import LayerSpec
from jspec.dispatch import named_backend
from jspec.models.hashes import Hashes, bits_of, check_hashes, check_model, load_hashes
from jspec.ops.attention.hashed import PARTS, hash_attention
from jspec.ops.hash import BITS, hamming_scores, hash_encode
from jspec.ops.hash_selection import hash_select
from jspec.policies.budgeted import ScoredPolicy
from jspec.policies.policy import Encoder, HashEncoder, Policy, SampleKeys, TokenAttention
from jspec.policies.scores import best_positions
from jspec.policies.selection import NewTokens, Selection
from jspec.typing import Array, Model


@dataclasses.dataclass(frozen=True)
class Hata(ScoredPolicy):
    """Hash codes of ``bits`` bits, compared by their Hamming distance (algorithms 1 to 3).

    A code is the signs of a key's matmul with a matrix of its KV head. Each token keeps the code of
    its key; that of a query is computed when it scores, and shared bits are summed over a KV head's
    group.

    Attributes:
        bits: Bits of a code.
        norms: Whether a score is multiplied by the key's norm, which is then stored too, as in the
            authors' code.
        hashes: A folder that `jspec train-hash` wrote; without one the matrices are random.
        seed: Of the random matrices.
    """

    bits: int = 128
    norms: bool = False
    hashes: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))}")

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        if layer < self.dense_layers:
            return {}
        codes = {"codes": ((spec.kv_heads, self.bits // 32), jnp.uint32)}
        return codes | ({"norms": ((spec.kv_heads,), jnp.float32)} if self.norms else {})

    def prepare(self, model: Model, sample_keys: SampleKeys | None) -> Any:
        """Matrices of each layer, float32 ``[K, H, bits]``."""
        specs = model.config.layers
        if self.hashes:
            return self._trained(model)
        rng = np.random.default_rng(self.seed)
        shapes = [(spec.kv_heads, spec.key_size, self.bits) for spec in specs]
        return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def _trained(self, model: Model) -> Hashes:
        trained_bits = bits_of(self.hashes)
        if trained_bits != self.bits:
            raise ValueError(
                f"hashes in {self.hashes} have {trained_bits} bits, but bits={self.bits}; pass "
                f"bits={trained_bits}, or train others by `jspec train-hash --bits {self.bits}`"
            )
        hashes = load_hashes(self.hashes)
        check_hashes(hashes, model.config.layers)
        check_model(self.hashes, model)
        return hashes

    def encoder(self, policy_params: Any, layer: int) -> Encoder:
        codes = HashEncoder(policy_params[layer])
        if not self.norms:
            return codes
        return lambda k, v: {
            **codes(k, v),
            "norms": jnp.linalg.norm(k.astype(jnp.float32), axis=-1),
        }

    def score(self, policy_params: Any, layer: int, cache: Cache, q: Array) -> Array:
        columns = cache.columns[layer]
        return hamming_scores(
            hash_encode(q, policy_params[layer]), columns["codes"], norms=columns.get("norms")
        )

    def best(
        self, policy_params: Any, layer: int, cache: Cache, q: Array, k: int, **budget: Any
    ) -> Array:
        layout, codes = cache.layouts[layer], cache.columns[layer]["codes"]
        if self.norms:
            return super().best(policy_params, layer, cache, q, k, **budget)
        if not isinstance(layout, LinearLayout):
            shared = q.shape[1] * (q.shape[2] // codes.shape[2]) * self.bits
            scores = self.score(policy_params, layer, cache, q)
            return best_positions(scores, layout, k, highest=shared, **budget)
        return hash_select(hash_encode(q, policy_params[layer]), codes, k, **budget)

    def attend_token(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        token: NewTokens,
        context_len: Array,
        num_uncommitted: int,
    ) -> TokenAttention | None:
        spec = cache.specs[layer]
        # A subclass may score or select otherwise; a backend that is named for a part is to run.
        by_codes = type(self) is Hata and not self.norms and layer >= self.dense_layers
        named = any(map(named_backend, PARTS))
        q, k, v, qk_rope, positions = token
        if not by_codes or named or v is None or qk_rope is None or qk_rope.joined is None:
            return None
        names = ("keys", "values", "codes")
        cache.check_keeps(layer, names)
        keys, values, codes = (cache.columns[layer][name] for name in names)
        num_selected, budget = self.limits(cache.layouts[layer].capacity, context_len)
        out, lse, selected, *columns = hash_attention(
            *(q, k, v, qk_rope, keys, values, codes, policy_params[layer]),
            *(positions, context_len, num_selected),
            num_uncommitted=num_uncommitted,
            scale=spec.scale,
            softcap=spec.softcap,
            **budget,
        )
        cache = cache.replaced(layer, **dict(zip(names, columns, strict=True)))
        return TokenAttention(out, lse, Selection(selected, num_layers=self.every), cache)


def with_hashes(policy: Policy, folder: Path) -> Policy:
    """``policy`` with the trained hashes in ``folder``, where it is `Hata` and names none.

    It is unchanged where there is no such folder, or its hashes have other bits than the policy.
    """
    if not isinstance(policy, Hata) or policy.hashes or not folder.is_dir():
        return policy
    if bits_of(folder) != policy.bits:
        return policy
    return dataclasses.replace(policy, hashes=str(folder))
