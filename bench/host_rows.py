"""Sources of the rows that a step reads from a cache in host memory."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np

from jspec.decode.draft import NoDraft
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.policies import HataOff
from jspec.policies.attend import run_selected

COUNTED_STEPS = 8  # steps whose rows are counted
ROW_SOURCES = ("again", "right", "late", "moved")  # shares of the rows that are read


def row_sources(
    models: Models, state: DecodeState, policy: HataOff
) -> tuple[dict[str, float], DecodeState]:
    """Shares of the rows by source, in layers after the first one that selects.

    ``again``: reused from the step before; ``right``: not reused but predicted; ``late``: neither.
    ``moved``: rows transferred over the bus, over rows that are read. Consumes ``state`` and
    returns it after `COUNTED_STEPS` steps.
    """
    asked: dict[int, list[jax.Array]] = {}

    @dataclasses.dataclass(frozen=True)
    class RecordingHataOff(HataOff):
        def select(self, policy_params, layer, cache, q, context_len):
            chosen = super().select(policy_params, layer, cache, q, context_len)
            if chosen is not None:
                asked.setdefault(layer, []).append(chosen)
            return chosen

    @jax.jit
    def watch(models: Models, state: DecodeState) -> list[list[jax.Array]]:
        context_len = state.cache.lengths
        run_selected(
            *(
                models.target,
                state.last_token[:, None],
                context_len[:, None],
                state.cache,
                context_len,
                1,
            ),
            policy=RecordingHataOff(**dataclasses.asdict(policy)),
            policy_params=models.policy,
        )
        return list(asked.values())

    config, counts = StepConfig(0, NoDraft(), target=policy), Counter()
    before: list[list[np.ndarray]] = []
    for _ in range(COUNTED_STEPS):
        # A layer selects for the prediction, if there is one, then for itself.
        chosen_by_layer = [[_by_head(x) for x in chosen] for chosen in watch(models, state)]
        left = (
            before
            if policy.reuse
            else [[row[:0] for row in chosen[-1]] for chosen in chosen_by_layer]
        )
        for chosen, last in zip(chosen_by_layer if left else [], left, strict=True):
            predicted = chosen[0] if len(chosen) > 1 else [row[:0] for row in chosen[0]]
            for row, early, old in zip(chosen[-1], predicted, last, strict=True):
                again, right = np.isin(row, old), np.isin(row, early)
                late = ~(again | right)
                counts["again"] += again.sum()
                counts["right"] += (right & ~again).sum()
                counts["late"] += late.sum()
                counts["moved"] += late.sum() + (~np.isin(early, old)).sum()
                counts["all"] += len(row)
        before = [chosen[-1] for chosen in chosen_by_layer]
        state, _ = decode_chunk(models, state, config=config, steps=1)
    return {name: float(counts[name] / counts["all"]) for name in ROW_SOURCES}, state


def _by_head(chosen: jax.Array) -> list[np.ndarray]:
    """The positions chosen by each row and KV head."""
    rows = np.asarray(chosen).reshape(-1, chosen.shape[-1])
    return [row[row >= 0] for row in rows]
