"""The engine under load: tokens a second, and the time of a token, by mix, load and drafter.

Two mixes, after figures 9 and 11 of Yue et al. 2026: *reasoning*, short prompts and long answers,
and *long-context*, long prompts and short answers. Lengths are ragged, half above and below those
of the case at most. Load: *full*, all requests at once, or Poisson arrivals at a share of the
requests a second that plain decoding serves at full load, whatever is served by then (open loop).
The bundled model answers real texts. Other models have true shapes and random weights, of which an
acceptance is imposed that the paper states (`bench.profiles`): their tokens are checked first as
they are, and then timed by a model whose verification accepts drafts so often (`bench.steered`).
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

import jspec
from bench import cases, decode, decoding, profiles
from bench.decode.drafting import GUIDED, RATIO
from bench.load import Load, PromptAndParams, arrivals, serve, step_seconds
from bench.point import Row
from bench.settings import Settings, bar, console
from bench.steered import Steered
from bench.suite import Suite
from bench.table import times
from bench.throughput import CHAIN_GAMMA, CHAINS
from jspec.cli.compile_cache import keep_programs
from jspec.decode.resolved_options import usual_steps

MIXES = {"reasoning": (256, 1024), "long-context": (8192, 128)}  # prompt and new tokens
CPU_MIXES = {"reasoning": (48, 96), "long-context": (384, 16)}
SHARES = (0.5, 0.8)  # of the requests a second of plain decoding
CHECKED = 4  # requests that are decoded alone as well
DRAFTS = {
    "none": ("none", 0),
    "stream": (f"streaming:window={RATIO}", 4),
    "ngram": ("ngram", 8),
    "vegas": (GUIDED, 9),
    "chain": (CHAINS["chain"], CHAIN_GAMMA),
}
# Drafters that depend on real text, and are not measured with random weights.
FROM_TEXT = ("ngram", "chain")
# B: slots; S and new: tokens of a prompt and of its answer. 0 stands for the sizes of the mix,
# three requests per slot, and all layers.
DEFAULT: cases.Case = {
    "model": "bundled",
    "mix": "reasoning",
    "B": 32,
    "S": 0,
    "new": 0,
    "requests": 0,
    "layers": 0,
}
CHOICES = {"model": ("bundled", *cases.CHOICES["model"]), "mix": tuple(MIXES)}
DEFAULT_CASES = (
    "mix=reasoning",
    "mix=long-context,B=16",
    "model=qwen3-8b,mix=reasoning,S=512,new=2K",
    "model=qwen3-8b,mix=long-context,B=8,S=32K,new=256",
)
FOOT = (
    "tok/s: new tokens of all requests; token: from one to the next, without the first chunk, and "
    "first: from arrival to the first one, in ms, median and p90; length: tokens of a step and "
    "row; of step: tok/s while all slots are taken, over what the steps alone would give; load: "
    "full, or arrivals at that share of the requests a second of plain decoding at full load"
)


def case(text: str) -> cases.Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT, CHOICES)
    prompt, new = (CPU_MIXES if jax.default_backend() == "cpu" else MIXES)[case["mix"]]
    case |= {"S": case["S"] or prompt, "new": case["new"] or new}
    return case | {"requests": case["requests"] or 3 * case["B"]}


def grid(settings: Settings) -> list[cases.Case]:
    """The requested cases, or the suite's defaults."""
    defaults = DEFAULT_CASES
    if jax.default_backend() == "cpu":
        defaults = [f"mix={mix},B=4" for mix in MIXES]
    if settings.quick:
        defaults = (
            ["mix=reasoning,B=2,S=16,new=16"] if defaults is not DEFAULT_CASES else defaults[:1]
        )
    return [case(text) for text in settings.cases or defaults]


def run(settings: Settings) -> dict[str, Any]:
    """Every case with every drafter, under each load."""
    keep_programs()
    stated = {"source": profiles.SOURCE, "stated": profiles.LONGBENCH}
    return {"shares": SHARES, "acceptance": stated, "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[Row]:
    names = [name for name in DRAFTS if name == "none" or settings.wants(name)]
    for case in grid(settings):
        with bar(f"{case['model']}, {case['mix']}", len(names)) as advance:
            trial = Trial.of(case, settings)
            for name in names:
                yield from trial.rows(name, settings)
                gc.collect()  # the engine's memory, before the next one takes it
                advance()


@dataclasses.dataclass
class Trial:
    """A case: its model, its requests, and the answers of the first ones decoded alone.

    ``steered``: the model by which loads are timed where acceptance is imposed, else None.
    ``rate``: requests a second of plain decoding at full load, once that is known.
    """

    case: cases.Case
    model: jspec.Decoder
    steered: Steered | None
    requests: list[PromptAndParams]
    alone: list[tuple[int, ...]]
    rate: float | None = None

    @classmethod
    def of(cls, case: cases.Case, settings: Settings) -> Trial:
        if case["model"] == "bundled":
            (model, _), steered = jspec.load_bundled(), None
        else:
            asked = dataclasses.replace(settings.decode, layers=case["layers"] or None)
            model = decode.drawn(case["model"], dataclasses.replace(settings, decode=asked))
            steered = Steered(model, profiles.rate_of(case["model"]))
        requests = requests_of(case)
        alone = [
            jspec.generate(model, [prompt], params, draft=None).tokens[0]
            for prompt, params in requests[:CHECKED]
        ]
        return cls(case, model, steered, requests, alone)

    @property
    def capacity(self) -> int:
        """Positions of the longest request."""
        return max(len(prompt) + params.max_new_tokens for prompt, params in self.requests)

    def rows(self, name: str, settings: Settings) -> Iterator[Row]:
        """Yield a row for each load, full load first; its tokens are checked.

        If acceptance is imposed, the first requests are checked with the model itself.
        """
        if self.steered is not None and name in FROM_TEXT:
            reason = "its drafts follow from the text, which random weights do not write"
            yield self._row(name, "full", {"reason": reason, "checked": None})
            return
        few = self.requests if self.steered is None else self.requests[:CHECKED]
        try:
            full, engine = self._served(name, self.model, few)
            checked = self._checked(full.tokens, settings)
            if checked["checked"] and self.steered is not None:
                del engine  # its memory is needed
                gc.collect()
                full, engine = self._served(name, self.steered, self.requests)
        except MemoryError as error:
            yield self._row(name, "full", {"reason": str(error), "checked": None})
            return
        if not checked["checked"]:
            reason = "its tokens are wrong" if settings.check else "not checked, so not timed"
            yield self._row(name, "full", checked | {"reason": reason})
            return
        count = len(self.requests)
        rate = self.rate = self.rate or full.figures["requests_per_s"]
        loads = {}
        for share in SHARES[: 1 if settings.quick else None]:
            at = arrivals(count, share * rate, seed=1)
            loads[f"{share:.0%}"] = serve(engine, self.requests, at).figures
        del engine  # its memory is needed
        figures = full.figures | {"step_s": self._step_s(name, full.tokens)}
        for load, figures_of_load in ({"full": figures} | loads).items():
            yield self._row(name, load, figures_of_load | checked)

    def _checked(self, tokens: list[tuple[int, ...]], settings: Settings) -> dict[str, Any]:
        """Check that the first requests have the same tokens as decoded alone."""
        if not settings.check:
            return {"checked": None}
        prompts = [prompt for prompt, _ in self.requests[:CHECKED]]
        return decoding.check_tokens(self.model, prompts, tokens[:CHECKED], self.alone)

    def _served(
        self, name: str, model: jspec.Model, requests: Sequence[PromptAndParams]
    ) -> tuple[Load, jspec.Engine]:
        """The load of requests that all arrive at once, and the warmed-up engine."""
        text, gamma = DRAFTS[name]
        engine = jspec.Engine(
            model,
            slots=self.case["B"],
            capacity=self.capacity,
            draft=jspec.named_draft(text),
            gamma=gamma,
        )
        engine.warm_up()
        return serve(engine, requests, np.zeros(len(requests))), engine

    def _step_s(self, name: str, tokens: Sequence[tuple[int, ...]]) -> float:
        """Seconds of a step of as many rows as there are slots, half through their answers."""
        text, gamma = DRAFTS[name]
        pairs = list(zip(self.requests, tokens, strict=True))[: self.case["B"]]
        texts = [[*prompt, *answer[: len(answer) // 2]] for (prompt, _), answer in pairs]
        config = jspec.StepConfig(gamma, jspec.named_draft(text))
        model, steps = self.steered or self.model, usual_steps(config.draft, gamma)
        return step_seconds(model, texts, self.capacity, config, steps)

    def _row(self, name: str, load: str, measured: dict[str, Any]) -> Row:
        at = self.case | {"load": load}
        row = {"operation": "serving", "case": at, "name": name, "setting": DRAFTS[name][0]}
        if self.steered is not None:
            row |= {"acceptance": "imposed", "rate": self.steered.rate}
        return row | {"dtype": str(self.model.dtype)} | measured


def requests_of(case: cases.Case) -> list[PromptAndParams]:
    """Greedy requests of ragged lengths: real texts for the bundled model, else random tokens."""
    rng, count = np.random.default_rng(0), case["requests"]
    share = rng.uniform(0.5, 1.5, (2, count))
    lengths, news = np.maximum((share.T * (case["S"], case["new"])).astype(int), 2).T.tolist()
    if case["model"] == "bundled":
        _, tokenizer = jspec.load_bundled()
        whole = decoding.texts(tokenizer, count, max(lengths))
        texts = [text[:length] for text, length in zip(whole, lengths, strict=True)]
    else:
        texts = [rng.integers(0, 32000, length).tolist() for length in lengths]
    return [
        (text, jspec.SamplingParams(max_new_tokens=new, seed=row, ignore_eos=True))
        for row, (text, new) in enumerate(zip(texts, news, strict=True))
    ]


CASE = ("model", "mix", "B", "S", "new")
HEADINGS = ("load", "draft", "tok/s", "vs none", "token", "first", "length", "of step")


def case_cells(row: Row) -> tuple[str, ...]:
    """The case of a row under `CASE`."""
    at = row["case"]
    return at["model"], at["mix"], str(at["B"]), cases.kilo(at["S"]), cases.kilo(at["new"])


def of_step(row: Row) -> float | None:
    """Tokens a second while all slots are taken, over what the steps alone would give."""
    if row.get("full_tokens_per_s") is None or "step_s" not in row:
        return None
    alone = row["case"]["B"] * row["mean_accepted_length"] / row["step_s"]
    return row["full_tokens_per_s"] / alone


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """A row with a speed under `HEADINGS`."""
    plain = [x for x in rows if x["name"] == "none" and x["case"] == row["case"]]
    share = of_step(row)
    return (
        row["case"]["load"],
        row["name"],
        f"{row['tokens_per_s']:,.0f}",
        times(row["tokens_per_s"] / plain[0]["tokens_per_s"]) if plain else "",
        _middle_and_tail(row["token_s"]),
        _middle_and_tail(row["first_token_s"]),
        f"{row['mean_accepted_length']:.2f}",
        "" if share is None else f"{share:.2f}",
    )


def _middle_and_tail(seconds: Sequence[float]) -> str:
    """Median and 90th percentile in milliseconds."""
    if len(seconds) < 2:
        return "".join(f"{1e3 * x:,.1f}" for x in seconds)
    tail = statistics.quantiles(seconds, n=10, method="inclusive")[-1]
    return f"{1e3 * statistics.median(seconds):,.1f} / {1e3 * tail:,.1f}"


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows that have a speed."""
    return [row for row in rows if row["checked"]]


def show(result: dict[str, Any]) -> None:
    """Print a table per case; rows without a speed as their reason."""
    screen, rows = console(), timed(result["rows"])
    for where in dict.fromkeys(map(case_cells, rows)):
        rows_of_case = [row for row in rows if case_cells(row) == where]
        model, mix, slots, prompt, new = where
        title = f"{result['machine']['device']}: {model}, {mix}, {slots} slots, {prompt} + {new}"
        table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None)
        compared = any("ratio" in row for row in rows_of_case)
        for heading in (*HEADINGS, *(["vs before"] if compared else [])):
            table.add_column(heading, justify="left" if heading == "draft" else "right")
        for row in rows_of_case:
            before = [times(row["ratio"]) if "ratio" in row else ""] if compared else []
            table.add_row(*cells(row, rows_of_case), *before)
        screen.print(table)
    screen.print(FOOT, markup=False)
    for reason in dict.fromkeys(
        f"{row['name']}: {row['reason']}" for row in result["rows"] if row.get("reason")
    ):
        screen.print(reason, markup=False)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one."""

    def where(row: Row) -> tuple[str, str]:
        return str(row["case"]), row["name"]

    before = {where(row): row["tokens_per_s"] for row in timed(earlier["rows"])}
    met = [row for row in timed(result["rows"]) if where(row) in before]
    for row in met:
        row["ratio"] = row["tokens_per_s"] / before[where(row)]
    return len(met)


SUITE = Suite(
    "serving",
    "the engine: tokens a second and the time of a token, by mix, load and drafter",
    run,
    show,
    rivals=tuple(DRAFTS),
    compare=compare,
    custom_clocks=True,
    case=case,
)
