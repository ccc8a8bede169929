"""The tables of RESULTS.md, each with the question that it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bench.report import operations, real, systems
from bench.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Question:
    """A table.

    Attributes:
        title: its heading; empty for a table under the heading before.
        suites: whose results it is of.
        words: what was measured, with which model and acceptance.
        table: writes it from the runs of its suites.
        notes: what follows it, if anything.
        has_picture: whether the figure of its suite stands with it.
        every_card: whether there is a picture of each GPU, not of the first one alone.
    """

    title: str
    suites: tuple[str, ...]
    words: str
    table: Callable[[Sequence[Run]], str]
    notes: Callable[[Sequence[Run]], str] | None = None
    has_picture: bool = False
    every_card: bool = False


REAL = ("real",)
QUESTIONS = (
    Question(
        "Real models, acceptance measured",
        REAL,
        "Real weights in bfloat16, real texts, **acceptance measured**. *plain tok/s*: in brackets "
        "over plain decoding at its byte floor; *vs plain*: while all rows decode; *batch*: until "
        "the slowest row ends. Greedy, then at T=0.8, answers of the fewest tokens measured; a "
        "speed below 1 is called slower.",
        real.speeds,
        has_picture=True,
        every_card=True,
    ),
    Question(
        "Every drafter at the largest batch",
        REAL,
        "Acceptance measured, greedy unless it says T=0.8; tokens/step of answers that do not "
        "repeat themselves (in brackets: of all, where those are none).",
        real.drafters,
        real.not_timed,
    ),
    Question(
        "How often vegas is accepted",
        REAL,
        "Of the largest batch: tokens per verification step with the standard error over rows, and "
        "the percentage of the steps with so many draft tokens in which the first, second, ... was "
        "accepted.",
        real.acceptance,
    ),
    Question(
        "Exact mode and other libraries",
        REAL,
        "Greedy, the same prompts and weights, over jspec's plain decoding without exact mode. "
        "`exact=True` computes a token by the same bits in every pass: *same answers* are plain "
        "decoding's, token for token.",
        real.decoders,
    ),
    Question(
        "What limits a step",
        REAL,
        "Greedy, by a profile, the largest and the slowest cell. A step divides into the time to "
        "read its *bytes* at the ceiling, what its *kernels* take above that, and *gaps*; *plain "
        "steps*: its time in steps of plain decoding, slower where above tokens/step.",
        real.limited,
    ),
    Question(
        "Verification and packing",
        ("verify", "pack", "fused", "sampling"),
        "What `implementation=None` takes, median device time, against PyTorch, FlashInfer, pairs "
        "of kernels in two steps and jspec's other kernels. Lengths from Binomial(gamma, alpha), "
        "vocabulary 4096; bfloat16; verify_stochastic: gamma 5, L2 cold. No model.",
        operations.verification,
        has_picture=True,
        every_card=True,
    ),
    Question(
        "Attention over a cache, and selection",
        ("attention", "gather", "select"),
        "bfloat16, device time, L2 cold, against cuDNN, FlashAttention-3 (the best of four numbers "
        "of splits), FlashInfer, PyTorch and CUB, and jspec's other kernels. gathered_attention "
        "reads n of S slots in place; select finds the k highest of n scores. No model.",
        operations.attention,
        has_picture=True,
    ),
    Question(
        "A layer and a step of each policy",
        ("hata", "hata-layer", "decode", "hata-e2e"),
        "Random weights, 1.56 % of the context selected (n of S slots), over the fastest dense "
        "attention or the dense step. A layer: all between its projections, the policy's work "
        "included; a step: all layers, two of them dense.",
        systems.policies,
    ),
    Question(
        "A cache in host memory",
        ("hata", "hata-off"),
        "hata with keys and values in host memory (`hata_off`), one row, 1.56 % of the context "
        "read, random weights, over dense decoding with the cache on the GPU. *moved*: rows over "
        "the bus, of those that are read; *bus*: fetching them alone.",
        systems.in_host_memory,
    ),
    Question(
        "Quality of policies",
        ("quality", "ruler"),
        "Percent right on RULER's six kinds of questions, the bundled model reading a share of the "
        "context; *bytes*: of a key, read to score it; *accepted length*: as a drafter, gamma 4, "
        "measured. Policies with -16 read 16 bytes, as hata does.",
        systems.quality,
        has_picture=True,
    ),
    Question(
        "Accepted lengths of drafters",
        ("quality", "vegas-accept"),
        "Tokens committed per verification, **measured** with the bundled model, drafts with 7 % "
        "of the context; *over Vegas*: above Vegas as published, "
        "the mean of the same texts and its standard error.",
        systems.accepted,
    ),
    Question(
        "A decoding step at real models' shapes",
        ("decode", "families"),
        "Random weights in bfloat16 or mxfp4, a pass of T tokens: milliseconds, and how many times "
        "the time to read its bytes at the read ceiling. The largest case of each model, and the "
        "worst of all.",
        systems.steps,
    ),
    Question(
        "An iteration and its parts",
        ("decode", "vegas-breakdown", "families"),
        "Random weights; milliseconds of a draft of gamma tokens and its verification, of the "
        "two parts, and of a plain step. *selecting adds*: to the rest of the iteration.",
        systems.iterations,
    ),
    Question(
        "Throughput with imposed acceptance",
        ("decode", "throughput", "families"),
        "Real models' shapes with random weights: the time of an iteration is measured, **the "
        "tokens that it commits are imposed**, by the acceptance that Yue et al. 2026 state for "
        "LongBench-v2. No answer was read.",
        systems.imposed,
    ),
    Question(
        "Serving",
        ("serving", "step"),
        "The bundled model, greedy, **acceptance measured**. Continuous batching by `jspec.Engine`,"
        " all requests there at once (median / 90th percentile; *of steps*: over the rate of the "
        "steps alone); *generate*: a whole batch on source code, which suits n-grams.",
        systems.served,
        has_picture=True,
    ),
    Question(
        "Helix on two GPUs",
        ("helix", "collectives"),
        "Microseconds of a message in a jitted loop, NCCL's unless it says pallas or cuda.",
        systems.collectives,
    ),
    Question(
        "",
        ("helix", "helix-attention"),
        "A layer's attention with its exchange, over one device that has all of the cache.",
        systems.shared_attention,
    ),
    Question(
        "",
        ("helix", "helix-step"),
        "Whole steps, random weights, gamma 5; Helix (KVP=2) over tensor parallelism, *by heads*.",
        systems.shared_steps,
    ),
    Question(
        "Exactness",
        ("quality", "parity"),
        "Greedy tokens in bfloat16 against exact plain decoding ([what exact is](exact.md)). "
        "*margin*: how far apart the two highest logits of a flip are, median and largest.",
        systems.flips,
    ),
)
