"""Tokens a second by batch, context and drafter, after figures 9 and 11 of Yue et al. 2026.

Two kinds of rows. *measured*: the bundled model on real texts, tokens and times alike. *imposed*:
true shapes of real models with random weights; the time of an iteration is measured, and how many
tokens it commits follows from the acceptance that the paper states, times a factor where a
quantised copy drafts (`bench.profiles`). How long the drafts of a chain are comes from the measured
row of the same drafter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from rich.table import Table

import jspec
from bench import acceptance, cases, decoding, profiles
from bench.acceptance import Plan
from bench.decode import drafting
from bench.decode.drafting import CASE, GUIDED, RATIO, before_cells, case_cells
from bench.decode.iterations import Drafting
from bench.decode.shapes import Ceilings
from bench.decode.tables import ms
from bench.point import Row, spread
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import times
from jspec.cli.compile_cache import keep_programs
from jspec.decode.exact import check_exact
from jspec.decode.prefill import start_decoding
from jspec.dispatch import BackendError
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.policies.hata import with_hashes

QUANTIZED = {f"vegas-{kind}": f"{GUIDED},quantized={kind}" for kind in profiles.QUANTIZED}
CHAINED = "inner=4, rounds=6"
CHAIN_GAMMA = 20
CHAINS = {
    "chain": f"suffix > {GUIDED}; {CHAINED}",
    "chain-int8": f"suffix > {QUANTIZED['vegas-int8']}; {CHAINED}",
}
NAMES = ("plain", "vegas", *QUANTIZED, *CHAINS)
EXACT = tuple(f"{name}-exact" for name in NAMES)  # rows only by `--backend`
# Drafters that only the bundled model runs; those that select use the same share in all layers.
SCORED = ("exact_topk", "hata", "quest", "loki", "magicpig", "specextend", "sparsespec")
OTHERS = {
    "streaming": f"streaming:window={RATIO}",
    **{name: f"{name}:budget={RATIO},dense_layers=0" for name in SCORED},
    **{name: name for name in ("quantspec", "ngram", "suffix")},
}
CHOICES = cases.CHOICES | {"model": ("bundled", *cases.CHOICES["model"])}
DEFAULT_CASES = (
    "B=4,S=120K",
    "B=64,S=8K,gamma=6",
    "B=32,S=20K,gamma=6",
    "model=gpt-oss-20b-attention,B=20,S=120K,gamma=7",
)
BUNDLED_GAMMA = 9
QUICK = "model=bundled,B=2,S=256,new=24"  # on a CPU
FOOT = (
    "imposed: random weights; iteration and floor in ms, the median; tokens of a row and iteration "
    "by the paper's rate of acceptance ({source}), with drafts as long as those of the same chain "
    "measured. measured: the bundled model, greedy, on code and on documents with questions. "
    "tok/s: of all rows. -int8, -mxfp4: drafts read weights of 8 bits, or of 4; imposed, "
    "{quantized}. chain: suffix drafts, checked by the sparse model; -exact: passes of the model "
    "with exact=True"
)


def case(text: str) -> cases.Case:
    """A case of ``--case``; ``model=bundled`` for the rows of the bundled model and no others."""
    is_bundled = "model=bundled" in text.split(",")
    return cases.parse(text, _bundled_default() if is_bundled else drafting.DEFAULT, CHOICES)


def _bundled_default() -> cases.Case:
    """The usual case of the bundled model, which always runs with all of its layers."""
    sizes = (4, 2048, 64) if jax.default_backend() == "cpu" else (8, 8192, 1024)
    sizes_of = dict(zip(("B", "S", "new"), sizes, strict=True))
    return {"model": "bundled", "gamma": BUNDLED_GAMMA, **sizes_of}


def draftings(gamma: int, settings: Settings) -> list[Drafting]:
    """The iterations of a case."""
    every = [
        Drafting("plain", "none", 0),
        Drafting("vegas", GUIDED, gamma),
        *(Drafting(name, text, gamma) for name, text in QUANTIZED.items()),
        *(Drafting(name, text, CHAIN_GAMMA) for name, text in CHAINS.items()),
    ]
    exactly = [
        dataclasses.replace(drafter, name=f"{drafter.name}-exact", exact=True) for drafter in every
    ]
    chosen = [drafter for drafter in every if settings.wants(drafter.name)]
    return chosen + [drafter for drafter in exactly if drafter.name in settings.only]


def run(settings: Settings) -> dict[str, Any]:
    """The bundled model first, since chains need to know how long their drafts are."""
    keep_programs()
    limits = drafting.ceilings()
    return {
        "read_ceiling_bytes_per_s": limits.read,
        "acceptance": profiles.STATED,
        "rows": _rows(settings, limits),
    }


def _rows(settings: Settings, limits: Ceilings) -> Iterator[Row]:
    drafted: dict[str, list[float]] = {}
    for plan in plans(settings):
        for row in bundled(plan, settings):
            if "attempts_at" in row:
                drafted[row["name"]] = [n / row["steps"] for n in row["attempts_at"]]
            yield row
    for case in grid(settings):
        for row in drafting.rows(case, draftings(case["gamma"], settings), settings, limits):
            yield imposed(row, drafted)


def grid(settings: Settings) -> list[cases.Case]:
    """The cases whose acceptance is imposed."""
    if settings.cases:
        return [x for x in map(case, settings.cases) if x["model"] != "bundled"]
    return drafting.grid(settings, DEFAULT_CASES)


def others(settings: Settings) -> list[str]:
    """The drafters of `OTHERS` that were requested; all if only the bundled model is measured."""
    alone = bool(settings.cases) and not grid(settings)
    return [name for name in OTHERS if (settings.wants(name) if alone else name in settings.only)]


def imposed(row: Row, drafted: dict[str, list[float]]) -> Row:
    """The row of an iteration with the tokens that the paper's acceptance gives it.

    ``drafted``: by a drafter's name, how often its drafts have at least 1, 2, ... tokens.
    """
    name, gamma = row["name"].removesuffix("-exact"), row["case"]["gamma"]
    kind = next((kind for kind in profiles.QUANTIZED if name.endswith(f"-{kind}")), "")
    rate = profiles.rate_of(row["case"]["model"], kind)
    is_chain = name in CHAINS
    lengths = drafted.get(row["name"]) if is_chain else None
    if is_chain and lengths is None:
        reason = "how long its drafts are is not known: the bundled model's row did not run"
        return row | {"acceptance": "imposed", "checked": None, "reason": reason}
    tokens = profiles.committed(rate, gamma, lengths)
    result = row | {"acceptance": "imposed", "rate": rate, "drafted_at_least": lengths}
    time = spread(row, "step")
    if time is not None:
        result["tokens_per_iteration"] = tokens
        result["tokens_per_s"] = tokens * row["case"]["B"] / time.median * 1e6
    return result


def plans(settings: Settings) -> list[Plan]:
    """The plans of the bundled model: the requested cases of it, or the default."""
    is_quick = settings.quick and jax.default_backend() == "cpu"
    named = [x for x in map(case, settings.cases) if x["model"] == "bundled"]
    named = named or [case(QUICK if is_quick else "model=bundled")]
    return [Plan(x["S"], x["B"], x["new"], x["gamma"], RATIO) for x in named]


def bundled(plan: Plan, settings: Settings) -> Iterator[Row]:
    """The rows of the bundled model, whose greedy tokens must be those of plain decoding."""
    model, tokenizer = jspec.load_bundled()
    prompts = acceptance.texts_of(plan, tokenizer)
    params = [jspec.SamplingParams(max_new_tokens=plan.new, ignore_eos=True)] * plan.texts
    params = [dataclasses.replace(drafter, seed=row) for row, drafter in enumerate(params)]

    @functools.cache
    def before(exact: bool) -> jspec.DecodeState:
        config = jspec.StepConfig(CHAIN_GAMMA, exact=exact)
        return start_decoding(model, prompts, params, config, chunk=512)

    every = draftings(plan.gamma, settings)
    every += [Drafting(name, OTHERS[name], plan.gamma) for name in others(settings)]
    if not every or every[0].name != "plain":
        every = [Drafting("plain", "none", 0), *every]  # the reference of the others
    plain = None
    with bar("bundled", len(every)) as advance:
        for drafter in every:
            try:
                if drafter.exact:
                    check_exact(model, drafter.config.cache_policy)
            except BackendError as error:
                yield _case_of(plan, drafter) | {"reason": str(error), "checked": None}
                advance()
                continue
            arrays = prepared(
                with_hashes(drafter.config.cache_policy, bundled_path()), model, tokenizer
            )
            models = drafter.config.draft.prepare(jspec.Models(model, policy=arrays))
            state = acceptance.started(before(drafter.exact), models, drafter.config, params)
            figures, tokens = decoding.decoded(models, prompts, params, state, drafter.config)
            plain = tokens if plain is None else plain
            checked = decoding.check_tokens(model, prompts, tokens, plain)
            if not settings.check:
                checked["checked"] = None
            yield _measured(plan, drafter, str(model.dtype), figures, checked)
            advance()


def _measured(
    plan: Plan, drafter: Drafting, dtype: str, figures: dict[str, Any], checked: dict[str, Any]
) -> Row:
    return {
        **_case_of(plan, drafter),
        "setting": drafter.draft,
        "dtype": dtype,
        "tokens_per_iteration": figures["mean_accepted_length"],
        "tokens_per_s": figures["decode_tokens_per_s"],
        **{name: figures[name] for name in ("decode_s_samples", "steps", "attempts_at")},
        **checked,
    }


def _case_of(plan: Plan, drafter: Drafting) -> Row:
    """The fields of any row of the bundled model."""
    at = {"model": "bundled", "layers": "all", "B": plan.texts, "S": plan.context}
    at |= {"gamma": drafter.gamma, "draft": drafter.name}
    return {"operation": "bundled", "case": at, "name": drafter.name, "acceptance": "measured"}


HEADINGS = ("draft", "gamma", "tokens", "iteration", "floor", "tok/s", "vs plain")


def speedup(row: Row, rows: list[Row]) -> float | None:
    """Tokens a second over those of plain decoding in the same case."""

    def where(other: Row) -> tuple[Any, ...]:
        return tuple(other["case"][key] for key in CASE)

    plain = [other for other in rows if other["name"] == "plain" and where(other) == where(row)]
    if not plain or "tokens_per_s" not in plain[0]:
        return None
    return row["tokens_per_s"] / plain[0]["tokens_per_s"]


def cells(row: Row, rows: list[Row]) -> tuple[str, ...]:
    """A row with tokens a second under `HEADINGS`."""
    time, above = spread(row, "step"), speedup(row, rows)
    floor = sum(row["floors_ns"].values()) / 1e3 if "floors_ns" in row else None
    return (
        row["name"],
        str(row["case"]["gamma"]),
        f"{row['tokens_per_iteration']:.2f}",
        "" if time is None else ms(time.median),
        "" if floor is None else ms(floor),
        f"{row['tokens_per_s']:,.0f}",
        "" if above is None else times(above),
    )


def lines(rows: list[Row], kind: str) -> list[tuple[str, ...]]:
    """The lines of what is ``measured`` or ``imposed``, with their cases."""
    shown = [x for x in rows if x["acceptance"] == kind and "tokens_per_s" in x and x["checked"]]
    return [(*case_cells(row), *cells(row, rows), *before_cells(row, rows)) for row in shown]


def foot(result: dict[str, Any]) -> str:
    """The note under the tables."""
    acceptance = result["acceptance"]
    return FOOT.format(source=acceptance["source"], quantized=quantized_by(acceptance))


def quantized_by(acceptance: dict[str, Any]) -> str:
    """The source of the acceptance of quantised drafts, in words."""
    factors = [f"{x:.2f} ({kind})" for kind, x in acceptance.get("quantized", {}).items()]
    if not factors:
        return "their tokens are accepted as often as those of the model's own weights"
    return (
        f"their rate is times {', '.join(factors)}, which is assumed for int8, whose copy of the "
        "bundled model is exact, and measured with that model for mxfp4"
    )


def show(result: dict[str, Any]) -> None:
    """Print measured and imposed rows; rows without times as their reason."""
    screen, rows = console(), result["rows"]
    for kind in ("measured", "imposed"):
        cells_of_kind = lines(rows, kind)
        title = f"{result['machine']['device']}; acceptance {kind}"
        table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None)
        compared = any("ratio" in row for row in rows)
        for heading in (*CASE, *HEADINGS, *(["vs before"] if compared else [])):
            words = heading in ("model", "draft")
            table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
        for line in cells_of_kind:
            table.add_row(*line)
        if cells_of_kind:
            screen.print(table)
    screen.print(foot(result), markup=False)
    for reason in dict.fromkeys(f"{x['name']}: {x['reason']}" for x in rows if x.get("reason")):
        screen.print(reason, markup=False)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one."""
    before = {str(row["case"]): row.get("tokens_per_s") for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        then = before.get(str(row["case"]))
        if then is not None and "tokens_per_s" in row:
            row["ratio"] = row["tokens_per_s"] / then
            met += 1
    return met


SUITE = Suite(
    "throughput",
    "tokens a second by batch, context and drafter: real, and by the paper's acceptance",
    run,
    show,
    rivals=(*NAMES, *OTHERS, *EXACT),
    compare=compare,
    case=case,
)
