"""One layer's attention at a decoding step: every policy against the fastest dense attention.

The shapes are those of figure 5 of HATA (arXiv 2506.02572). A policy's row is all that a layer does
between its projections, as `bench.hata.workload.program` runs it; the rows of dense attention are
attention alone.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from bench import point
from bench.attention import attention_setup
from bench.cases import Case, product
from bench.hata.check import is_right
from bench.hata.workload import empty, filled, needed, policies, program, spec_of, token
from bench.policies import NAMES, arrays_of
from bench.program import Absent, Program, Source, compile_all, failure, shapes
from bench.rivals import attention as rivals
from bench.settings import Settings
from bench.suite import Benchmark, OperationBenchmark
from jspec.cache import Cache
from jspec.ops.attention.dense import ATTENTION
from jspec.policies import Policy

Step = Callable[..., Any]
SHARE = 64  # one slot in 64 is selected: 1.56 %
# On a GPU, XLA's attention autotunes for long and never wins.
SLOW = ("xla", "xla_blocked")


def complete(case: Case) -> Case:
    """The case with the number of selected slots; raises `ValueError` for one without sense."""
    case["n"] = case["n"] or case["S"] // SHARE
    if case["n"] >= case["S"]:
        raise ValueError(f"n={case['n']} must be below S={case['S']}")
    policies(case)  # which check their own options
    return case


def rows(case: Case, settings: Settings) -> Iterator[point.Row]:
    """A layer of each policy, and dense attention."""
    yield from dense_rows(case, settings)
    yield from policy_rows(case, settings)


def dense_rows(case: Case, settings: Settings) -> list[point.Row]:
    """The rows of attention over the whole cache, by all that may be the fastest."""
    if not settings.only and jax.default_backend() == "gpu":
        names = (*ATTENTION.backends, *rivals.NAMES)
        settings = dataclasses.replace(settings, only=tuple(x for x in names if x not in SLOW))
    dense = OperationBenchmark(
        operation=ATTENTION,
        setup=lambda case: attention_setup(case | {"T": 1, "lengths": "full"}),
        default={},
        gpu=(),
        quick=(),
        cpu=(),
    )
    return [
        row | {"operation": "hata_layer", "chosen": False} for row in dense.rows(case, settings)
    ]


def policy_rows(case: Case, settings: Settings) -> Iterator[point.Row]:
    """A row for each policy that the settings select."""
    layers = {name: (policy, program(policy)) for name, policy in policies(case).items()}
    yield from layer_rows("hata_layer", case, settings, layers)


def layer_rows(
    operation: str, case: Case, settings: Settings, layers: Mapping[str, tuple[Policy, Step]]
) -> Iterator[point.Row]:
    """A row for each of these layers that the settings select: a policy and its `program`."""
    chosen = {name: layer for name, layer in layers.items() if settings.wants(name)}
    policy_params = {name: arrays_of(x, [spec_of(case)]) for name, (x, _) in chosen.items()}
    new = token(case)
    sources = {
        name: Source(
            step, (shapes(policy_params[name]), empty(policy, case), shapes(new)), donated=(1,)
        )
        for name, (policy, step) in chosen.items()
    }
    for name, compiled in compile_all(operation, sources).items():
        gc.collect()  # a failure's traceback, or a rival's tensor, may hold a cache
        policy, _ = chosen[name]
        layer = (
            compiled
            if isinstance(compiled, Absent)
            else with_cache(name, compiled, policy, policy_params[name], new, case)
        )
        moved = needed(policy, case)
        yield from point.measure(operation, case, [layer], settings, states=("cold",), moved=moved)


def with_cache(
    name: str, compiled: Any, policy: Policy, policy_params: Any, new: Any, case: Case
) -> Program | Absent:
    """The program with a cache, which each call consumes and returns."""
    try:
        caches = [filled(policy, policy_params, case)]
    except Exception as error:
        return failure(name, error)

    def start() -> Any:
        cache: Cache = caches.pop()
        cache, outputs = compiled(policy_params, cache, new)
        caches.append(cache)
        return outputs

    def check(outputs: Any) -> bool:
        return is_right(policy, policy_params, caches[0], new, outputs)

    return Program(name, start, check)


BENCHMARK = Benchmark(
    name="hata_layer",
    names=(*NAMES, *ATTENTION.backends, *rivals.NAMES),
    rows=rows,
    complete=complete,
    # n = 0 stands for S / SHARE; R: bits of a hash code; channels: of Loki.
    default={"B": 8, "S": 32768, "heads": "32/32", "H": 128, "n": 0, "R": 128, "channels": 32},
    # Figure 5 of HATA.
    gpu=product(B=(8, 4, 2, 1), S=(32768, 65536, 131072, 262144), heads=("32/32", "32/8")),
    quick=["", "B=1,S=256K", "heads=32/8"],
    cpu=["B=1,S=8K,heads=8/8", "B=1,S=8K,heads=8/2"],
)
