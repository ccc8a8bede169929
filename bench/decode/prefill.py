"""Prefill of prompts, and what a policy adds to it: hash codes, pages, components of keys.

HATA (arXiv 2506.02572) states less than 1 % for hashing. The prompts are random tokens;
the keys of all layers must be those without a policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case
from bench.decode.shapes import drawn
from bench.point import Row, row
from bench.policies import arrays_of
from bench.program import failure
from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.programs import PROGRAMS
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.policies import Policy

DENSE = "dense"
REPEATS = 5


def rows(case: Case, policies: Mapping[str, Policy]) -> Iterator[Row]:
    """A row for each policy, with its time over that of dense attention, which comes first.

    The policies take turns: what they add is less than the clocks of a GPU drift by.
    """
    model = drawn(case["model"], case["layers"])
    case = case | {"layers": model.config.num_layers}
    rng = np.random.default_rng([workload.SEED, case["B"], case["S"]])
    shape = case["B"], case["S"]
    prompts = [list(map(int, x)) for x in rng.integers(0, model.config.vocab_size, shape, np.int32)]
    steps = {
        name: (
            Models(model, None, arrays_of(policy, model.config.layers)),
            StepConfig(0, NoDraft(), target=policy),
        )
        for name, policy in policies.items()
    }
    sums: dict[str, list[float]] = {}
    samples: dict[str, list[int]] = {name: [] for name in steps}
    reasons: dict[str, str] = {}
    for repeat in range(REPEATS + 1):
        for name in (name for name in steps if name not in reasons):
            try:
                sums[name], ns = measured(prompts, *steps[name])
            except Exception as error:
                reasons[name] = failure(name, error).reason
                continue
            if sums[name] != sums.get(DENSE, sums[name]):
                reasons[name] = "its keys are not those without a policy"
            elif repeat:  # the first one warms up
                samples[name].append(ns)
    for name in steps:
        if name in reasons:
            yield row("prefill", case, name, checked=False, reason=reasons[name])
            continue
        median = float(np.median(samples[name]))
        about = {"tokens_per_s": case["B"] * case["S"] / median * 1e9}
        if dense := samples.get(DENSE):
            about["over_dense"] = median / float(np.median(dense))
        checked = True if dense else None
        yield row("prefill", case, name, checked=checked, wall_ns=samples[name], **about)


def measured(
    prompts: list[list[int]], models: Models, config: StepConfig
) -> tuple[list[float], int]:
    """The sum of each layer's keys, and nanoseconds of a prefill without compiling."""
    run, begin = PROGRAMS.timed(), time.perf_counter()
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    state = jax.block_until_ready(start_decoding(models, prompts, params, config, run=run))
    ns = round((time.perf_counter() - begin - run.compile_s) * 1e9)
    return list(map(float, jax.device_get(_sums(state)))), ns


@jax.jit
def _sums(state: DecodeState) -> list[jax.Array]:
    return [column["keys"].astype(jnp.float32).sum() for column in state.cache.columns]
