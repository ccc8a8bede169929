"""All operations, by the module that defines each."""

from __future__ import annotations

import functools
from importlib import import_module

from jspec.dispatch import Operation

_HOMES = (
    "jspec.ops.attention.dense:ATTENTION",
    "jspec.ops.attention.scored:SCORED",
    "jspec.ops.attention.tree:TREE_ATTENTION",
    "jspec.ops.attention.weights:WEIGHTS",
    "jspec.ops.attention.gathered:GATHERED",
    "jspec.ops.attention.appended:APPEND_ATTEND",
    "jspec.ops.append:APPEND",
    "jspec.ops.append:APPEND_ENCODE",
    "jspec.ops.host_rows:FETCH_ROWS",
    "jspec.ops.host_rows:FETCH_AHEAD",
    "jspec.ops.host_rows:STORE_ROWS",
    "jspec.ops.hash:HASH_ENCODE",
    "jspec.ops.hash:HAMMING_SCORES",
    "jspec.ops.collisions:COLLISION_SCORES",
    "jspec.ops.key_scores:DOT_SCORES",
    "jspec.ops.key_scores:PAGE_SCORES",
    "jspec.ops.selection:SELECT",
    "jspec.ops.hash_selection:HASH_SELECT",
    "jspec.ops.attention.hashed:HASH_ATTENTION",
    "jspec.ops.linear:LINEAR",
    "jspec.ops.linear_chain:LINEAR_CHAIN",
    "jspec.ops.route:ROUTE",
    "jspec.ops.grouped:GROUPED",
    "jspec.ops.verify:VERIFY_GREEDY",
    "jspec.ops.tree:VERIFY_TREE",
    "jspec.ops.acceptance_scan:ACCEPTANCE_SCAN",
    "jspec.ops.stochastic:VERIFY_STOCHASTIC",
    "jspec.ops.sample:SAMPLE",
    "jspec.ops.packing:PACK",
    "jspec.ops.path:PACK_PATH",
    "jspec.ops.fused:VERIFY_AND_PACK",
    "jspec.ops.commit:VERIFY_AND_COMMIT",
)


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Every operation of jspec; their modules are imported when this is first called."""
    pairs = (home.split(":") for home in _HOMES)
    return tuple(getattr(import_module(module), name) for module, name in pairs)


def step_operations() -> list[Operation]:
    """Operations of a step, those that a model or a policy calls by itself included."""
    return [x for x in operations() if x.name not in ("acceptance_scan", "pack", "verify_and_pack")]
