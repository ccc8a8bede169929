"""Top-k attention by hash codes: its operations, a layer of each policy, a cache in host memory."""

from __future__ import annotations

from bench.hata import codes, layer, off
from bench.suite import suite_of

SUITE = suite_of(
    "hata",
    "a layer's attention by every policy against the fastest dense attention, hash codes, and a "
    "step with the cache in host memory",
    layer.BENCHMARK,
    *codes.BENCHMARKS,
    off.BENCHMARK,
)
