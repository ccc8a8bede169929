"""Tokens a second of a rollout: `jspec.tunix.Rollout` by drafter, against Tunix's own sampler.

Both get the same weights, prompts and limits through Tunix's interface, and are timed over whole
calls after the first one, which compiles. Answers end at the model's stop tokens. Greedy ones must
be plain decoding's but for near ties, sampled ones as likely as the model's own.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jspec
from bench.cases import Case
from bench.drafters import ALL, EXACT, PLAIN
from bench.point import Row, attempt, row
from bench.real import check
from bench.real.texts import prompts as chat_prompts
from bench.rivals import tunix
from bench.rivals.common import module
from bench.rivals.tunix import TUNIX
from bench.rollouts import differences
from bench.settings import Settings
from bench.suite import Benchmark
from bench.texts import texts
from jspec.cli.compile_cache import keep_programs

CALLS = 3  # timed ones
CHECKED = check.ROWS
SCORED = 64  # texts of a batch that is scored; those that a trainer's forward scores
SAMPLING = {"greedy": 0.0, "t1": 1.0}
DRAFTS = (PLAIN, "ngram", "suffix")
# B: answers; group: of them to a prompt; S and new: most tokens of a prompt and of an answer.
DEFAULT: Case = {"B": 64, "group": 8, "S": 512, "new": 512, "sampling": "t1", "exact": "no"}
CHOICES = {"sampling": tuple(SAMPLING), "exact": tuple(EXACT)}


def complete(case: Case) -> Case:
    if case["B"] % case["group"]:
        raise ValueError(f"B={case['B']} is no multiple of group={case['group']}")
    return case


@dataclasses.dataclass
class Trial:
    """A case: a model, its prompts, and what both rollouts are called with."""

    case: Case
    name: str
    model: jspec.Decoder
    prompts: tunix.Prompts

    @classmethod
    def of(cls, case: Case, settings: Settings) -> Trial:
        model, tokenizer = loaded(settings)
        count = case["B"] // case["group"]
        template = settings.model and jspec.load_chat_template(settings.model)
        if template is None:
            ids = texts(tokenizer, range(count), case["S"])
        else:
            ids = [x.tokens for x in chat_prompts(tokenizer, template, count, case["S"])]
        name = settings.model.stem if settings.model else "bundled"
        return cls(case, name, model, tunix.Prompts.of(tokenizer, model, ids))

    @property
    def temperature(self) -> float:
        return SAMPLING[self.case["sampling"]]

    @functools.cached_property
    def texts(self) -> list[str]:
        """The names of all prompts, each as often as it has answers."""
        return [str(i // self.case["group"]) for i in range(self.case["B"])]

    def config(self, seed: int) -> Any:
        return tunix.config_of(
            self.prompts,
            self.case["new"],
            temperature=self.temperature,
            top_p=1.0 if self.temperature else None,
            seed=jax.random.PRNGKey(seed),
            eos_tokens=list(self.model.config.stop_tokens),
        )

    def rollout(self, name: str, actor: Any) -> Any:
        """The rollout engine of a row."""
        if name == TUNIX:
            return tunix.sampler_of(actor, self.prompts, self.config(0))
        return module("jspec.tunix").Rollout(
            actor,
            self.prompts,
            self.config(0),
            slots=self.case["B"],
            draft=jspec.named_draft(ALL[name]),
            gamma=0 if name == PLAIN else "auto",
            exact=EXACT[self.case["exact"]],
        )

    def row(self, name: str) -> Row:
        rollout = self.rollout(name, tunix.actor_of(self.model))
        begin = time.perf_counter()
        rollout.generate(self.texts, self.config(0))
        first = time.perf_counter() - begin
        if name not in (TUNIX, PLAIN):  # gamma="auto" has learned the times of its chunks
            rollout.generate(self.texts, self.config(0))
        engine = None if name == TUNIX else rollout.engine
        before = engine and engine.stats.compilations
        seconds, outputs = [], []
        for seed in range(1, CALLS + 1):
            begin = time.perf_counter()
            outputs.append(rollout.generate(self.texts, self.config(seed)))
            seconds.append(time.perf_counter() - begin)
        counts = [sum(map(len, output.tokens)) for output in outputs]
        result = self.checked(outputs[0].tokens)
        measured: Row = {
            "tokens_per_s": sum(counts) / sum(seconds),
            "first_call_s": first,
            "tokens": counts,
            "longest": [max(map(len, output.tokens)) for output in outputs],
            "seconds": seconds,
            "check": result,
        }
        if engine is not None:
            measured["compilations"] = engine.stats.compilations - before
        measured |= self.compared(outputs, engine)
        checked = result["checked"]
        if not checked:
            measured = {"check": result, "reason": "its tokens are wrong"}
        return row("sampler", self.named, name, checked=checked, **measured)

    @property
    def named(self) -> Case:
        return {"model": self.name, **self.case}

    def checked(self, tokens: Any) -> dict[str, Any]:
        """Whether the first answer to each of the first prompts is the model's own."""
        group, count = self.case["group"], min(CHECKED, len(self.prompts.ids))
        ids = self.prompts.ids[:count]
        answers = [tokens[row * group].tolist() for row in range(count)]
        params = jspec.SamplingParams(max_new_tokens=self.case["new"], temperature=self.temperature)
        scorer = check.scorer_of(self.model, ids, [params] * count)
        if self.temperature:
            return check.sampled(scorer, answers, params)
        plain = jspec.generate(self.model, ids, params, draft=None).tokens
        stops = self.model.config.stop_tokens
        plain = [x[:-1] if x[-1] in stops else x for x in plain]
        return check.greedy(scorer, answers, plain, exact=False)

    def compared(self, outputs: Sequence[Any], engine: jspec.Engine | None) -> Row:
        """Log-probabilities of rollouts against other forwards.

        `jspec.score_tokens` scores all answers, and a trainer's forward the first `SCORED`.
        """
        ids, group = self.prompts.ids, self.case["group"]
        exact: Any = "bits" if engine is not None and self.case["exact"] == "bits" else None
        model = self.model if engine is None else engine.model
        own, scores, texts = [], [], []
        for output in outputs:
            own += output.logprobs
            texts += [[*ids[row // group], *map(int, x)] for row, x in enumerate(output.tokens)]
        for begin in range(0, len(texts), SCORED):
            scores += jspec.score_tokens(model, texts[begin : begin + SCORED], exact=exact)
        size, of_trainer = max(map(len, ids)) + self.case["new"], {}
        for dtype in dict.fromkeys((self.model.dtype, jnp.dtype("float32"))):
            actor = tunix.actor_of(self.model, dtype, dtype)
            theirs = differences.trainer_scores(actor, texts[:SCORED], size)
            of_trainer[dtype.name] = differences.between(own[:SCORED], theirs)
        return {
            "differences": differences.between(own, scores),
            "trainer_differences": of_trainer,
        }


def loaded(settings: Settings) -> tuple[jspec.Decoder, jspec.Tokenizer]:
    """The model of the settings, the bundled one if there is none."""
    if settings.model is None:
        return jspec.load_bundled()
    return jspec.load_model(settings.model), jspec.load_tokenizer(settings.model)


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """Tunix's sampler first, then an engine with each drafter."""
    keep_programs()
    trial = Trial.of(case, settings)
    base = None
    for name in (TUNIX, *DRAFTS):
        if not settings.wants(name):
            continue
        measured = attempt("sampler", trial.named, name, functools.partial(trial.row, name))
        if "tokens_per_s" in measured:
            base = base or (measured["tokens_per_s"] if name == TUNIX else None)
            if base:
                measured["vs_tunix"] = measured["tokens_per_s"] / base
        yield measured


SAMPLER = Benchmark(
    name="sampler",
    names=(TUNIX, *DRAFTS),
    rows=rows,
    complete=complete,
    default=DEFAULT,
    choices=CHOICES,
    gpu=["", "sampling=greedy"],
    quick=[""],
    cpu=["B=4,group=2,S=64,new=32"],
)
