"""Top-k attention by hash codes: a layer of each policy, and the operations on codes."""

from __future__ import annotations

from bench.hata import codes, layer, parts
from bench.suite import suite_of

SUITE = suite_of(
    "hata",
    "a layer's attention by every policy against the fastest dense attention, and hash codes",
    layer.BENCHMARK,
    parts.BENCHMARK,
    *codes.BENCHMARKS,
)
