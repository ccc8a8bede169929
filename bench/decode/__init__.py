"""Steps and iterations at the shapes of real models, against the bytes that they must read.

Weights, keys and values are random, and no prompt is prefilled: the time of a step does not depend
on them. The first layers of every row are compared with XLA before it is timed. Clock: *step* is
the marginal wall time of a jitted chunk of steps in a sequence of chunks, divided by its steps.
``op=pass``: a pass of T tokens without a draft, and a step that verifies T - 1 draft tokens, as a
chain and as a tree. ``op=draft``: an iteration, a draft with a share of
the context and its verification, by drafter. The tokens that it commits are imposed, by the
acceptance that a paper states (`bench.profiles`). ``op=read``: a step that reads what a policy
selects.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bench import ceilings, profiles
from bench.cases import Case
from bench.ceilings import Ceilings
from bench.decode import floors, prefill
from bench.decode.catalogue import MODELS
from bench.decode.check import LAYERS, first_selecting
from bench.decode.iterations import Iteration
from bench.decode.shapes import drawn
from bench.decode.states import NoisyDraft, NoisyPadding
from bench.drafters import ALL, BACKENDS, EXACT, STEP_SAMPLING, drafts, preferring
from bench.point import Row, row, row_without, spread
from bench.policies import NAMES, arrays_of, policies
from bench.program import Absent
from bench.rivals import torch_pass
from bench.settings import Settings
from bench.suite import Benchmark, suite_of
from jspec.cli.compile_cache import keep_programs
from jspec.decode.checks import check_exact
from jspec.decode.draft import named_draft
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.dispatch import BackendError
from jspec.models.decoder import Decoder
from jspec.policies import Policy, ScoredPolicy

STEPS, CPU_STEPS = 8, 1  # of a chunk
SHARE = 64  # a policy selects one in 64 tokens of the context: 1.56 %
LEAST = 128  # selected tokens at least, as policies with pages need
PERCENT = 7  # of the context, which sparse drafters read
DENSE_LAYERS = 2  # first layers, in which a policy does not select
PLAIN, ALONE = "plain", "verification"
CHAIN, TREE = "chain", "tree"  # what T - 1 draft tokens are
DRAFTS = tuple(name for name, text in ALL.items() if ">" not in text and text not in ALL)
USUAL = ("vegas", "vegas-first", "streaming", "quest", "specextend", "vegas-int8", "vegas-mxfp4")
READS = ("dense", "hata", "quest_32", "loki", "magicpig", "exact_topk", "streaming")
MODEL_NAMES = tuple(name for name, config in MODELS.items() if config.latent is None)
CHOICES = {"model": MODEL_NAMES, "exact": tuple(EXACT), "sampling": tuple(STEP_SAMPLING)}
SIZES = ("B=1,S=8K", "B=4,S=8K", "B=32,S=8K", "B=1,S=120K", "B=4,S=120K")
SMALL = "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b"
OTHERS = (  # by `--case` alone
    *("tiny", "llama-2-7b", "smollm2-135m", "qwen2.5-coder-0.5b"),
    *("qwen3-8b-2kv", "qwen3-8b-1kv"),
)
SHAPES = tuple(name for name in MODEL_NAMES if name not in OTHERS)


def benchmark_of(
    operation: str,
    config: Callable[[Case, str], StepConfig],
    names: tuple[str, ...],
    usual: tuple[str, ...],
    **cases: Any,
) -> Benchmark:
    """A benchmark of iterations.

    Args:
        operation: of its rows.
        config: the step of a case and a name.
        names: of drafters or policies.
        usual: those that run where ``--backend`` names none.
        cases: the default and the cases of the benchmark.
    """

    def rows(case: Case, settings: Settings) -> Iterator[Row]:
        keep_programs()
        model, limits = drawn(case["model"], case["layers"]), ceilings.measured()
        steps = CPU_STEPS if jax.default_backend() == "cpu" else STEPS
        copies, plain = {}, None  # quantised copies by kind; tokens a second
        for name in (x for x in names if x in (settings.only or usual)):
            if name == torch_pass.NAME:
                yield rival_row(operation, case, model, limits)
                continue
            step = config(case, name)
            if step.exact:
                try:
                    check_exact(model, step.cache_policy, step.exact)
                except BackendError as error:
                    yield row(operation, case, name, checked=None, reason=str(error))
                    continue
            policy, kind = step.cache_policy, floors.quantized_in(step)
            arrays = arrays_of(policy, model.config.layers)
            models = step.draft.prepare(Models(model, copies.get(kind), arrays))
            copies[kind] = models.draft
            iteration = Iteration(operation, case, name, models, step, steps, limits)
            for measured in iteration.measure():
                result = with_rate(measured, step)
                if name in (PLAIN, "dense"):
                    plain = result.get("tokens_per_s")
                if plain and "tokens_per_s" in result:
                    result["vs_plain"] = result["tokens_per_s"] / plain
                yield result

    return Benchmark(name=operation, names=names, rows=rows, **cases)


def rival_row(operation: str, case: Case, model: Decoder, limits: Ceilings) -> Row:
    """The row of a pass in torch."""
    case = case | {"layers": model.config.num_layers}
    measured = torch_pass.measured(model, case["B"], case["S"], case["T"])
    if isinstance(measured, Absent):
        return row_without(operation, case, measured)
    config = pass_config(case, PLAIN)
    of_parts = floors.of_iteration(Models(model), case["B"], case["S"], config, limits)
    over = {"over_floor": statistics.median(measured["step_ns"]) / sum(of_parts.values())}
    rest = measured | over | {"floors_ns": of_parts}
    return row(operation, case, torch_pass.NAME, checked=f"{LAYERS} layers", **rest)


def with_rate(row: Row, config: StepConfig) -> Row:
    """A row with tokens a second; drafts are accepted at the rate that the paper states."""
    time = spread(row, "step")
    is_partial = {ALONE, CHAIN, TREE} & {row["name"], row["case"].get("draft")}
    if time is None or is_partial or time.median <= 0:
        return row
    about = {}
    tokens = 1.0
    if config.gamma:
        rate = profiles.rate_of(row["case"]["model"], floors.quantized_in(config))
        tokens = profiles.committed(rate, config.gamma)
        about = {"acceptance": "imposed", "rate": rate, "tokens": tokens}
    return row | about | {"tokens_per_s": tokens * row["case"]["B"] / time.median * 1e6}


def pass_config(case: Case, name: str) -> StepConfig:
    """A pass of T tokens: a step whose gamma is T - 1, without a draft or with one of noise."""
    draft = NoisyPadding() if name == PLAIN else NoisyDraft(is_tree=name == TREE)
    return StepConfig(case["T"] - 1, draft)


def draft_config(case: Case, name: str) -> StepConfig:
    """A plain step, the verification alone, or an iteration of a drafter."""
    exact, gamma = EXACT[case["exact"]], case["gamma"]
    if name in (PLAIN, ALONE):
        return StepConfig(0 if name == PLAIN else gamma, NoisyPadding(), exact=exact)
    text = drafts(case.get("percent", PERCENT) / 100)[name]
    return StepConfig(gamma, named_draft(text), exact=exact)


def backend_config(case: Case, name: str) -> StepConfig:
    """The step of a case whose operations prefer a backend."""
    draft = case["draft"]
    config = read_config(case, draft) if draft in NAMES else draft_config(case, draft)
    return dataclasses.replace(config, backends=preferring(name))


def read_config(case: Case, name: str) -> StepConfig:
    """A plain step whose layers after the first two read what a policy selects."""
    return StepConfig(0, NoisyPadding(), target=policy_of(case, name))


def policy_of(case: Case, name: str) -> Policy:
    """A policy by name with the budget of a case."""
    return policies(max(case["S"] // SHARE, LEAST), dense_layers=DENSE_LAYERS)[name]


def checked_read(case: Case) -> Case:
    """The case; raises `ValueError` where no layer selects."""
    layers = MODELS[case["model"]].layers[: case["layers"] or None]
    policy = policy_of(case, "hata")
    assert isinstance(policy, ScoredPolicy)
    first_selecting(layers, policy)
    return case


PASS = benchmark_of(
    *("pass", pass_config, (PLAIN, CHAIN, TREE, torch_pass.NAME), (PLAIN,)),
    default={"model": "qwen3-8b", "layers": 0, "B": 1, "S": 8192, "T": 1},
    choices=CHOICES,
    gpu=[f"model={name},{size},T={T}" for name in SHAPES for size in SIZES for T in (1, 10)]
    + [f"S=8K,T={T}" for T in (2, 4, 16)],
    quick=[f"{size},T={T}" for size in SIZES[::2] for T in (1, 10)],
    cpu=["model=tiny,S=300,T=1", "model=tiny,S=300,T=3", "model=qwen3-4b,layers=2,S=2K"],
)
DRAFT = benchmark_of(
    *("draft", draft_config, (PLAIN, ALONE, *DRAFTS), (PLAIN, ALONE, *USUAL)),
    default={
        "model": "qwen3-8b",
        "layers": 0,
        "B": 4,
        "S": 122880,
        "gamma": 9,
        "percent": PERCENT,
        "exact": "no",
    },
    choices=CHOICES,
    gpu=[
        *("B=4,S=120K", "model=gpt-oss-20b-attention,B=20,gamma=7", "B=64,S=8K,gamma=6"),
        *("B=32,S=20K", "B=4,S=120K,exact=tokens", "model=qwen3-30b-a3b"),
        *("model=gpt-oss-20b", "model=gpt-oss-20b-mxfp4", "model=gemma-3-4b"),
        *(f"model={name},B=64,S=8K,gamma=5" for name in SMALL),
    ],
    quick=["B=4,S=120K"],
    cpu=["model=tiny,B=2,S=300,gamma=2"],
)
READ = benchmark_of(
    *("read", read_config, NAMES, READS),
    default={"model": "llama-3.1-8b", "layers": 0, "B": 4, "S": 131072},
    choices=CHOICES,
    complete=checked_read,
    gpu=["B=4,S=128K", "model=llama-2-7b,B=4,S=32K"],
    quick=["B=1,S=32K"],
    cpu=["model=tiny,B=1,S=300"],
)
BACKEND = benchmark_of(
    *("backend", backend_config, BACKENDS, BACKENDS),
    default={
        "model": "qwen3-8b",
        "layers": 0,
        "B": 4,
        "S": 8192,
        "gamma": 9,
        "exact": "no",
        "draft": ALONE,
        "sampling": "greedy",
    },
    choices=CHOICES | {"draft": (PLAIN, ALONE, *DRAFTS, "hata")},
    gpu=[
        *("B=1,S=8K,draft=plain", "B=1,S=8K", "S=120K,draft=plain", "S=120K", "S=120K,draft=vegas"),
        *("S=120K,draft=hata", "S=120K,sampling=t0.8", "S=120K,sampling=t0.8,draft=vegas"),
    ],
    quick=["S=120K"],
    cpu=["model=tiny,B=2,S=300,gamma=2", "model=tiny,B=2,S=300,gamma=2,sampling=t0.8"],
)


def prefill_rows(case: Case, settings: Settings) -> Iterator[Row]:
    """Prefill without a policy, and by those that the settings select."""
    names = (prefill.DENSE, *(x for x in settings.only or READS if x != prefill.DENSE))
    yield from prefill.rows(case, {name: policy_of(case, name) for name in names if name in NAMES})


PREFILL = Benchmark(
    name="prefill",
    names=NAMES,
    rows=prefill_rows,
    default={"model": "llama-3.1-8b", "layers": 0, "B": 1, "S": 32768},
    choices=CHOICES,
    gpu=["", "S=120K", "model=llama-2-7b"],
    quick=["S=8K"],
    cpu=["model=tiny,S=300"],
)
SUITE = dataclasses.replace(
    suite_of(
        "decode",
        "steps by drafter, by policy and by backend at real models' shapes, over their floors",
        *(PASS, DRAFT, READ, BACKEND, PREFILL),
    ),
    custom_clocks=True,
)
