"""Overlap of the positions that the tokens of a pass would each pick by themselves.

Figure 7 of Yue et al. 2026: the share that two tokens have in common falls with their distance.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jspec
from bench.acceptance import Plan, plans, texts_of
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import PLAIN
from jspec.policies import Vegas
from jspec.policies.collect import picks, run_collecting
from jspec.typing import Array

TOKENS = 8


def run(settings: Settings) -> dict[str, Any]:
    plan = dataclasses.replace(plans(settings)[0], gamma=TOKENS - 1)
    if plan.context > 4096 and jax.default_backend() == "cpu":
        plan = dataclasses.replace(plan, context=4096)
    return {"rows": [_row(plan)]}


def _row(plan: Plan) -> dict[str, Any]:
    """The row: the mean overlap ``[TOKENS, TOKENS]`` over texts and layers of the bundled model."""
    model, tokenizer = jspec.load_bundled()
    texts = texts_of(plan, tokenizer)
    overlap = np.zeros((TOKENS, TOKENS))
    policy = Vegas(budget=plan.ratio, least=0, collect="last")
    with bar("vegas-overlap", plan.texts) as advance:
        for text in texts:
            params = jspec.SamplingParams(max_new_tokens=1)
            known = [text[: 1 - TOKENS]]
            state = start_decoding(model, known, params, PLAIN, capacity=plan.context)
            picked = each_alone(
                model, jnp.asarray([text[-TOKENS:]], jnp.int32), state.cache, policy
            )
            overlap += shared(np.asarray(picked))
            advance()
    case = {"texts": plan.texts, "context": plan.context, "ratio": plan.ratio}
    row = {"operation": "vegas-overlap", "case": case, "name": "bundled", "checked": True}
    return row | {"overlap": (overlap / plan.texts).tolist()}


def each_alone(model: Any, tokens: Array, cache: jspec.Cache, policy: Vegas) -> Array:
    """Positions that each of ``tokens [1, T]``, appended to the cache, picks by itself.

    int32 ``[T, layers, n]``.
    """

    @jax.jit
    def pick(model, tokens, cache):
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = cache.lengths[:, None] + index
        _, after, queries = run_collecting(model, tokens, positions, cache, policy=policy)
        alone = []
        for t in range(tokens.shape[1]):
            layers = picks(policy, after, queries, positions, index[:, t])
            alone.append(jnp.concatenate([layer for layer in layers if layer is not None]))
        return jnp.stack(alone)

    return pick(model, tokens, cache)


def shared(picked: np.ndarray) -> np.ndarray:
    """The share that two tokens of ``picked [T, layers, n]`` have in common, mean over layers."""
    tokens, layers, _ = picked.shape
    sets = [[set(row[row >= 0].tolist()) for row in of_layers] for of_layers in picked]
    common = np.zeros((tokens, tokens))
    for a in range(tokens):
        for b in range(tokens):
            pairs = zip(sets[a], sets[b], strict=True)
            common[a, b] = sum(len(x & y) / len(x) for x, y in pairs) / layers
    return common


def by_distance(row: dict[str, Any]) -> list[str]:
    """The mean overlap of tokens 1, 2, ... apart."""
    overlap = np.array(row["overlap"])
    return [f"{np.diagonal(overlap, d).mean():.3f}" for d in range(1, len(overlap))]


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        table = Table(title=f"share of picked positions in common: {row['case']}", box=None)
        for distance in range(1, len(row["overlap"])):
            table.add_column(f"{distance} apart", justify="right")
        table.add_row(*by_distance(row))
        console().print(table)


def compare_rows(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row the change in overlap of the two most distant tokens.

    Returns the number of rows that the earlier result has.
    """
    before = {str(row["case"]): row["overlap"][0][-1] for row in earlier["rows"]}
    met = [row for row in result["rows"] if str(row["case"]) in before]
    for row in met:
        row["above_before"] = row["overlap"][0][-1] - before[str(row["case"])]
    return len(met)


SUITE = Suite(
    "vegas-overlap",
    "how alike the positions are that the tokens of a pass would pick, by distance",
    run,
    show,
    compare=compare_rows,
    custom_clocks=True,
)
