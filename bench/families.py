"""A decoding step of mixtures of experts and of models with windows, and Vegas on them.

gpt-oss-20b, Qwen3-30B-A3B, Gemma 3 4B and 27B: true shapes, random weights, keys and values, in
bfloat16; gpt-oss-20b-mxfp4 has its experts in MXFP4, as they are published. Clocks and checks are
those of `bench.decode` and `bench.breakdown`. The floor counts the bytes in memory that a pass
needs: the expected number of distinct routed experts that its tokens choose, and at most the window
of a layer that has one. The number of tokens that an iteration commits is imposed: the acceptance
rate is the paper's (`bench.profiles`), and lower where a quantised copy drafts. Mixtures in
bfloat16 are also measured with quantised drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from bench import breakdown, cases, decode, profiles, throughput
from bench.decode import catalogue, drafting, tables
from bench.decode.drafting import GUIDED
from bench.decode.iterations import Drafting, Shape, iterations
from bench.decode.shapes import Ceilings
from bench.decode.steps import Case, Steps
from bench.point import Row
from bench.settings import Settings, console
from bench.suite import Suite
from jspec.cli.compile_cache import keep_programs

MODELS = ("gpt-oss-20b", "gpt-oss-20b-mxfp4", "qwen3-30b-a3b", "gemma-3-4b", "gemma-3-27b")
TOKENS = (1, 4, 8, 10)  # of a pass
CPU_TOKENS = (1, 4)
# gamma: of the Vegas iteration, 0 for none; layers: number of first layers, 0 for all.
DEFAULT: cases.Case = {"model": MODELS[0], "B": 1, "S": 8192, "gamma": 0, "layers": 0}
CHOICES = {"model": MODELS}
SIZES = ("B=1,S=8K", "B=4,S=8K", "B=32,S=8K", "B=1,S=120K", "B=4,S=120K,gamma=9")
DEFAULT_CASES = tuple(f"model={name},{size}" for name in MODELS for size in SIZES)
DEFAULT_CASES += ("model=gemma-3-4b,B=32,S=120K",)  # the other models would not fit on one card
CPU = "B=1,S=300,gamma=2,layers=1"
FOOT = (
    "Of E routed experts, of which a token chooses k, a pass over n tokens of all rows needs "
    "E (1 - (1 - k / E) ** n) in the mean. gpt-oss-20b has its experts in bfloat16, "
    "gpt-oss-20b-mxfp4 in MXFP4, 4.25 bits a weight, and bytes are those in memory. -int8, -mxfp4: "
    "drafts read a copy in so many bits; in int8 it shares the experts. The paper states no "
    "acceptance for Qwen3-30B-A3B and Gemma 3: theirs is that of Qwen3-8B"
)


def case(text: str) -> cases.Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    return cases.parse(text, DEFAULT, CHOICES)


def grid(settings: Settings) -> list[cases.Case]:
    """The requested cases, or the suite's defaults."""
    defaults = DEFAULT_CASES
    if jax.default_backend() != "gpu":
        defaults = [f"model={name},{CPU}" for name in MODELS[: 1 if settings.quick else None]]
    elif settings.quick:
        defaults = [f"model={name},{SIZES[0]}" for name in MODELS]
    return [case(text) for text in settings.cases or defaults]


def run(settings: Settings) -> dict[str, Any]:
    """Steps and iterations of every model, one model after the other."""
    keep_programs()
    limits, steps = drafting.ceilings(), _steps()
    return {
        "read_ceiling_bytes_per_s": limits.read,
        "matrix_ceiling_flops_per_s": limits.matrix,
        "steps": steps,
        "weights": "random",
        "acceptance": profiles.STATED,
        "rows": _rows(settings, limits),
    }


def _steps() -> int:
    """Steps, or iterations, of a chunk."""
    return drafting.CPU_STEPS if jax.default_backend() == "cpu" else drafting.STEPS


def _rows(settings: Settings, limits: Ceilings) -> Iterator[Row]:
    chosen = grid(settings)
    for name, layers in dict.fromkeys((case["model"], case["layers"]) for case in chosen):
        cases_of_model = [
            case for case in chosen if (case["model"], case["layers"]) == (name, layers)
        ]
        asked = dataclasses.replace(settings.decode, steps=_steps(), layers=layers or None)
        yield from _of_model(
            name, cases_of_model, dataclasses.replace(settings, decode=asked), limits
        )


def _of_model(
    name: str, chosen: list[cases.Case], settings: Settings, limits: Ceilings
) -> Iterator[Row]:
    """The rows of a model, which is freed after the last of them."""
    model = decode.drawn(name, settings)
    tokens = CPU_TOKENS if jax.default_backend() == "cpu" else TOKENS
    measured = []
    for case in chosen:
        sizes = name, case["B"], case["S"]
        measured.append(Steps(model, Case(*sizes, tokens), settings, limits))
        if gamma := case["gamma"]:
            measured += iterations(model, Shape(*sizes), draftings(name, gamma), settings, limits)
    for row in decode.by_size(name, measured):
        yield throughput.imposed(row, {}) if row["name"] in throughput.NAMES else row


def draftings(model: str, gamma: int) -> list[Drafting]:
    """The iterations of a case: those that `bench.breakdown` needs for the parts of Vegas, and
    quantised drafts of a mixture in bfloat16."""
    is_bfloat16_mixture = (
        catalogue.MODELS[model].experts is not None and model not in catalogue.IN_MXFP4
    )
    quantized = throughput.QUANTIZED if is_bfloat16_mixture else {}
    return [
        Drafting("plain", "none", 0),
        Drafting(breakdown.ALONE, "none", gamma),
        Drafting("vegas", GUIDED, gamma),
        *(Drafting(name, text, gamma) for name, text in quantized.items()),
    ]


def parts(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The result split into those of `bench.decode`, `bench.breakdown` and `bench.throughput`."""
    rows = result["rows"]
    iterated = tables.of_kind(rows, "iteration")
    imposed = [row for row in iterated if "acceptance" in row]
    every = tables.of_kind(rows, "decode_step"), iterated, imposed
    steps, whole, speeds = (result | {"rows": rows_of_kind} for rows_of_kind in every)
    return steps, whole, speeds


def show(result: dict[str, Any]) -> None:
    """Steps, the parts of iterations, and tokens a second."""
    steps, whole, speeds = parts(result)
    tables.show(steps)
    if whole["rows"]:
        breakdown.show(whole)
        throughput.show(speeds)
    console().print(FOOT, markup=False)


SUITE = Suite(
    "families",
    "a step of gpt-oss, Qwen3-MoE and Gemma 3 at their true shapes, and an iteration by Vegas",
    run,
    show,
    compare=tables.compare,
    case=case,
)
