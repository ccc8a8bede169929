"""The least time of each part of an iteration: the bytes that it must read, at the read ceiling."""

from __future__ import annotations

import math
from typing import Any

from bench.ceilings import Ceilings
from bench.decode.shapes import (
    product_flops,
    read_cache_bytes,
    read_weight_bytes,
    scored_cache_bytes,
)
from jspec.decode.draft import Chain, SparseDrafter
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.policies import Guided, Policy, Streaming
from jspec.policies.budgeted import Budgeted


def of_iteration(
    models: Models, batch: int, context: int, config: StepConfig, ceilings: Ceilings
) -> dict[str, float]:
    """Least nanoseconds of each part of `bench.decode.kernels.PARTS` that reads memory.

    Bytes counted: *draft passes*: weights, and the selected keys and values; *verification*:
    weights and cache; *collection*: writing the scores of all keys; *selection*: reading these,
    and what a policy scores by itself; *compaction*: reading and writing the copy; *bookkeeping*:
    the logits of the verification.
    """
    model: Any = models.target
    layers, dtype = model.config, model.dtype
    policy, gamma = view_of(config), config.gamma
    fed = batch * (gamma + 1)

    def read(count: float) -> float:
        return count / ceilings.read * 1e9

    reads = config.target, positions_read(config.target, context)
    cached = read_cache_bytes(layers, batch, context, dtype, *reads)
    floors_ns = {
        "verification": ceilings.floor_ns(
            read_weight_bytes(model, fed), cached, product_flops(model, fed)
        ),
        "bookkeeping": read(4.0 * fed * layers.vocab_size),
    }
    by_second = _second_model_ns(models, batch, context, config, ceilings)
    if policy is None:
        return floors_ns | ({"draft passes": by_second} if by_second else {})
    passes, tokens = passes_of(config)
    count = positions_read(policy, context)
    scored = scored_cache_bytes(layers, batch, context, dtype, policy)
    selected = read_cache_bytes(layers, batch, context, dtype, policy, count) - scored
    weights, flops = draft_weight_bytes(models, batch, config), product_flops(model, batch * tokens)
    own_ns = passes * ceilings.floor_ns(weights, selected, flops)
    floors_ns["draft passes"] = by_second + own_ns
    if isinstance(policy, Guided):
        leaders = policy.leaders(layers.layers)
        heads = sum(layers.layers[i].kv_heads for i in {x for x in leaders if x is not None})
        floors_ns["collection"] = floors_ns["selection"] = read(4.0 * batch * heads * context)
        if policy.refresh:
            floors_ns["selection"] += (passes - 1) // policy.refresh * read(scored)
    elif policy.reads_queries:
        floors_ns["selection"] = passes * read(scored)
    else:
        floors_ns["compaction"] = 2 * read(selected)
    return floors_ns


def _second_model_ns(
    models: Models, batch: int, context: int, config: StepConfig, ceilings: Ceilings
) -> float:
    """Least nanoseconds of the passes of a second model in a draft, 0 without one.

    Each reads the model's weights and its whole cache, for two tokens of a row.
    """
    if not config.draft.traits.needs_model:
        return 0.0
    passes, fed = config.gamma, 2 * batch
    if isinstance(config.draft, Chain):
        rounds, checked = passes_of(config)
        passes = rounds * (checked - 1)
    model: Any = models.draft
    cached = read_cache_bytes(model.config, batch, context, model.dtype)
    weights, flops = read_weight_bytes(model, fed), product_flops(model, fed)
    return passes * ceilings.floor_ns(weights, cached, flops)


def view_of(config: StepConfig) -> Policy | None:
    """The policy of draft passes by the model itself, None if it makes none."""
    draft = _passing(config)
    return None if draft is None else draft.collect_policy or draft.cache_policy


def quantized_in(config: StepConfig) -> str:
    """The kind of the quantised copy that draft passes read, "" for none."""
    draft = _passing(config)
    return "" if draft is None else draft.quantized


def _passing(config: StepConfig) -> SparseDrafter | None:
    """The drafter that drafts by passes of the model itself, or None."""
    draft = config.draft.second if isinstance(config.draft, Chain) else config.draft
    return draft if isinstance(draft, SparseDrafter) else None


def passes_of(config: StepConfig) -> tuple[int, int]:
    """The number of passes of a draft, and the tokens of each."""
    if isinstance(config.draft, Chain):
        return min(config.draft.rounds, config.gamma), min(config.draft.inner, config.gamma) + 1
    return config.gamma, 1


def positions_read(policy: Policy, context: int) -> int:
    """The number of positions of a row that ``policy`` selects."""
    if isinstance(policy, Streaming):
        size = policy.window
        return math.ceil(size * context) if isinstance(size, float) else policy.sinks + size
    if not isinstance(policy, Budgeted):
        return context
    if isinstance(policy.budget, float):
        share = math.ceil(policy.budget * context)
        return min(max(share, policy.floor * policy.page_size), context)
    return min(policy.budget, context)


def draft_weight_bytes(models: Models, batch: int, config: StepConfig) -> int:
    """Bytes of the weights that a draft pass of ``batch`` rows reads, 0 without such passes."""
    draft = _passing(config)
    if draft is None:
        return 0
    model: Any = draft.model_of(models)
    return read_weight_bytes(model, batch * passes_of(config)[1])
