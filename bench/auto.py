"""gamma="auto" against every fixed gamma of its ladder, on the bundled model.

A row is a case and a gamma. Its clock is wall time of chunks of steps, the host reading each
chunk's tokens, without compiling and prefill, over many texts; ± is the standard error over their
batches. That of auto has the chunks of all of them: the gamma that it chose, nanoseconds a step,
and the draft tokens that a step of a row accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jspec
from bench import decoding
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import times
from jspec.decode.acceptance import RowAcceptance
from jspec.decode.auto import GammaChoice, Gammas
from jspec.decode.programs import PROGRAMS

NEW_TOKENS = 512
CHUNK = 16  # steps of a program, as `jspec.generate` takes on a GPU
# Batches of texts, and the least total of rows: gammas that generate other tokens, by sampling or
# near ties, have other acceptance on the rest of a text.
SETS = 8
ROWS = 128
WARM = 3  # batches that are decoded first, in which auto measures its ladder
DRAFTS = ("ngram", "streaming")
KNOWN = (*DRAFTS, "vegas")
SHAPES = ((1, 8192), (8, 8192), (32, 2048))  # batch and context
TEMPERATURES = (0.0, 0.8)
Case = dict[str, Any]
Configs = dict[int, jspec.StepConfig]


class Fixed:
    """A gamma choice that always returns the same gamma."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def choose(self, rows: RowAcceptance, left: np.ndarray) -> int:
        return self.gamma

    def saw(self, *chunk: object) -> None:
        pass

    met = saw


def parse(text: str) -> Case:
    """Parse a case such as ``streaming,B=8,S=8192,t=0.8``; raises `ValueError` if it is invalid."""
    draft, *rest = text.split(",")
    try:
        values = dict(setting.split("=") for setting in rest)
        batch, context, temperature = int(values["B"]), int(values["S"]), float(values["t"])
        wrong = draft not in KNOWN or batch < 1 or len(values) != 3
        if wrong or context < 2 * NEW_TOKENS or temperature < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(
            f"{text!r} must be DRAFT,B=N,S=N,t=X with one of {', '.join(KNOWN)}, a context S of "
            f"{2 * NEW_TOKENS} at least and a temperature t, as in streaming,B=8,S=8192,t=0.8"
        ) from None
    return {"draft": draft, "B": batch, "S": context, "t": temperature}


def cases_of(settings: Settings) -> list[Case]:
    if settings.cases:
        return [parse(text) for text in settings.cases]
    if settings.quick:
        return [{"draft": "ngram", "B": 1, "S": 2 * NEW_TOKENS, "t": 0.0}]
    shapes = SHAPES if jax.default_backend() != "cpu" else ((1, 1024), (4, 1024))
    return [
        {"draft": draft, "B": batch, "S": context, "t": temperature}
        for draft in DRAFTS
        for batch, context in shapes
        for temperature in TEMPERATURES
    ]


def run(settings: Settings) -> dict[str, Any]:
    """Run every case; greedy tokens are compared with plain decoding, sampled ones are counted."""
    model, tokenizer = jspec.load_bundled()
    return {"dtype": str(model.dtype), "rows": _rows(model, tokenizer, settings)}


def _rows(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, settings: Settings
) -> Iterator[dict[str, Any]]:
    cases = cases_of(settings)
    with bar("auto", len(cases)) as advance:
        for case in cases:
            yield from _of_case(model, tokenizer, case, settings)
            advance()


def _of_case(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, case: Case, settings: Settings
) -> list[dict[str, Any]]:
    config = jspec.StepConfig(draft=jspec.named_draft(case["draft"]))
    gammas = Gammas(config)
    sets = SETS
    if jax.default_backend() != "cpu" and not settings.quick:
        sets = max(SETS, ROWS // case["B"])
    prompts = decoding.texts(tokenizer, case["B"] * sets, case["S"] - NEW_TOKENS - 1)
    states = list(_states(model, prompts, case, gammas))
    ladder = list(gammas.configs)
    choices: list[tuple[int | str, GammaChoice | Fixed]]
    choices = [(gamma, Fixed(gamma)) for gamma in ladder]
    choices.append(("auto", GammaChoice(ladder, gammas.draft.traits.default_gamma, warm=2)))
    rows, plain = [], None
    for gamma, choice in choices:
        for state in states[:WARM]:
            _decode(model, state, gammas.configs, choice)
        runs = [_decode(model, state, gammas.configs, choice) for state in states]
        tokens = [text for _, texts, _ in runs for text in texts]
        plain = tokens if plain is None else plain
        samples = [sum(map(len, texts)) / seconds for seconds, texts, _ in runs]
        row = {"case": case, "gamma": gamma, "tokens_per_s_samples": samples}
        if isinstance(choice, GammaChoice):
            row["chunks"] = [chunk for _, _, chunks in runs for chunk in chunks]
        row["tokens_per_s"] = sum(map(len, tokens)) / sum(seconds for seconds, _, _ in runs)
        if not settings.check:
            row["checked"] = None
        elif case["t"]:
            row["checked"] = all(len(text) == NEW_TOKENS for text in tokens)
        else:
            row |= decoding.check_tokens(model, prompts, tokens, plain)
        rows.append(row)
    best = max(row["tokens_per_s"] for row in rows[: len(ladder)])
    for row in rows:
        row["vs_plain"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        row["vs_best"] = row["tokens_per_s"] / best
    return rows


def _states(
    model: jspec.Decoder, prompts: list[list[int]], case: Case, gammas: Gammas
) -> Iterator[jspec.DecodeState]:
    """The states of the batches, each with different texts and seeds."""
    batch = case["B"]
    for first in range(0, len(prompts), batch):
        params = [
            jspec.SamplingParams(
                max_new_tokens=NEW_TOKENS, temperature=case["t"], seed=row, ignore_eos=True
            )
            for row in range(first, first + batch)
        ]
        yield jspec.start_decoding(model, prompts[first : first + batch], params, gammas.longest)


def _decode(
    model: jspec.Decoder, state: jspec.DecodeState, configs: Configs, choice: GammaChoice | Fixed
) -> tuple[float, list[tuple[int, ...]], list[tuple[int, int, float]]]:
    """Seconds of decoding to the end, without compiling, the tokens of each row, and the chunks."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    left = np.asarray(state.limits - state.lengths)
    rows = RowAcceptance(len(left), max(configs), CHUNK, together=True)
    ended, blocks, chunks, total = np.asarray(state.done), [], [], 0.0
    run = PROGRAMS.timed()
    while not ended.all():
        gamma, compiled = choice.choose(rows, left), run.compile_s
        begin = time.perf_counter()
        state, record = run(jspec.decode_chunk, model, state, config=configs[gamma], steps=CHUNK)
        record = jax.device_get(record)
        seconds = time.perf_counter() - begin - (run.compile_s - compiled)
        ended = record.done[-1]
        live, left = record.committed > 0, left - record.committed.sum(axis=0)
        choice.saw(gamma, seconds / CHUNK, record.accepted, live)
        choice.met(rows.saw(gamma, record.accepted, live))
        mean = float(record.accepted[live].mean())
        chunks.append((gamma, round(seconds / CHUNK * 1e9), mean))
        total += seconds
        blocks.append(record.tokens)
    texts = [np.concatenate([b[:, row].reshape(-1) for b in blocks]) for row in range(len(ended))]
    return total, [tuple(text[text >= 0].tolist()) for text in texts], chunks


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one."""
    before = {str((row["case"], row["gamma"])): row["tokens_per_s"] for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        then = before.get(str((row["case"], row["gamma"])))
        if then is not None:
            row["ratio"] = row["tokens_per_s"] / then
            met += 1
    return met


HEADINGS = ("draft", "B", "context", "t", "gamma", "tok/s", "±", "vs plain", "vs best")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under `HEADINGS`."""
    case = tuple(str(row["case"][name]) for name in ("draft", "B", "S", "t"))
    if not row["checked"]:
        return (*case, str(row["gamma"]), "unchecked", "", "", "")
    samples = row["tokens_per_s_samples"]
    error = statistics.stdev(samples) / len(samples) ** 0.5 / statistics.mean(samples)
    speed = f"{row['tokens_per_s']:,.0f}", f"{error:.0%}"
    return (*case, str(row["gamma"]), *speed, times(row["vs_plain"]), times(row["vs_best"]))


def worst(result: dict[str, Any]) -> str:
    """The worst speedups of auto, in words; empty if no case finished."""
    rows = [row for row in result["rows"] if row["gamma"] == "auto" and row["checked"]]
    if not rows:
        return ""
    plain, best = (min(row[name] for row in rows) for name in ("vs_plain", "vs_best"))
    return (
        f"auto at its worst of {len(rows)} cases: {plain:.2f}x plain decoding, {best:.2f}x the "
        "best fixed gamma"
    )


def show(result: dict[str, Any]) -> None:
    """Print one line per case and gamma, and the worst speedups of auto."""
    table = Table(title=f"{result['machine']['device']}, {result['dtype']}", box=None)
    compared = any("ratio" in row for row in result["rows"])
    for heading in (*HEADINGS, *(["vs before"] if compared else [])):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    for row in result["rows"]:
        ratio = [times(row["ratio"]) if "ratio" in row else ""] if compared else []
        table.add_row(*cells(row), *ratio)
    screen = console()
    screen.print(table)
    screen.print(worst(result), markup=False)


SUITE = Suite(
    "auto",
    'gamma="auto" against every fixed gamma, on the bundled model',
    run,
    show,
    compare=compare,
    custom_clocks=True,
    case=parse,
)
