"""Prefill of prompts, and what a policy adds to it: hash codes, pages, components of keys.

HATA (arXiv 2506.02572) states less than 1 % for hashing. The prompts are random tokens;
the keys of all layers must be those without a policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

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
REPEATS = 3


def rows(case: Case, policies: Mapping[str, Policy]) -> Iterator[Row]:
    """A row for each policy, with its time over that of dense attention, which comes first."""
    model = drawn(case["model"], case["layers"])
    case = case | {"layers": model.config.num_layers}
    rng = np.random.default_rng([workload.SEED, case["B"], case["S"]])
    shape = case["B"], case["S"]
    prompts = [list(map(int, x)) for x in rng.integers(0, model.config.vocab_size, shape, np.int32)]
    dense: tuple[list[float], float] | None = None
    for name, policy in policies.items():
        models = Models(model, None, arrays_of(policy, model.config.layers))
        config = StepConfig(0, NoDraft(), target=policy)
        try:
            sums, samples = measured(models, prompts, config)
        except Exception as error:
            yield row("prefill", case, name, checked=False, reason=failure(name, error).reason)
            continue
        dense = (sums, float(np.median(samples))) if name == DENSE else dense
        about: dict[str, Any] = {"wall_ns": samples}
        about["tokens_per_s"] = case["B"] * case["S"] / float(np.median(samples)) * 1e9
        if dense is not None:
            if sums != dense[0]:
                reason = "its keys are not those without a policy"
                yield row("prefill", case, name, checked=False, reason=reason)
                continue
            about["over_dense"] = float(np.median(samples)) / dense[1]
        yield row("prefill", case, name, checked=dense is not None or None, **about)


def measured(
    models: Models, prompts: list[list[int]], config: StepConfig
) -> tuple[list[float], list[int]]:
    """The sum of each layer's keys, and nanoseconds of prefills without compiling."""
    sums: list[float] = []
    samples = []
    for _ in range(REPEATS + 1):
        run, begin = PROGRAMS.timed(), time.perf_counter()
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        state = jax.block_until_ready(start_decoding(models, prompts, params, config, run=run))
        samples.append(round((time.perf_counter() - begin - run.compile_s) * 1e9))
        sums = list(map(float, jax.device_get(_sums(state))))
        del state
    return sums, samples[1:]


@jax.jit
def _sums(state: DecodeState) -> list[jax.Array]:
    return [column["keys"].astype(jnp.float32).sum() for column in state.cache.columns]
