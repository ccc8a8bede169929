"""The policies that the suites on HATA compare, and the bytes that each reads to select."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench import workload
from jspec.config import LayerSpec
from jspec.policies import Dense, ExactTopK, Hata, HataOff, Loki, MagicPIG, Policy, Quest, Streaming

SAMPLE = 256  # tokens of the sample that Loki and MagicPIG are prepared with
SINKS = 16  # of streaming


def policies(
    count: int, *, bits: int = 128, channels: int = 32, dense_layers: int = 0
) -> dict[str, Policy]:
    """The policies by name, each with a budget of ``count`` positions.

    ``bits`` of HATA's codes; ``channels`` of Loki.
    """
    scored: dict[str, Any] = {"budget": count, "dense_layers": dense_layers}
    sinks = min(SINKS, count - 1)
    return {
        "dense": Dense(),
        "hata": Hata(**scored, bits=bits),
        "hata_off": HataOff(**scored, bits=bits),
        "quest_16": Quest(**scored, page=16),
        "quest_32": Quest(**scored, page=32),
        "loki": Loki(**scored, channels=channels),
        "magicpig": MagicPIG(**scored),
        "exact_topk": ExactTopK(**scored),
        "streaming": Streaming(sinks=sinks, window=count - sinks),
    }


NAMES = tuple(policies(512))


def scored_bytes(policy: Policy, spec: LayerSpec, dtype: Any) -> float:
    """Bytes of a token that the policy reads to score it, in all KV heads of a layer that selects.

    These are its extra columns and pages; for exact top-k the key. ``dtype``: of the keys.
    """

    def size(columns: Mapping[str, Any]) -> int:
        return sum(
            math.prod(x) * jnp.dtype(column_dtype or dtype).itemsize
            for x, column_dtype in columns.values()
        )

    if isinstance(policy, ExactTopK):
        return spec.kv_heads * spec.key_size * jnp.dtype(dtype).itemsize
    layer = getattr(policy, "dense_layers", 0)  # the first one that selects
    pages = policy.pages(layer, spec)
    return size(policy.columns(layer, spec)) + (size(pages.shapes) / pages.size if pages else 0)


def arrays_of(policy: Policy, specs: Sequence[LayerSpec]) -> Any:
    """The arrays of a policy, prepared from random sample keys."""
    rng = np.random.default_rng(workload.SEED)
    sample = [
        rng.standard_normal((SAMPLE, spec.kv_heads, spec.key_size), np.float32) for spec in specs
    ]
    model: Any = SimpleNamespace(config=SimpleNamespace(layers=tuple(specs)))
    return policy.prepare(model, lambda: sample)
