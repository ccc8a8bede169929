"""What each kernel of HATA's layer gains: from XLA with a real top-k to one operation.

Figure 9 of HATA (arXiv 2506.02572) starts from its operations in PyTorch, whose top-k is a
selection. XLA's is a full sort, over which any kernel would win: so *plain* is XLA but for the
selection, which is jspec's kernel without the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench import point
from bench.cases import Case
from bench.hata.layer import complete, layer_rows
from bench.hata.workload import policies, program
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.dispatch import use_backends

PLAIN = {
    "rotate_append_encode": "xla",
    "hash_encode": "xla",
    "hash_select": "two_steps",
    "hamming_scores": "xla",
    "select": "cuda",
    "gathered_attention": "xla",
}
# In the paper's order; each stage has the kernels of the stages before it.
STAGES: dict[str, Mapping[str, str]] = {
    "plain": PLAIN,
    "score": {"hamming_scores": "triton"},
    "select": {"hash_select": "cuda"},  # counts scores while it computes them
    "fused_attention": {"gathered_attention": "triton"},  # reads the selection in place
    "encode": {"rotate_append_encode": "triton", "hash_encode": "triton"},  # encodes as it appends
}
WHOLE = "one_operation"


def stages() -> dict[str, Mapping[str, str]]:
    """The backends of each stage, and of the layer as one operation."""
    named: dict[str, str] = {}
    result: dict[str, Mapping[str, str]] = {}
    for name, more in STAGES.items():
        named = {**named, **more}
        result[name] = named
    return result | {WHOLE: {"hash_attention": "cuda"}}


def rows(case: Case, settings: Settings) -> Iterator[point.Row]:
    """A row for each stage."""
    policy = policies(case)["hata"]
    layers = {name: (policy, by(named, program(policy))) for name, named in stages().items()}
    yield from layer_rows("hata_parts", case, settings, layers)


def by(named: Mapping[str, str], step: Callable[..., Any]) -> Callable[..., Any]:
    """The function ``step``, traced with these backends."""

    def run(*arguments: Any) -> Any:
        with use_backends(named):
            return step(*arguments)

    return run


BENCHMARK = Benchmark(
    name="hata_parts",
    names=tuple(stages()),
    rows=rows,
    complete=complete,
    default={"B": 8, "S": 32768, "heads": "32/32", "H": 128, "n": 0, "R": 128, "channels": 32},
    gpu=["", "heads=32/8", "B=1,S=128K", "B=1,S=128K,heads=32/8"],
    quick=["", "heads=32/8"],
    cpu=["B=1,S=8K,heads=8/2"],
)
