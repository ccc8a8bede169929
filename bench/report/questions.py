"""The tables of RESULTS.md, each with the question that it answers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from bench.report import figures, operations, real, steps, systems
from bench.report.markdown import Line, distinct
from bench.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Question:
    """A table.

    Attributes:
        title: its heading; empty for a table under the heading before.
        suites: whose results it is of.
        words: what was measured, with which model and acceptance.
        lines: its rows, from the runs of its suites.
        labels: how many columns say what a row is of.
        headline: case, result and comparison of its lines in the first table; ``{heading}`` is a
            cell.
        notes: what follows the table, if anything.
        picture: what stands above it, if anything.
    """

    title: str
    suites: tuple[str, ...]
    words: str
    lines: Callable[[Sequence[Run]], Iterator[Line]]
    labels: int
    headline: tuple[str, str, str] | None = None
    notes: Callable[[Sequence[Run]], str] | None = None
    picture: figures.Picture | None = None

    def rows(self, runs: Sequence[Run]) -> list[Line]:
        """The rows of the table; of runs with the same case the first stands."""
        of_suites = [run for suite in self.suites for run in runs if run.suite == suite]
        return distinct(self.lines(of_suites), self.labels)

    def headlines(self, runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
        """Case, result and comparison of the rows that are headlines."""
        for line in self.rows(runs):
            if self.headline is not None and line.headline:
                yield tuple(
                    re.sub(r"{(.*?)}", lambda x, cells=line.cells: cells.get(x[1], ""), part)
                    for part in self.headline
                )


MODELS = ("real",)
PLACE = "{model}, B={B}, {context} tokens"
QUESTIONS = (
    Question(
        "Real models, acceptance measured",
        MODELS,
        "Real weights in bfloat16, real texts, **acceptance measured**. *plain tok/s*: in brackets "
        "over plain decoding at its byte floor; *vs plain*: while all rows decode; *batch*: until "
        "the slowest row ends. Greedy, then at T=0.8, answers of the fewest tokens measured; a "
        "speed below 1 is called slower; gamma: where vegas is fastest of those measured. Most "
        "runs predate today's kernels and have vegas without `ahead`: [the "
        "comparison](comparison.md#a-whole-step) has steps by backend.",
        real.speeds,
        4,
        (
            "{model}, B={rows}, {context} tokens, vegas, acceptance measured",
            "{vs plain}, T=0.8: {vs plain, T=0.8}",
            "plain decoding, tokens/s: {plain tok/s}; until the slowest row ends: {batch}, T=0.8: "
            "{batch, T=0.8}; the fastest drafter: {fastest}",
        ),
        picture=figures.OF_MODELS,
    ),
    Question(
        "Every drafter at the largest batch",
        MODELS,
        "Acceptance measured, in the run with most drafters, which may be older than the above: "
        "tokens/step, greedy, of answers that do not repeat themselves (in "
        "brackets: of all, where those are none); speed over plain decoding, greedy and at T=0.8. "
        "*lossy*: without verification, and the share of plain decoding's tokens up to the first "
        "one that differs.",
        real.drafters,
        1,
        notes=real.not_timed,
    ),
    Question(
        "How often vegas is accepted",
        MODELS,
        "Of the largest batch: tokens per verification step with the standard error over rows, and "
        "the percentage of the steps with so many draft tokens in which the first, second, ... was "
        "accepted.",
        real.acceptance,
        2,
    ),
    Question(
        "Exact mode and other libraries",
        MODELS,
        "Greedy, the same prompts and weights, over jspec's plain decoding without exact mode. "
        "With [`exact`](exact.md) drafts change no token: *same answers* are plain decoding's, "
        "token for token, in exact mode those with vegas.",
        real.decoders,
        5,
    ),
    Question(
        "What limits a step",
        MODELS,
        "Greedy, by a profile, the largest and the slowest cell. A step divides into the time to "
        "read its *bytes* at the ceiling, what its *kernels* take above that, and *gaps*; *plain "
        "steps*: its time in steps of plain decoding, slower where above tokens/step.",
        real.limited,
        4,
    ),
    Question(
        "Verification and packing",
        ("verify", "pack", "fused", "sampling"),
        "What `implementation=None` takes by today's orders, median device time, against PyTorch, "
        "FlashInfer, pairs of kernels in two steps and jspec's other kernels. Lengths from "
        "Binomial(gamma, alpha), vocabulary 4096; bfloat16; verify_stochastic: gamma 5, L2 cold. "
        "No model.",
        operations.verify_lines,
        3,
        ("{operation}, {case}", "{us} us", "{over the best rival}"),
        picture=figures.OF_GAMMA,
    ),
    Question(
        "Attention over a cache, and selection",
        ("attention", "gather", "select"),
        "bfloat16, device time, L2 cold, against cuDNN, FlashAttention-3 (the best of four numbers "
        "of splits), FlashInfer, PyTorch and CUB, and jspec's other kernels. gathered_attention "
        "reads n of S slots in place; select finds the k highest of n scores. No model.",
        operations.attention_lines,
        3,
        ("{operation}, {case}", "{us} us", "{of ceiling} ceiling; {over the best rival}"),
        picture=figures.OF_CONTEXT,
    ),
    Question(
        "A layer and a step of each policy",
        ("hata", "hata-layer", "decode", "hata-e2e"),
        "Random weights, 1.56 % of the context selected (n of S slots), over the fastest dense "
        "attention or the dense step. A layer: all between its projections, the policy's work "
        "included; a step: all layers, two of them dense.",
        steps.policies,
        2,
        ("{case}, hata", "{hata}", "{hata, speed} over dense, {dense}"),
    ),
    Question(
        "A cache in host memory",
        ("decode", "hata-off"),
        "hata with keys and values in host memory (`hata_off`), one row, 1.56 % of the context "
        "read, random weights, over dense decoding with the cache on the GPU. *moved*: rows over "
        "the bus, of those that are read; *bus*: fetching them alone.",
        steps.in_host_memory,
        3,
        (
            "{model}, {context} tokens, hata_off",
            "{step ms} ms a step",
            "{speed over dense} over dense decoding with the cache on the device",
        ),
    ),
    Question(
        "Quality of policies",
        ("quality", "ruler"),
        "Percent right on questions of RULER, a model reading a share of the context, or all of it "
        "(`dense`): the bundled one on six kinds for byte-level models, others on eleven of its "
        "own in their chat template; *bytes*: read to score a key; *accepted length*: as a "
        "drafter, gamma 4, measured. Policies with -16 read 16 bytes, as hata does.",
        systems.quality,
        4,
        (
            "{model} model, {context} tokens, {read} of them read, hata",
            "{hata} % right",
            "reading all {dense}, the exact top k {exact_topk}, as many bytes by Quest {quest-16}",
        ),
        picture=figures.OF_BUDGET,
    ),
    Question(
        "Accepted lengths of drafters",
        ("quality", "vegas-accept"),
        "Tokens committed per verification, **measured** with the bundled model, drafts with 7 % "
        "of the context; *over Vegas*: above Vegas as published, "
        "the mean of the same texts and its standard error.",
        systems.accepted,
        2,
    ),
    Question(
        "A decoding step at real models' shapes",
        ("decode", "families"),
        "Random weights in bfloat16 or mxfp4, a pass of T tokens: milliseconds, and how many times "
        "the time to read its bytes at the read ceiling. The largest case of each model, and the "
        "worst of all.",
        steps.passes,
        4,
        (
            f"{PLACE}, T=10",
            "{T=10, over its floor}",
            "times the time to read its bytes at the ceiling",
        ),
    ),
    Question(
        "An iteration and its parts",
        ("decode", "vegas-breakdown", "families"),
        "Random weights; milliseconds of a draft of gamma tokens by vegas and its verification, of "
        "the two parts, and of a plain step. *selecting adds*: to the rest of the iteration.",
        steps.iterations,
        4,
    ),
    Question(
        "Throughput with imposed acceptance",
        ("decode", "throughput", "families"),
        "Real models' shapes with random weights: the time of an iteration is measured, **the "
        "tokens that it commits are imposed**, by the acceptance that Yue et al. 2026 state for "
        "LongBench-v2. No answer was read.",
        steps.imposed,
        5,
        (
            f"{PLACE}, {{draft}}, gamma={{gamma}}",
            "{tok/s} tokens/s",
            "{vs plain} over plain decoding; imposed acceptance (the paper's)",
        ),
    ),
    Question(
        "Serving",
        ("serving", "step"),
        "The bundled model, greedy, **acceptance measured**. Continuous batching by `jspec.Engine`,"
        " all requests there at once (median / 90th percentile; *of steps*: over the rate of the "
        "steps alone); *generate*: a whole batch on source code, which suits n-grams.",
        systems.served,
        4,
        (
            "bundled model, {mix}, B={rows}, {drafter}",
            "{tok/s} tokens/s",
            "{vs no drafts} over no drafts",
        ),
        picture=figures.OF_BATCH,
    ),
    Question(
        "Helix on several GPUs",
        ("helix", "collectives"),
        "Microseconds of a message in a jitted loop, NCCL's unless it says pallas or cuda.",
        systems.collectives,
        3,
    ),
    Question(
        "",
        ("helix", "helix-attention"),
        "A layer's attention with its exchange, over one device that has all of the cache; each by "
        "its fastest exchange and chunks, gathered queries and Medha by NCCL alone.",
        systems.shared_attention,
        4,
        ("{shape}, B={B}, S={S}, KVP=2", "{Helix}", "one device {one device}"),
    ),
    Question(
        "",
        ("helix", "helix-step"),
        "Whole steps, random weights, gamma 5; Helix (KVP=2) over tensor parallelism, *by heads*; "
        "each by its fastest exchange and backends, Medha by NCCL alone.",
        systems.shared_steps,
        4,
        ("{shape}, B={B}, S={S}, KVP=2", "{Helix}", "tensor parallel {by heads}"),
    ),
    Question(
        "",
        ("helix_shapes",),
        "Whole steps of shapes with fewer KV heads than GPUs, experts or latents, random weights; "
        "over tensor parallelism, which copies the cache where there are more GPUs than KV heads.",
        systems.steps_of_shapes,
        5,
        ("{shape}, B={B}, S={S}, {GPUs} GPUs", "{Helix}", "tensor parallel {tensor parallel}"),
    ),
    Question(
        "Exactness",
        ("quality", "parity"),
        "Greedy tokens in bfloat16 against exact plain decoding ([what exact is](exact.md)). "
        "*margin*: how far apart the two highest logits of a flip are, median and largest.",
        systems.flips,
        3,
        (
            "{model}, exact={exact}, {settings} settings of drafter, gamma and batch",
            "{flips} flips",
            "in {tokens} greedy tokens, against plain decoding",
        ),
    ),
)
