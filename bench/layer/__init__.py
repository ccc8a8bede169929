"""One layer's attention at a decoding step: every policy against the fastest dense attention.

The shapes are those of figure 5 of HATA (arXiv 2506.02572). A policy's row is all that a layer does
between its projections, as `bench.layer.workload.program` runs it; the rows of dense attention are
attention alone.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from bench import attention, cases, ceilings, point
from bench.cases import Case
from bench.layer import tables
from bench.layer.check import right
from bench.layer.workload import empty, filled, needed, policies, program, spec_of, token
from bench.policies import NAMES, arrays_of
from bench.program import Absent, Program, Source, compile_all, failure, shapes
from bench.rivals import attention as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.cache import Cache
from jspec.dispatch import Backends
from jspec.ops.attention.dense import ATTENTION
from jspec.policies import Policy

SHARE = 64  # one slot in 64 is selected: 1.56 %
# n = 0 stands for S / SHARE; R: bits of a hash code; channels: of Loki.
DEFAULT: Case = {"B": 8, "S": 32768, "heads": "32/32", "H": 128, "n": 0, "R": 128, "channels": 32}
# On a GPU, XLA's attention autotunes for long and never wins; FlashAttention-3 is measured through
# PyTorch.
SLOW = ("xla", "xla_blocked", "fa3_jax")


def case(text: str, default: Mapping[str, Any] = DEFAULT) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, default)
    case["n"] = case["n"] or case["S"] // SHARE
    try:
        policies(case)
    except ValueError as error:
        raise ValueError(f"n={case['n']}, R={case['R']}: {error}") from None
    if case["n"] >= case["S"]:
        raise ValueError(f"n={case['n']} must be below S={case['S']}")
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or the suite's defaults."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [case("B=1,S=8K,heads=8/8"), case("B=1,S=8K,heads=8/2")]
    some = ("B=8,S=32K", "B=1,S=256K", "B=8,S=32K,heads=32/8")
    whole = (*some, "B=1,S=256K,heads=32/8", "B=1,S=32K", "B=1,S=32K,heads=32/8")
    return [case(text) for text in (some if settings.quick else whole)]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("hata-layer", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from dense(case, settings)
            yield from measured("hata_layer", case, policies(case), settings)
            advance()


def dense(case: Case, settings: Settings) -> list[point.Row]:
    """The rows of attention over the whole cache, by all that may be the fastest."""
    if not settings.only and jax.default_backend() == "gpu":
        names = (*ATTENTION.backends, *rivals.NAMES)
        settings = dataclasses.replace(settings, only=tuple(x for x in names if x not in SLOW))
    rows = attention.measured({**case, "T": 1, "lengths": "full"}, settings)
    for row in rows:
        row["case"] = {key: row["case"][key] for key in (*case, "l2") if key in row["case"]}
    return rows


def measured(
    operation: str,
    case: Case,
    policies: Mapping[str, Policy],
    settings: Settings,
    backends: Mapping[str, Backends] | None = None,
) -> Iterator[point.Row]:
    """A row for each policy that the settings select; ``backends``: by the policy's name."""
    backends_of = backends or dict.fromkeys(policies, Backends())
    chosen = {name: policy for name, policy in policies.items() if settings.wants(name)}
    policy_params = {name: arrays_of(policy, [spec_of(case)]) for name, policy in chosen.items()}
    new = token(case)
    sources = {
        name: Source(
            program(policy, backends_of[name]),
            (shapes(policy_params[name]), empty(policy, case), shapes(new)),
            donated=(1,),
        )
        for name, policy in chosen.items()
    }
    for name, compiled in compile_all(operation, sources).items():
        gc.collect()  # a failure's traceback, or a rival's tensor, may hold a cache
        policy = chosen[name]
        layer_program = (
            compiled
            if isinstance(compiled, Absent)
            else _ready(name, compiled, policy, policy_params[name], new, case)
        )
        moved, clock = needed(policy, case), attention.clock()
        yield from point.measure(operation, case, [layer_program], settings, moved=moved, **clock)


def _ready(
    name: str, compiled: Any, policy: Policy, policy_params: Any, new: Any, case: Case
) -> Program | Absent:
    """The program with its own cache, which each call consumes and returns."""
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
        return right(policy, policy_params, caches[0], new, outputs)

    return Program(name, start, check)


def show(result: dict[str, Any]) -> None:
    tables.show(result)


SUITE = Suite(
    "hata-layer",
    "a layer's attention at a decoding step: every policy against the fastest dense attention",
    run,
    show,
    (ATTENTION,),
    (*NAMES, *rivals.NAMES),
    case=case,
)
