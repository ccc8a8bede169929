"""Stochastic verification: every backend, FlashInfer and PyTorch, over batch and vocabulary."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import ceilings, point, regret, table, workload
from bench.clocks import StepClock
from bench.program import Absent, bound, chosen, compile_all, shapes, sources
from bench.rivals import sampling as rivals
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.ops.sample import Role, Sampling, number, settings_of
from jspec.ops.stochastic import VERIFY_STOCHASTIC

COLUMNS = ("B", "V", "draft", "l2")
GAMMA = 5
STATES = ("warm", "cold")
STATIC = {"rule": "token", "filtered": False, "axis_name": None}
LOOPED = ((32, 128256, "one-hot"), (32, 128256, "logits"))  # where the step clock runs too
FEED = (3, 5)  # next tokens as the next positions: other random numbers for the same logits
Case = tuple[int, int, str]  # batch, vocabulary, draft: "one-hot" or "logits"


def grid(settings: Settings) -> list[Case]:
    if settings.quick:
        return list(itertools.product((4,), (32000,), ("one-hot", "logits")))
    drafts, vocabularies = ("one-hot", "logits"), (32000, 128256, 152064)
    if jax.default_backend() == "gpu":
        return list(itertools.product((1, 32, 128), vocabularies, drafts))
    # CPUs also serve small models, such as the bundled one with a vocabulary of bytes.
    return list(itertools.product((1,), (260, *vocabularies), drafts))


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    programs = _compiled(settings)
    clock = StepClock(settings)
    with bar("sampling", len(grid(settings))) as advance:
        for case in grid(settings):
            batch, vocabulary, draft = case
            logits, arguments = _inputs(case)
            arguments = jax.device_put(arguments)
            best = chosen(VERIFY_STOCHASTIC, arguments, **STATIC)
            uniforms = _uniforms(arguments)
            check = _checks(logits, uniforms, programs[case, "xla"], arguments)
            bounds = [
                bound(name, program, arguments, check, chosen=name == best)
                for (where, name), program in programs.items()
                if where == case and settings.wants(name)
            ]
            bounds += rivals.sampling(logits, uniforms, settings)
            draft_bytes = 0 if logits.draft_logits is None else logits.draft_logits.nbytes
            rows = point.measure(
                "verify_stochastic",
                {"B": batch, "V": vocabulary, "draft": draft},
                bounds,
                settings,
                states=STATES,
                moved=logits.target.nbytes + draft_bytes,
            )
            if case in LOOPED and settings.check and point.DEVICE.reason is None:
                # XLA moves the loop-invariant part of its own code, the sums, out of the loop.
                kernels = [row for row in rows if row["name"] != "xla"]
                clock.add(kernels, VERIFY_STOCHASTIC, arguments, FEED, **STATIC)
            yield from rows
            del arguments, check, bounds, rows  # before the next case takes its memory
            advance()


def _compiled(settings: Settings) -> dict[tuple[Case, str], Any]:
    """Each selected backend at each case, and always the reference."""
    if not settings.wants("xla"):
        settings = dataclasses.replace(settings, only=(*settings.only, "xla"))
    sources_by_key = {}
    for case in grid(settings):
        for name, source in sources(VERIFY_STOCHASTIC, _shapes(case), settings, **STATIC).items():
            sources_by_key[case, name] = source
    return compile_all("sampling", sources_by_key)


def _shapes(case: Case) -> tuple[Any, ...]:
    """Shapes of the arguments of a case, without making its logits."""
    batch, vocabulary, draft = case
    few = shapes(_inputs((batch, 1, draft))[1])
    return tuple(
        x
        if not isinstance(x, jax.ShapeDtypeStruct) or x.ndim != 3
        else jax.ShapeDtypeStruct((*x.shape[:2], vocabulary), x.dtype)
        for x in few
    )


def _inputs(case: Case) -> tuple[workload.Logits, tuple[Any, ...]]:
    """The logits, and the arguments of the backends of `jspec.ops.verify_stochastic`."""
    batch, vocabulary, draft = case
    logits = workload.make_logits(batch, GAMMA, vocabulary, one_hot=draft == "one-hot")
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


def _uniforms(arguments: tuple[Any, ...]) -> np.ndarray:
    """The numbers that verification draws, float32: to accept, for a residual, for a bonus token.

    They lie in 0..1 and keep the upper 24 of 64 bits.
    """
    seeds, positions = arguments[4].seeds, arguments[5]
    where = positions[:, None] + jnp.arange(GAMMA + 1, dtype=jnp.int32)[None]
    draw = jax.jit(lambda role: number(seeds, where, role))
    roles = (Role.ACCEPT, Role.RESIDUAL, Role.BONUS)
    upper = np.stack([np.asarray(draw(np.uint32(role))) for role in roles]) >> np.uint64(40)
    return upper.astype(np.float32) * np.float32(2.0**-24)


def _checks(
    logits: workload.Logits, uniforms: np.ndarray, reference: Any, arguments: tuple[Any, ...]
) -> Callable[[Any], bool]:
    """A check that outputs equal the reference's, which must agree with float64 sums.

    If the reference failed, the outputs themselves must agree with float64 sums.
    """

    def allowed(outputs: Any) -> bool:
        return workload.plausible(logits, uniforms, np.asarray(outputs[0]), np.asarray(outputs[3]))

    if isinstance(reference, Absent):
        return allowed
    expected = [np.asarray(x) for x in reference(*arguments)]
    right = allowed(expected)
    return lambda outputs: right and all(map(np.array_equal, outputs, expected))


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)
    regret.show(result["rows"])


SUITE = Suite(
    "sampling",
    "stochastic verification: every backend, FlashInfer, and PyTorch's softmax and rejection",
    run,
    show,
    (VERIFY_STOCHASTIC,),
    rivals.NAMES,
)
