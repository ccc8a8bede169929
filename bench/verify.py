"""Verification of draft tokens, greedy and stochastic: every backend, PyTorch and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case, product
from bench.program import equals, reference
from bench.rivals import sampling, verification
from bench.suite import OperationBenchmark, Setup, suite_of
from jspec.ops.acceptance_scan import ACCEPTANCE_SCAN
from jspec.ops.commit import VERIFY_AND_COMMIT
from jspec.ops.sample import SAMPLE, Role, Sampling, number, settings_of
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.tree import VERIFY_TREE, random_tree
from jspec.ops.verify import VERIFY_GREEDY

FEED = (0, 2)  # accepted counts become the next draft lengths
GAMMA = 5  # of stochastic verification
SLOTS = 256  # tokens that a row may have
STATIC = {"rule": "token", "filtered": False, "axis_name": None}


def greedy_setup(case: Case) -> Setup:
    """Greedy verification of drafts whose accepted lengths are Binomial(gamma, alpha)."""
    tokens = workload.make_tokens(case["B"], case["gamma"], case["alpha"])
    is_looped = case["B"] in (1, 32) and case["gamma"] in (8, 128) and case["alpha"] == 0.6
    return Setup(
        tuple(map(jax.device_put, tokens.inputs)),
        is_verified(tokens),
        sum(x.nbytes for x in (tokens.draft, tokens.target)),
        rivals=verification.verify(tokens),
        feed=FEED if is_looped else None,
    )


def is_verified(tokens: workload.Tokens) -> Callable[[Any], bool]:
    """A check that the first six outputs are the fields of `Verified`."""
    expected = workload.expected_verified(tokens)
    return lambda outputs: all(map(np.array_equal, outputs, expected))


def scan_setup(case: Case) -> Setup:
    """The verification paper's comparison: all write the accepted count, the mismatch flag and the
    next token, and nothing else.

    ``order=sorted``: rows by their accepted length, as a scheduler that predicts it without error
    would sort them. It is the paper's future work: the threads of a warp in the naive scan then end
    together.
    """
    tokens = workload.make_tokens(case["B"], case["gamma"], case["alpha"])
    if case["order"] == "sorted":
        tokens = tokens.by_accepted()
    accepted, _, mismatch, following, *_ = workload.expected_verified(tokens)
    return Setup(
        tuple(map(jax.device_put, (tokens.draft, tokens.target))),
        lambda outputs: all(map(np.array_equal, outputs, (accepted, mismatch, following))),
        sum(x.nbytes for x in (tokens.draft, tokens.target)),
        rivals=verification.verify(tokens),
    )


def stochastic_setup(case: Case) -> Setup:
    """Stochastic verification at temperature 1, with and without logits of the draft."""
    logits, arguments = stochastic_inputs(case)
    arguments = jax.device_put(arguments)
    uniforms = uniforms_of(arguments)
    draft_bytes = 0 if logits.draft_logits is None else logits.draft_logits.nbytes
    return Setup(
        arguments,
        equals_reference(logits, uniforms, arguments),
        logits.target.nbytes + draft_bytes,
        STATIC,
        sampling.sampling(logits, uniforms),
    )


def stochastic_inputs(case: Case) -> tuple[workload.Logits, tuple[Any, ...]]:
    """The logits, and the arguments of the backends of `jspec.ops.verify_stochastic`."""
    batch = case["B"]
    is_one_hot = case["draft"] == "one-hot"
    logits = workload.make_logits(batch, GAMMA, case["V"], one_hot=is_one_hot)
    lengths, stops = np.full(batch, GAMMA, np.int32), np.full((batch, 1), -1, np.int32)
    positions = np.arange(batch, dtype=np.int32) * 100
    rows = Sampling(
        temperature=jnp.ones(batch, jnp.float32),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch, jnp.float32),
        min_p=jnp.zeros(batch, jnp.float32),
        seeds=jnp.arange(batch, dtype=jnp.uint32),
    )
    drafted = (logits.draft, logits.target, lengths, stops)
    return logits, (*drafted, settings_of(rows), positions, logits.draft_logits)


def uniforms_of(arguments: tuple[Any, ...]) -> np.ndarray:
    """The numbers in 0..1 that verification draws, float32 ``[3, B, gamma + 1]``: to accept, for a
    residual, for a bonus token. They keep the upper 24 of 64 bits."""
    seeds, positions = arguments[4].seeds, arguments[5]
    where = positions[:, None] + jnp.arange(GAMMA + 1, dtype=jnp.int32)[None]
    draw = jax.jit(lambda role: number(seeds, where, role))
    roles = (Role.ACCEPT, Role.RESIDUAL, Role.BONUS)
    upper = np.stack([np.asarray(draw(np.uint32(role))) for role in roles]) >> np.uint64(40)
    return upper.astype(np.float32) * np.float32(2.0**-24)


def equals_reference(
    logits: workload.Logits, uniforms: np.ndarray, arguments: tuple[Any, ...]
) -> Callable[[Any], bool]:
    """A check that outputs equal those of `xla`, which must agree with float64 sums."""
    reference = jax.jit(partial(VERIFY_STOCHASTIC.backend("xla").run, **STATIC))
    expected = [np.asarray(x) for x in reference(*arguments)]
    is_right = workload.plausible(logits, uniforms, expected[0], expected[3])
    return lambda outputs: is_right and all(map(np.array_equal, outputs, expected))


GREEDY = OperationBenchmark(
    operation=VERIFY_GREEDY,
    setup=greedy_setup,
    rivals=verification.VERIFY,
    states=("warm",),
    default={"B": 32, "gamma": 8, "alpha": 0.9},
    gpu=product(B=(1, 4, 16, 32, 128, 1024), gamma=(4, 8, 16, 32, 64, 128), alpha=(0.3, 0.6, 0.9)),
    quick=product(B=(1, 32), gamma=(8, 128), alpha=(0.3, 0.6, 0.9)),
    cpu=product(B=(1, 32), gamma=(8, 128), alpha=(0.3, 0.9)),
)
SCAN = OperationBenchmark(
    operation=ACCEPTANCE_SCAN,
    setup=scan_setup,
    rivals=verification.VERIFY,
    states=("warm",),
    default={"B": 32, "gamma": 128, "alpha": 0.9, "order": "drawn"},
    choices={"order": ("drawn", "sorted")},
    gpu=[
        *product(B=(1, 4, 16, 32), gamma=(4, 8, 16, 32, 64, 128), alpha=(0.3, 0.6, 0.9)),
        *product(B=(1024, 16384), gamma=(128,), alpha=(0.6, 0.9), order=("drawn", "sorted")),
    ],
    quick=product(B=(32,), gamma=(8, 128), alpha=(0.3, 0.9)),
    cpu=product(B=(32,), gamma=(8, 128), alpha=(0.3, 0.9)),
)


def commit_setup(case: Case) -> Setup:
    """What a greedy step runs: the argmax of T tokens' logits, verification, and the commit.

    Rows are not donated: a backend copies the tokens of 256 slots a row first.
    """
    batch, gamma = case["B"], case["T"] - 1
    rng = np.random.default_rng([workload.SEED, batch, gamma])
    draft = rng.integers(0, case["V"], (batch, gamma), np.int32)
    logits = jax.random.normal(jax.random.key(workload.SEED), (batch, gamma + 1, case["V"]))
    # Half of the drafts are accepted as a whole, the others at no position.
    accepted = np.arange(batch)[:, None] % 2 == 0
    tokens = np.where(accepted, draft, (draft + 1) % case["V"])
    rows, places = np.arange(batch)[:, None], np.arange(gamma)[None]
    arguments = (
        jax.device_put(draft),
        logits.at[rows, places, tokens].set(100.0),
        *jax.device_put(
            (
                np.full(batch, gamma, np.int32),
                np.full((batch, 1), -1, np.int32),
                np.full(batch, SLOTS, np.int32),
                np.zeros((batch, SLOTS), np.int32),
                np.full(batch, SLOTS // 2, np.int32),
                np.zeros(batch, bool),
            )
        ),
    )
    expected = reference(VERIFY_AND_COMMIT, arguments)
    return Setup(arguments, equals(expected), logits.nbytes)


def sample_setup(case: Case) -> Setup:
    """Drawing a token of each row at temperature 1, without filters."""
    _, arguments = stochastic_inputs({**case, "draft": "one-hot"})
    logits, settings, positions = arguments[1][:, :1], arguments[4], arguments[5][:, None]
    static = {"role": Role.DRAFT, "filtered": False, "axis_name": None}
    arguments = jax.device_put((logits, settings, positions))
    return Setup(
        arguments, equals(reference(SAMPLE, arguments, **static)), arguments[0].nbytes, static
    )


def tree_setup(case: Case) -> Setup:
    """Verification of random trees, the first of which is a chain."""
    arguments = jax.device_put(random_tree(case["B"], case["gamma"], 1))
    moved = sum(x.nbytes for x in arguments)
    return Setup(arguments, equals(reference(VERIFY_TREE, arguments)), moved)


TREE = OperationBenchmark(
    operation=VERIFY_TREE,
    setup=tree_setup,
    states=("warm",),
    default={"B": 32, "gamma": 15},
    gpu=product(B=(1, 32, 128), gamma=(7, 15, 31)),
    quick=product(B=(32,), gamma=(15,)),
    cpu=product(B=(32,), gamma=(15,)),
)
DRAFTS = ("one-hot", "logits")
STOCHASTIC = OperationBenchmark(
    operation=VERIFY_STOCHASTIC,
    setup=stochastic_setup,
    rivals=sampling.NAMES,
    states=("warm", "cold"),
    default={"B": 32, "V": 128256, "draft": "logits"},
    choices={"draft": DRAFTS},
    gpu=product(B=(1, 32, 128), V=(32000, 128256, 152064), draft=DRAFTS),
    quick=[f"B={b},V={v},draft={d}" for b, v in ((4, 32000), (32, 128256)) for d in DRAFTS],
    # CPUs also serve small models, such as the bundled one with a vocabulary of bytes.
    cpu=product(B=(1,), V=(260, 32000, 128256), draft=DRAFTS),
)
COMMIT = OperationBenchmark(
    operation=VERIFY_AND_COMMIT,
    setup=commit_setup,
    states=("warm", "cold"),
    default={"B": 32, "T": 9, "V": 128256},
    gpu=product(B=(1, 32), T=(1, 9), V=(49152, 128256)),
    quick=product(B=(32,), T=(1, 9), V=(49152,)),
    cpu=product(B=(2,), T=(1, 4), V=(260,)),
)
DRAW = OperationBenchmark(
    operation=SAMPLE,
    setup=sample_setup,
    default={"B": 32, "V": 128256},
    gpu=product(B=(1, 32, 128), V=(49152, 128256)),
    quick=product(B=(32,), V=(49152,)),
    cpu=product(B=(1,), V=(260, 32000)),
)
SUITE = suite_of(
    "verify",
    "verification, greedy and stochastic, the acceptance scan alone, and sampling: every backend, "
    "PyTorch eager and as a CUDA graph, FlashInfer",
    GREEDY,
    STOCHASTIC,
    COMMIT,
    DRAW,
    SCAN,
    TREE,
)
