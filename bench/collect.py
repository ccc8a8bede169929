"""The cost of collecting scores of keys in verification: attention alone, and with scores.

Figure 6 of Yue et al. 2026, whose kernels write a logit for each collected token and head: 5 % for
Qwen3-8B and 37 % for gpt-oss-20b with two tokens, 53 % and 189 % with all of twelve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from bench import attention, ceilings, point, table
from bench.caches import TOLERANCE, Check, bytes_of, dense
from bench.cases import Case
from bench.program import Source, bound, compile_all
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.attention.dense import attention as attend
from jspec.ops.attention.scored import SCORED, scored_attention
from jspec.ops.attention.weights import WEIGHTS, mean_weights
from jspec.policies import Vegas
from jspec.policies.guided import gather_tokens, mean_query
from jspec.typing import Array

COLUMNS = ("B", "S", "heads", "H", "T")
ALONE = "attention"
POLICIES = {"first + bonus": Vegas(), "all tokens": Vegas(collect="all")}
SHAPES = ("B=4,S=128K,heads=32/8,H=128", "B=4,S=128K,heads=64/8,H=64")
CHECKED_SLOTS = 512  # slots of each row whose scores are checked


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or two models' shapes by the tokens of a pass, gamma + 1."""
    if settings.cases:
        return [attention.case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [attention.case(f"B=1,S=2K,heads=8/2,H=64,T={tokens}") for tokens in (2, 8)]
    tokens = (2, 9) if settings.quick else (2, 4, 6, 8, 9, 10, 12, 14, 16)
    return [attention.case(f"{shape},T={n}") for shape in SHAPES for n in tokens]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("collect", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from _measured(case, settings)
            advance()


def passes(kv_heads: int) -> dict[str, Callable[..., tuple[Array, ...]]]:
    """Attention alone and with each kind of scores, by name."""

    def logits(policy: Vegas, q: Array, k: Array, v: Array, positions: Array):
        probe = mean_query(q, policy.scoring(positions), kv_heads).astype(q.dtype)
        return scored_attention(q, k, v, positions, probe)

    def weights(policy: Vegas, q: Array, k: Array, v: Array, positions: Array):
        out, lse = attend(q, k, v, positions)
        scoring = policy.scoring(positions)
        lse_of_scoring = jnp.where((scoring >= 0)[..., None], gather_tokens(lse, scoring), -jnp.inf)
        return out, lse, mean_weights(gather_tokens(q, scoring), k, lse_of_scoring)

    by_name: dict[str, Callable[..., tuple[Array, ...]]] = {ALONE: attend}
    for kind, collect in (("logits", logits), ("weights", weights)):
        for name, policy in POLICIES.items():
            by_name[f"{kind}, {name}"] = functools.partial(collect, policy)
    return by_name


def _measured(case: Case, settings: Settings) -> list[point.Row]:
    shapes = attention.shapes(case)
    named = passes(shapes[1].shape[2])
    programs = compile_all("collect", {name: Source(run, shapes) for name, run in named.items()})
    inputs = dense(case)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.positions)
    check = Check.of(inputs.q, inputs.k, inputs.v, inputs.positions + 1)
    bounds = []
    for name, program in programs.items():
        right = check.both if name == ALONE else _scored(name, check, arguments)
        bounds.append(bound(name, program, arguments, right))
    moved = bytes_of(int(inputs.lengths.sum()), case)
    return point.measure("collect", case, bounds, settings, moved=moved, **attention.clock())


def _scored(name: str, check: Check, arguments: tuple[Array, ...]) -> Callable[[Any], bool]:
    """Whether output, log-sum-exp, and scores of the first slots are right."""
    kind, _, who = name.partition(", ")
    q, k, _, positions = arguments
    expected_scores = np.asarray(
        expected(
            q, k[:, :CHECKED_SLOTS], check.lse, POLICIES[who].scoring(positions), kind == "weights"
        )
    )

    def right(outputs: Any) -> bool:
        got = np.asarray(outputs[2][:, :, :CHECKED_SLOTS], np.float32)
        near = np.linalg.norm(got - expected_scores) <= TOLERANCE * np.linalg.norm(expected_scores)
        return check.both(outputs) and bool(near)

    return right


@functools.partial(jax.jit, static_argnames="weighs")
def expected(q: Array, k: Array, lse: Array, scoring: Array, weighs: bool) -> Array:
    """The mean over query heads and ``scoring`` tokens of materialised logits, or of weights."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    batch, tokens, heads, size = q.shape
    groups = (batch, tokens, k.shape[2], heads // k.shape[2])
    logits = jnp.einsum(
        "btkgh,bskh->bktgs", q.reshape(*groups, size), k, precision="highest"
    ) * jnp.float32(size**-0.5)
    if weighs:
        logits = jnp.exp(logits - jnp.moveaxis(lse.reshape(groups), 2, 1)[..., None])
    index = jnp.arange(tokens)[None, :, None]
    counts = (scoring[:, None] == index).any(axis=2).astype(jnp.float32)
    logits = logits.mean(axis=3) * counts[:, None, :, None]
    return logits.sum(axis=2) / counts.sum(axis=1)[:, None, None]


def over_alone(result: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """The extra time of each pass over attention alone, by case; 0.05 for 5 %."""
    by_case: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
    for row in result["rows"]:
        if (clock := point.best_clock(row)) is not None:
            by_case.setdefault(str(row["case"]), (row["case"], {}))[1][row["name"]] = clock.median
    return [
        (case, {name: time / times[ALONE] - 1 for name, time in times.items() if name != ALONE})
        for case, times in by_case.values()
        if ALONE in times
    ]


def show(result: dict[str, Any]) -> None:
    """The times, and by how many percent each pass takes longer than attention alone."""
    table.show(result, COLUMNS, attention.floor(result))
    compared = over_alone(result)
    names = list(dict.fromkeys(name for _, more in compared for name in more))
    if compared:
        over = Table(title="percent above attention alone", title_justify="left", box=None)
        for heading in (*COLUMNS, *names):
            over.add_column(heading, justify="right")
        for case, more in compared:
            cells = (f"{100 * more[name]:+.1f}" if name in more else "" for name in names)
            over.add_row(*(table.cell(x, case[x]) for x in COLUMNS), *cells)
        console().print(over)


SUITE = Suite(
    "collect",
    "what scores of keys cost in addition to verification: pooled logits and weights, by tokens",
    run,
    show,
    (ATTENTION, SCORED, WEIGHTS),
    case=attention.case,
)
