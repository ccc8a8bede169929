"""How many draft tokens are accepted, drafter by drafter, on real texts of the bundled model.

Acceptance does not depend on the machine. All drafters start from one prefill of the same texts:
source files of Python's standard library, and documents that ask for facts which they gave before.
Of each, one row is greedy and one is sampled at temperature 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jspec
from bench import cases, decoding
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.decode.checks import mode_of, sampling_of
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.stats import Tally
from jspec.decode.step import decode_chunk
from jspec.eval.ruler import training_document
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.policies.hata import with_hashes

TEMPERATURES = (0.0, 1.0)
STEPS = 4  # of a jitted chunk
BLOCK = "Vegas, block rule"  # verification by the block rule, instead of the token rule
PUBLISHED = "Vegas (first + bonus token, logits)"
# percent: of the context; skip: first texts to leave out, if settings were chosen on them.
CASE = {"S": 8192, "texts": 16, "skip": 0, "new": 256, "gamma": 7, "percent": 7}


@dataclasses.dataclass(frozen=True)
class Plan:
    """``texts`` of ``context`` tokens after the first ``skip`` ones; ``new`` tokens each."""

    context: int
    texts: int
    new: int
    gamma: int
    ratio: float
    skip: int = 0


def drafts(ratio: float) -> dict[str, str]:
    """Drafters by the names of the tables, at one ratio of the context."""
    guided = f"budget={ratio},least=0"
    scored = f"budget={ratio},dense_layers=0"
    return {
        "none": "none",
        PUBLISHED: f"vegas:{guided}",
        BLOCK: f"vegas:{guided}",
        "MagicDec-Stream": f"streaming:window={ratio}",
        "MagicDec-Quest": f"quest:{scored}",
        "SpecExtend, layer-wise": f"specextend:{guided}",
        "SparseSpec": f"sparsespec:{guided}",
        "Vegas, all tokens": f"vegas:{guided},collect=all",
        "Vegas, last accepted token": f"vegas:{guided},collect=last",
        "Vegas, weights": f"vegas:{guided},score=weight",
        "Vegas, all but discarded tokens": f"vegas:{guided},collect=accepted",
        "Vegas, 7 positions ahead": f"vegas:{guided},ahead=7",
        "Vegas, softmax, 7 ahead": f"vegas:{guided},score=softmax,ahead=7",
        "Vegas, weights, 7 ahead": f"vegas:{guided},score=weight,ahead=7",
        "Vegas, all tokens, per head": f"vegas:{guided},collect=all,per_head=true",
        "Vegas, refreshed by hashes every 4": f"vegas:{guided},refresh=4",
        "Vegas, refreshed every 4, 3 ahead": f"vegas:{guided},refresh=4,ahead=3",
        "Vegas, by an int8 copy": f"vegas:{guided},quantized=int8",
        "Vegas, by an MXFP4 copy": f"vegas:{guided},quantized=mxfp4",
        "exact top-k": f"exact_topk:{scored},sinks=0,recent=0",
        "HATA": f"hata:{scored}",
        "QuantSpec, all in 4 bits": "quantspec",
        "n-gram": "ngram",
        "suffix": "suffix",
    }


def plan_of(text: str) -> Plan:
    """Parse a plan of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, CASE)
    sizes = {name: case[name] for name in ("texts", "new", "gamma", "skip")}
    return Plan(context=case["S"], ratio=case["percent"] / 100, **sizes)


def plans(settings: Settings) -> list[Plan]:
    if settings.cases:
        return [plan_of(text) for text in settings.cases]
    if settings.quick:
        return [Plan(256, 2, 12, 3, 0.07)]
    if jax.default_backend() == "cpu":
        return [Plan(8192, 4, 64, 7, 0.07)]
    grid = [(context, gamma, 0.07) for context in (8192, 32000) for gamma in (7, 11)]
    grid += [(8192, 7, ratio) for ratio in (0.01, 0.02, 0.03, 0.05, 0.1)]
    return [Plan(context, 16, 256, gamma, ratio) for context, gamma, ratio in grid]


def run(settings: Settings) -> dict[str, Any]:
    """Yield rows one by one, for each drafter and temperature."""
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[dict[str, Any]]:
    model, tokenizer = jspec.load_bundled()
    for plan in plans(settings):
        prompts = texts_of(plan, tokenizer)
        params = [
            jspec.SamplingParams(max_new_tokens=plan.new, temperature=t, seed=row, ignore_eos=True)
            for t in TEMPERATURES
            for row in range(plan.texts)
        ]
        before = start_decoding(
            model, prompts, params[: plan.texts], StepConfig(plan.gamma), chunk=512
        )
        plain_tokens = None
        named = {
            name: text
            for name, text in drafts(plan.ratio).items()
            if name == "none" or settings.wants(name)
        }
        if settings.quick:
            named = dict(list(named.items())[:4])
        with bar("vegas-accept", len(named)) as advance:
            for name, text in named.items():
                config = config_of(plan, name, text)
                arrays = prepared(
                    with_hashes(config.cache_policy, bundled_path()), model, tokenizer
                )
                models = config.draft.prepare(Models(model, policy=arrays))
                state = started(before, models, config, params)
                tokens, tallies = decoded(state, models, config)
                greedy = [row[plan.context :] for row in tokens[: plan.texts].tolist()]
                plain_tokens = greedy if plain_tokens is None else plain_tokens
                if name != "none":
                    right = decoding.check_tokens(model, prompts, greedy, plain_tokens)
                    yield from _result_rows(plan, name, text, right, tallies)
                advance()


def config_of(plan: Plan, name: str, text: str) -> StepConfig:
    """The step config of the drafter ``text``, by its name in the tables."""
    gamma = 0 if name == "none" else plan.gamma
    rule = "block" if name == BLOCK else "token"
    return StepConfig(gamma, jspec.named_draft(text), rule=rule)


def texts_of(plan: Plan, tokenizer: jspec.Tokenizer) -> list[list[int]]:
    """Texts of ``plan.context`` tokens, alternating between the two kinds.

    A text depends only on its index and the context.

    Raises `ValueError` where there are too few source files of that length.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: p.name)
    long = [path.read_bytes() for path in files if path.stat().st_size > 2 * plan.context]
    order = np.random.default_rng(0).permutation(len(long))
    texts, end = [], plan.skip + plan.texts
    if len(long) < end:
        raise ValueError(
            f"texts={plan.texts} after skip={plan.skip} are more than the {len(long)} source "
            f"files of over {2 * plan.context} bytes; take fewer, or a smaller S"
        )
    for row in range(plan.skip, end):
        if row % 2 == 0:
            text: str | bytes = long[order[row]][plan.context // 2 :]
        else:
            text, _ = training_document(4 * plan.context, np.random.default_rng([1, row]))
        texts.append(tokenizer.encode(text)[: plan.context])
    return texts


def started(
    before: DecodeState, models: Models, config: StepConfig, params: list[jspec.SamplingParams]
) -> DecodeState:
    """The state of `jspec.start_decoding` for all rows, from one prefill of the texts."""
    repeats = len(params) // len(before.tokens)
    state = jax.tree.map(lambda x: jnp.concatenate([x] * repeats), before)
    sampled = dataclasses.replace(state, sampling=sampling_of(params), mode=mode_of(params))
    return jspec.convert_state(models, sampled, config)


def decoded(
    state: DecodeState, models: Models, config: StepConfig
) -> tuple[np.ndarray, list[Tally]]:
    """Decode to the end: the tokens of all rows, and the acceptance of each."""
    tallies = [Tally(config.gamma) for _ in state.done]
    while not np.asarray(state.done).all():
        state, record = decode_chunk(models, state, config, STEPS)
        counts = [np.asarray(x) for x in (record.drafted, record.accepted, record.committed)]
        for row, tally in enumerate(tallies):
            tally.add(*(x[:, row : row + 1] for x in counts))
    return np.asarray(state.tokens), tallies


def _result_rows(
    plan: Plan, name: str, text: str, right: dict[str, Any], tallies: list[Tally]
) -> Iterator[dict[str, Any]]:
    """A row of the result for each temperature."""
    for index, temperature in enumerate(TEMPERATURES):
        row_tallies = tallies[index * plan.texts : (index + 1) * plan.texts]
        attempts = sum(tally.attempts_at for tally in row_tallies)
        accepted = sum(tally.accepted_at for tally in row_tallies)
        yield {
            "operation": "vegas-accept",
            "case": dataclasses.asdict(plan) | {"temperature": temperature},
            "name": name,
            "draft": text,
            **right,
            "steps": sum(tally.steps for tally in row_tallies),
            "committed": sum(tally.committed for tally in row_tallies),
            "attempts_at": np.asarray(attempts).tolist(),
            "accepted_at": np.asarray(accepted).tolist(),
            "per_text": [tally.committed / tally.steps for tally in row_tallies],
        }


HEADINGS = ("drafter", "greedy", "over Vegas", "T = 1", "over Vegas", "by position, T = 1")


def cells(
    rows: list[dict[str, Any]], published: list[dict[str, Any]] | None, shown: int = 7
) -> list[str]:
    """A drafter's cells under `HEADINGS`: mean accepted lengths, and their differences from those
    of the ``published`` drafter."""
    line = [rows[0]["name"]]
    for row, reference in zip(rows, published or [None] * len(rows), strict=True):
        line.append(f"{row['committed'] / row['steps']:.2f}")
        line.append(
            "" if reference in (None, row) else over(row["per_text"], reference["per_text"])
        )
    pairs = list(zip(rows[-1]["accepted_at"], rows[-1]["attempts_at"], strict=True))[:shown]
    rates = [f"{accepted / attempts if attempts else 0.0:.2f}" for accepted, attempts in pairs]
    return [*line, " ".join(rates)]


def over(lengths: list[float], other_lengths: list[float]) -> str:
    """The mean difference of the same texts, and its standard error."""
    differences = np.subtract(lengths, other_lengths)
    error = differences.std(ddof=1) / np.sqrt(len(lengths)) if len(lengths) > 1 else np.nan
    return f"{differences.mean():+.2f} ± {error:.2f}"


def by_plan(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The lines of each table, highest greedy mean first, by what all its rows share."""
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        case = row["case"]
        behind = f" behind the first {case['skip']}" if case.get("skip") else ""
        title = (
            f"{case['texts']} texts{behind} of {case['context']:,} tokens, {case['new']} new ones "
            f"each, gamma {case['gamma']}, {100 * case['ratio']:g} % of the context"
        )
        grouped.setdefault(title, {}).setdefault(row["name"], []).append(row)

    def mean(rows: list[dict[str, Any]]) -> float:
        return statistics.mean(row["committed"] / row["steps"] for row in rows)

    whole = {
        title: [rows for rows in named.values() if len(rows) == len(TEMPERATURES)]
        for title, named in grouped.items()
    }
    lines = {}
    for title, drafters in whole.items():
        published = next((rows for rows in drafters if rows[0]["name"] == PUBLISHED), None)
        drafters = sorted(drafters, key=mean, reverse=True)
        lines[title] = [cells(rows, published) for rows in drafters]
    return lines


def show(result: dict[str, Any]) -> None:
    for title, lines in by_plan(result).items():
        table = Table(title=title, box=None)
        for index, name in enumerate(HEADINGS):
            table.add_column(name, justify="left" if index in (0, 5) else "right")
        for line in lines:
            table.add_row(*line)
        console().print(table)


def compare_rows(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write the change in mean accepted length since the earlier result; how many rows had one."""

    def key(row: dict[str, Any]) -> str:
        return f"{row['case']} {row['name']}"

    before = {key(row): row["committed"] / row["steps"] for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        if key(row) in before:
            row["above_before"] = row["committed"] / row["steps"] - before[key(row)]
            met += 1
    return met


SUITE = Suite(
    "vegas-accept",
    "mean accepted lengths of all drafters at an equal ratio, on the bundled model",
    run,
    show,
    rivals=tuple(drafts(0.07)),
    compare=compare_rows,
    custom_clocks=True,
    case=plan_of,
)
