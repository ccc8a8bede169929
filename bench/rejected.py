"""How likely rejected draft tokens were to be accepted: figure 5 of Yue et al. 2026.

A draft token x is accepted with the probability min(1, p(x) / q(x)) of the target's law p and the
draft's law q. Both are computed beside each step of ordinary decoding, from the same state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench.cases import Case
from bench.drafters import SAMPLING, drafts, params_of
from bench.point import Row, row
from bench.real.check import DEVIATIONS
from bench.settings import Settings, bar
from bench.suite import Benchmark
from bench.texts import texts
from jspec.decode.draft import Drafted
from jspec.decode.draft.autoregressive import within_limits
from jspec.decode.prefill import start_decoding
from jspec.decode.state import DecodeState, Models, StepRecord
from jspec.decode.step import decode_step, draft, run_target
from jspec.eval.sample import prepared
from jspec.typing import Array

# texts: prompts of S tokens, decoded together; new: tokens of each answer.
DEFAULT: Case = {"S": 8192, "texts": 8, "new": 256, "gamma": 7, "percent": 7}
SAMPLED = "t0.8"
NAMES = ("vegas-first", "vegas", "streaming", "quest", "specextend", "exact-topk")
BINS = 10


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each drafter: the distribution of its rejected tokens' acceptance probability."""
    model, tokenizer = jspec.load_bundled()
    prompts = texts(tokenizer, range(case["texts"]), case["S"])
    params = [
        dataclasses.replace(x, ignore_eos=True)
        for x in params_of(SAMPLED, case["new"], len(prompts))
    ]
    names = settings.only or NAMES[:1]
    with bar("rejected", len(names)) as advance:
        for name in names:
            drafter = jspec.named_draft(drafts(case["percent"] / 100)[name])
            config = jspec.StepConfig(case["gamma"], drafter)
            policy_params = prepared(config.cache_policy, model, tokenizer)
            models = drafter.prepare(Models(model, None, policy_params))
            state = start_decoding(models, prompts, params, config)
            observed = []
            while not bool(state.done.all()):
                state, *figures = observed_step(models, state, config)
                observed.append(jax.device_get(figures))
            yield row("rejected", case, name, **figures_of(observed))
            advance()


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def observed_step(
    models: Models, state: DecodeState, config: jspec.StepConfig
) -> tuple[DecodeState, StepRecord, Array]:
    """A step, and the acceptance probability of each token of its draft, ``[B, gamma]``."""
    with config.of_models():
        drafted, before = draft(models, state, config)
        drafted = within_limits(drafted, before, config.gamma)
        logits, _, _ = run_target(models, before, drafted, config)
    shares = acceptance(drafted, logits, SAMPLING[SAMPLED]["temperature"])
    return *decode_step(models, state, config), shares


def acceptance(drafted: Drafted, logits: Array, temperature: float) -> Array:
    """min(1, p / q) of each draft token, float32 ``[B, gamma]``.

    ``logits [B, gamma + 1, V]``: the target's.
    """
    assert drafted.logits is not None
    of_target, of_draft = (
        jnp.take_along_axis(
            jax.nn.log_softmax(x.astype(jnp.float32) / temperature), drafted.tokens[..., None], -1
        )[..., 0]
        for x in (logits[:, :-1], drafted.logits)
    )
    return jnp.exp(jnp.minimum(of_target - of_draft, 0))


def figures_of(observed: Sequence[tuple[StepRecord, np.ndarray]]) -> Row:
    """The figures of a row, from the record and the acceptance probabilities of each step.

    The number of accepted tokens, less the sum of their probabilities, is a martingale: in standard
    deviations it tests that the probabilities are those by which the steps accepted.
    """
    rejected, above, variance = [], 0.0, 0.0
    for record, shares in observed:
        for drafted, accepted, of_row in zip(record.drafted, record.accepted, shares, strict=True):
            tried = of_row[: min(accepted + 1, drafted)].astype(float)
            above += accepted - tried.sum()
            variance += (tried * (1 - tried)).sum()
            if accepted < drafted:
                rejected.append(float(of_row[accepted]))
    deviations = above / math.sqrt(max(variance, 1e-9))
    counts, edges = np.histogram(rejected, bins=BINS, range=(0, 1))
    shares = counts / max(len(rejected), 1)
    return {
        "checked": bool(abs(deviations) <= DEVIATIONS),
        "rejected": len(rejected),
        "deviations": float(deviations),
        "mean": float(np.mean(rejected)) if rejected else None,
        "below": dict(zip([f"{edge:.1f}" for edge in edges[1:]], shares.tolist(), strict=True)),
    }


REJECTED = Benchmark(
    name="rejected",
    default=DEFAULT,
    gpu=["", "S=31K"],
    quick=["S=2K,texts=4,new=64"],
    cpu=["S=256,texts=2,new=12,gamma=3", "S=4K"],
    names=NAMES,
    rows=rows,
)
