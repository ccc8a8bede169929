"""The engine under load: tokens a second, and the time of a token, by mix, load and drafter.

Two mixes, after figures 9 and 11 of Yue et al. 2026: *reasoning*, short prompts and long answers,
and *long-context*, long prompts and short answers. Lengths are ragged, half above and below those
of the case at most. Load: *full*, all requests at once, or Poisson arrivals at a share of the
requests a second that plain decoding serves at full load, whatever is served by then (open loop).
*rollout*: all at once, one answer in eight is long, the others have a sixteenth of its tokens; the
third of three rollouts is measured. The bundled model answers real texts.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import jspec
from bench.cases import Case
from bench.drafters import ALL, PLAIN
from bench.load import Load, PromptAndParams, arrivals, serve, step_seconds
from bench.memory import MEMORY
from bench.point import Row
from bench.real import check
from bench.settings import Settings, bar
from bench.suite import Benchmark, suite_of
from bench.texts import texts
from jspec.cli.compile_cache import keep_programs
from jspec.decode.options import usual_steps
from jspec.decode.prefill import rounded_capacity

ROLLOUT = "rollout"
ROLLOUTS = 3  # of which the last is measured
# Prompt and new tokens.
MIXES = {"reasoning": (256, 1024), "long-context": (8192, 128), ROLLOUT: (256, 1024)}
SHARES = (0.5, 0.8)  # of the requests a second of plain decoding
CHECKED = 4  # requests that are decoded alone as well, as many as `bench.real.check.ROWS`
PIECE = 128  # most tokens of a prefill pass over one of these
DRAFTS = ("ngram", "streaming", "vegas", "suffix>vegas")
GAMMAS = ("usual", "auto", "1", "2", "4", "8", "16")
# B: slots; S and new: tokens of a prompt and of its answer. 0 stands for the sizes of the mix, and
# for three requests per slot.
DEFAULT: Case = {"mix": "reasoning", "B": 32, "S": 0, "new": 0, "requests": 0, "gamma": "usual"}
CHOICES = {"mix": tuple(MIXES), "gamma": GAMMAS}


def complete(case: Case) -> Case:
    """The case with the sizes of its mix."""
    prompt, new = MIXES[case["mix"]]
    case |= {"S": case["S"] or prompt, "new": case["new"] or new}
    return case | {"requests": case["requests"] or 3 * case["B"]}


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """An engine with each drafter under each load."""
    keep_programs()
    trial = Trial.of(case)
    plain: dict[str, float] = {}  # tokens a second by load
    for name in [PLAIN, *(x for x in ALL if x in (settings.only or DRAFTS) and x != PLAIN)]:
        for row in trial.rows(name, settings):
            if "tokens_per_s" in row:
                base = plain.setdefault(row["case"]["load"], row["tokens_per_s"])
                row["vs_plain"] = row["tokens_per_s"] / base
            yield row
        gc.collect()  # the engine's memory, before the next one takes it


@dataclasses.dataclass
class Trial:
    """A case: its model, its requests, and the answers of the first ones decoded alone.

    ``rate``: requests a second of plain decoding at full load, once that is known.
    """

    case: Case
    model: jspec.Decoder
    requests: list[PromptAndParams]
    alone: list[tuple[int, ...]]
    rate: float | None = None

    @classmethod
    def of(cls, case: Case) -> Trial:
        model, tokenizer = jspec.load_bundled()
        requests = requests_of(case, tokenizer)
        return cls(case, model, requests, decoded_alone(model, requests[:CHECKED]))

    @property
    def capacity(self) -> int:
        """Positions of the longest request."""
        return positions(self.requests)

    def rows(self, name: str, settings: Settings) -> Iterator[Row]:
        """Yield a row for each load, full load first; its tokens are checked."""
        try:
            full, engine = self._served(name)
        except MemoryError as error:
            yield self._row(name, "full", {"reason": str(error), "checked": None})
            return
        checked = self._checked(full.tokens[:CHECKED])
        if not checked["checked"]:
            yield self._row(name, "full", checked | {"reason": "its tokens are wrong"})
            return
        rate: float = self.rate or full.figures["requests_per_s"]
        self.rate, loads = rate, {}
        shares = () if self.case["mix"] == ROLLOUT else SHARES
        for share in shares[: 1 if settings.quick else None]:
            at = arrivals(len(self.requests), share * rate, seed=1)
            with bar(f"{name} at {share:.0%}", 1):
                loads[f"{share:.0%}"] = serve(engine, self.requests, at)
        del engine  # its memory is needed
        for load, served in ({"full": full} | loads).items():
            of_steps = self._of_steps(name, full) if load == "full" else {}
            yield self._row(name, load, figures_of(served) | of_steps | checked)

    def _checked(self, tokens: Sequence[tuple[int, ...]]) -> Row:
        """Whether the first requests have the same tokens as decoded alone, but for near ties."""
        scorer = check.scorer_of(self.model, *zip(*self.requests[:CHECKED], strict=True))
        result = check.greedy(scorer, tokens, self.alone, exact=False)
        return {"checked": result["checked"], "check": result}

    def _served(self, name: str) -> tuple[Load, jspec.Engine]:
        """The load of requests that all arrive at once, and the warmed-up engine."""
        times = ROLLOUTS if self.case["mix"] == ROLLOUT else 1
        with bar(f"compile {name}", 1):
            engine = jspec.Engine(
                self.model,
                slots=self.case["B"],
                capacity=self.capacity,
                draft=jspec.named_draft(ALL[name]),
                gamma=self._gamma(name),
            )
            engine.warm_up([params for _, params in self.requests])
        loads = []
        with bar(f"serve {name}", times) as advance:
            for _ in range(times):
                loads.append(serve(engine, self.requests, np.zeros(len(self.requests))))
                advance()
        return loads[-1], engine

    def _gamma(self, name: str) -> Any:
        """The gamma of the engine; None for the drafter's usual one."""
        gamma = self.case["gamma"]
        if name == PLAIN:
            return 0
        return {"usual": None, "auto": "auto"}[gamma] if gamma in GAMMAS[:2] else int(gamma)

    def _of_steps(self, name: str, full: Load) -> Row:
        """Tokens a second while all slots are taken over what the steps alone would give.

        Those steps have as many rows as there are slots, half through their answers.
        """
        gamma, draft = self._gamma(name), jspec.named_draft(ALL[name])
        gamma = draft.traits.default_gamma if gamma is None else gamma
        if gamma == "auto" or full.figures["full_tokens_per_s"] is None:
            return {}
        pairs = list(zip(self.requests, full.tokens, strict=True))[: self.case["B"]]
        rows = [[*prompt, *answer[: len(answer) // 2]] for (prompt, _), answer in pairs]
        config = jspec.StepConfig(gamma, draft)
        seconds = step_seconds(self.model, rows, self.capacity, config, usual_steps(draft, gamma))
        alone = self.case["B"] * full.figures["mean_accepted_length"] / seconds
        return {"of_steps": full.figures["full_tokens_per_s"] / alone, "step": {"seconds": seconds}}

    def _row(self, name: str, load: str, measured: Row) -> Row:
        case = {"model": "bundled", **self.case, "load": load}
        return {"operation": "serving", "case": case, "name": name} | measured


def positions(requests: Sequence[PromptAndParams]) -> int:
    """Positions of the longest request."""
    return max(len(prompt) + params.max_new_tokens for prompt, params in requests)


def decoded_alone(
    model: jspec.Decoder, requests: Sequence[PromptAndParams]
) -> list[tuple[int, ...]]:
    """The tokens of each request in a batch of its own, by plain decoding.

    All passes of prefill have one size, and all rows another one, so that they share programs.
    """
    config, tokens = jspec.StepConfig(0, jspec.NoDraft()), []
    shortest = min(len(prompt) for prompt, _ in requests)
    settings: dict[str, Any] = {
        "capacity": rounded_capacity(positions(requests)),
        "chunk": min(PIECE, shortest - 1),
    }
    with bar("decode alone", len(requests)) as advance:
        for prompt, params in requests:
            state = jspec.start_decoding(model, [prompt], params, config, **settings)
            alone = jspec.generate(model, [prompt], params, draft=None, prefilled=state)
            tokens.append(alone.tokens[0])
            advance()
    return tokens


def figures_of(load: Load) -> Row:
    """The figures of a row: those of its table, and all of a load."""
    figures = load.figures
    row: Row = {"tokens_per_s": figures["tokens_per_s"], "length": figures["mean_accepted_length"]}
    for name in ("half_free_s", "tail_tokens_per_s"):
        if name in figures:
            row[name] = figures[name]
    for name in ("token", "first_token"):  # medians
        if figures[f"{name}_s"]:
            row[f"{name}_ms"] = 1e3 * statistics.median(figures[f"{name}_s"])
    return row | {"served": figures}


def requests_of(case: Case, tokenizer: jspec.Tokenizer) -> list[PromptAndParams]:
    """Greedy requests of ragged lengths, about real texts."""
    rng, count = np.random.default_rng(0), case["requests"]
    share = rng.uniform(0.5, 1.5, (2, count))
    if case["mix"] == ROLLOUT:
        share[1] = np.where(np.arange(count) % 8 == 7, 1, 1 / 16)
    lengths, news = np.maximum((share.T * (case["S"], case["new"])).astype(int), 2).T.tolist()
    whole = texts(tokenizer, range(count), max(lengths))
    prompts = [text[:length] for text, length in zip(whole, lengths, strict=True)]
    return [
        (text, jspec.SamplingParams(max_new_tokens=new, seed=row, ignore_eos=True))
        for row, (text, new) in enumerate(zip(prompts, news, strict=True))
    ]


SERVING = Benchmark(
    name="serving",
    names=tuple(ALL),
    rows=rows,
    complete=complete,
    default=DEFAULT,
    choices=CHOICES,
    gpu=[
        *("mix=reasoning", "mix=long-context,B=16"),
        *(f"mix=reasoning,B=8,gamma={gamma}" for gamma in GAMMAS[1:]),
    ],
    quick=["mix=reasoning"],
    cpu=["mix=reasoning,B=2,S=16,new=16", "mix=long-context,B=4,S=384,new=16"],
)
SUITE = dataclasses.replace(
    suite_of(
        "serving",
        "the engine: tokens a second and the time of a token, by mix, load and drafter; unused "
        "positions of its cache",
        *(SERVING, MEMORY),
    ),
    custom_clocks=True,
)
