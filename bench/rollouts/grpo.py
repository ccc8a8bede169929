"""GRPO until a reward: the same trainer with `jspec.tunix.Rollout` and with Tunix's own sampler.

The prompts, the rule and the objective are those of `examples/grpo.py`. The trainer has Tunix's
model with weights in float32; it computes in the dtype of the loaded model, and rollouts have their
weights in it. Everything compiles in a step before the first one, whose weights are dropped.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jspec
from bench.cases import Case
from bench.drafters import ALL, PLAIN
from bench.point import Row, attempt, row
from bench.rivals import tunix
from bench.rivals.common import module
from bench.rivals.tunix import TUNIX
from bench.rollouts.speed import loaded
from bench.settings import Settings
from bench.suite import Benchmark
from examples import grpo
from jspec.cli.compile_cache import keep_programs

SEEDS = 3
DRAFTS = (PLAIN, "suffix")
RATES = {"bundled": 1e-4}  # of Adam
RATE = 6e-5  # for other models
PARTS = ("rollout", "score", "train", "update")
# answers: to each of four prompts; steps: at most; target: the mean reward of a step at the end.
DEFAULT: Case = {"answers": 16, "new": 64, "steps": 40, "target": 0.8}


@dataclasses.dataclass
class Trial:
    """A case: the trainer's first weights, its step, and what rollouts are called with."""

    case: Case
    name: str
    model: jspec.Decoder
    tokenizer: jspec.Tokenizer

    def __post_init__(self) -> None:
        ids = [self.tokenizer.encode(text) for text in grpo.PROMPTS]
        self.prompts = tunix.Prompts.of(self.tokenizer, self.model, ids)
        self.texts = [str(i) for i in range(len(ids)) for _ in range(self.case["answers"])]
        self.config = tunix.config_of(self.prompts, self.case["new"], temperature=1.0, top_p=1.0)
        graph, self.weights = nnx.split(tunix.actor_of(self.model, jnp.float32))
        self.optimizer = optax.adam(RATES.get(self.name, RATE))
        self.train = grpo.train_step_of(partial(tunix.log_probabilities, graph), self.optimizer)
        self.compilations = grpo.Compilations()

    def rollout(self, name: str) -> Any:
        actor = tunix.actor_of(self.model)
        if name == TUNIX:
            return tunix.sampler_of(actor, self.prompts, self.config)
        options: dict[str, Any] = {"draft": jspec.named_draft(ALL[name])}
        if name == PLAIN:
            options["gamma"] = 0
        elif name == "suffix":
            options["draft"] = jspec.SuffixDraft(other_rows=True)
        rollout = module("jspec.tunix").Rollout
        return rollout(actor, self.prompts, self.config, slots=len(self.texts), **options)

    def step(self, rollout: Any, weights: Any, state: Any, seed: int) -> tuple[Any, Any, Row]:
        """A step of training, and its figures."""
        times = [time.perf_counter()]
        config = dataclasses.replace(self.config, seed=jax.random.PRNGKey(seed))
        output = rollout.generate(self.texts, config)
        times.append(time.perf_counter())
        rewards = np.array(list(map(grpo.reward, output.text)))
        rewards = rewards.reshape(-1, self.case["answers"])
        size = max(map(len, self.prompts.ids)) + self.case["new"]
        batch = grpo.batch_of(self.prompts.ids, output.tokens, output.logprobs, rewards, size)
        times.append(time.perf_counter())
        weights, state, difference = self.train(weights, state, batch)
        difference = float(difference)  # waits for the step
        times.append(time.perf_counter())
        rollout.update_params(weights)
        times.append(time.perf_counter())
        parts = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
        figures = {"reward": float(rewards.mean()), "difference": difference}
        return weights, state, figures | {"tokens": sum(map(len, output.tokens)), **parts}

    def trained(self, rollout: Any, seed: int) -> list[Row]:
        """The figures of the steps up to the target's."""
        weights, state, steps = self.weights, self.optimizer.init(self.weights), []
        rollout.update_params(weights)
        for index in range(self.case["steps"]):
            weights, state, figures = self.step(rollout, weights, state, 1000 * seed + index)
            steps.append(figures)
            if figures["reward"] >= self.case["target"]:
                break
        return steps

    def row(self, name: str, seeds: int) -> Row:
        rollout = self.rollout(name)
        for seed in range(2):  # the second gets weights as a step leaves them
            state = self.optimizer.init(self.weights)
            self.step(rollout, self.weights, state, seed)
        before = self.compilations.count
        runs = [self.trained(rollout, seed) for seed in range(1, seeds + 1)]
        compilations = self.compilations.count - before
        return row("grpo", self.named, name, checked=None, **figures(runs, self.case["target"])) | {
            "compilations": compilations
        }

    @property
    def named(self) -> Case:
        return {"model": self.name, **self.case}


def figures(runs: Sequence[Sequence[Row]], target: float) -> Row:
    """Seconds and steps until the target, None in runs that missed it; parts of a step."""
    reached = [run[-1]["reward"] >= target for run in runs]
    seconds = [sum(step[part] for step in run for part in PARTS) for run in runs]
    steps = [step for run in runs for step in run]
    milliseconds = {
        f"{part}_ms": 1e3 * statistics.median(step[part] for step in steps) for part in PARTS
    }
    result: Row = {
        "seconds": [x if ok else None for x, ok in zip(seconds, reached, strict=True)],
        "steps": [len(run) for run in runs],
        "difference": max(step["difference"] for step in steps),
        "rewards": [[round(step["reward"], 4) for step in run] for run in runs],
        **milliseconds,
    }
    if all(reached):
        result["to_reward_s"] = statistics.median(seconds)
    return result


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for Tunix's sampler, and for an engine with each drafter."""
    keep_programs()
    name = settings.model.stem if settings.model else "bundled"
    trial = cache(lambda: Trial(case, name, *loaded(settings)))
    seeds = 1 if settings.quick else SEEDS
    for rollout in filter(settings.wants, (TUNIX, *DRAFTS)):
        yield attempt(
            *("grpo", {"model": name, **case}, rollout),
            lambda rollout=rollout: trial().row(rollout, seeds),
        )


GRPO = Benchmark(
    name="grpo",
    names=(TUNIX, *DRAFTS),
    rows=rows,
    default=DEFAULT,
    gpu=[""],
    quick=[""],
    cpu=["answers=2,new=8,steps=2"],
)
