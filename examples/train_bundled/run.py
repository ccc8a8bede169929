"""One invocation from start to end: data, compilation, training, export, evaluation, record."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from examples.train_bundled import card, corpus
from examples.train_bundled.batches import Loader
from examples.train_bundled.checkpoint import Journal, restore, save_state, save_weights
from examples.train_bundled.evaluate import evaluate, order_sheets
from examples.train_bundled.export import export
from examples.train_bundled.model import TrainState, initial_parameters, optimiser
from examples.train_bundled.plan import FULL, SMOKE, Plan, parse_stages
from examples.train_bundled.train import PEAK_RATE, Trainer, compile_programs

SEED = 0
STUCK_SECONDS = 20.0  # after training should have ended, before its last snapshot is exported
GRACE_SECONDS = 12.0  # after --minutes, before the process is ended by force


class Run:
    """The parts of an invocation and when it must end (`time.monotonic`)."""

    def __init__(self, options: argparse.Namespace, began: float):
        plan = SMOKE if options.smoke else FULL
        if options.stages:
            plan = dataclasses.replace(plan, stages=parse_stages(options.stages))
        self.plan: Plan = plan
        self.options, self.began = options, began
        self.end = began + 60 * options.minutes
        self.trained = threading.Event()
        self.note = "stopped before training"
        self.trainer: Trainer | None = None
        self.corpus: corpus.Corpus | None = None

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s since start] {text}", flush=True)


def main(options: argparse.Namespace, began: float) -> int:
    """Run it all; 0 when training and evaluation came to their planned end."""
    run = Run(options, began)
    options.out.mkdir(parents=True, exist_ok=True)
    options.state.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(options.state / "programs"))
    watchdogs = _start_watchdogs(run)
    state, journal, complete = _initial_state(run)
    loader, steps, scores = _prepare(run, state)
    try:
        sheets = order_sheets(loader.pool, list(run.plan.scores), run.plan.needles, run.plan.others)
        run.trainer = Trainer(jax.device_put(state), journal, run.plan.stages, steps, loader)
        done = _train(run, run.trainer, rewarm=not complete)
        shipped = _save(run, run.trainer)
        assert run.corpus is not None
        evaluation = evaluate(
            scores,
            run.plan.scores,
            jax.device_put(shipped),
            {name: run.corpus.split(name) for name in ("files", "packages")},
            sheets,
            run.plan.text_length,
            run.end - run.plan.closing,
        )
        card.write_record(options.out, _record(run, run.trainer.journal, evaluation))
    finally:
        loader.close()
    _summary(run, evaluation)
    for watchdog in watchdogs:
        watchdog.cancel()
    return 0 if done else 1


def _initial_state(run: Run) -> tuple[TrainState, Journal, bool]:
    config = run.plan.config
    devices = jax.devices()
    run.say(f"jax {jax.__version__} on {devices}")

    @jax.jit
    def fresh() -> TrainState:
        parameters = initial_parameters(config, SEED)
        return parameters, optimiser().init(parameters)

    if run.options.resume is None:
        return jax.device_get(fresh()), Journal(), True
    state, journal, complete = restore(run.options.resume, jax.device_get(fresh()))
    journal.share = min(journal.share, run.options.rewind)
    kind = "full state" if complete else "weights alone: the optimiser is reset"
    run.say(f"resumed at step {journal.step}, share {journal.share:.3f} of the plan ({kind})")
    return state, journal, complete


def _prepare(run: Run, state: TrainState):
    """Corpus and data workers, while the programs compile in threads."""
    plan = run.plan
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            compile_programs, plan.config, state, plan.stages, plan.scores, implementation
        )
        run.corpus = corpus.load_or_build(
            run.options.state / "corpus", plan.corpus_bytes, plan.packages
        )
        run.say(f"corpus: {run.corpus.sizes} bytes of {len(run.corpus.packages)} packages")
        loader = Loader(run.corpus.folder / "train.bin", plan.workers, plan.depth, SEED)
        # The first batch of the first stage: a broken worker shows here, before the GPU is busy.
        next(loader.batches(plan.stages[0], 0))
        run.say("data workers run")
        steps, scores = job.result()
    for length, step in steps.items():
        temporary = getattr(step.memory_analysis(), "temp_size_in_bytes", 0)
        run.say(f"compiled: step of {length} tokens, {temporary / 2**30:.1f} GiB temporary")
    return loader, steps, scores


def _train(run: Run, trainer: Trainer, rewarm: bool) -> bool:
    """Train to the deadline; after a failure go on with the last snapshot, if there is one."""
    deadline = run.end - run.plan.reserve
    first = trainer.journal.share
    if deadline <= time.monotonic():
        raise RuntimeError(f"--minutes {run.options.minutes} leaves no time to train")
    run.say(f"training for {deadline - time.monotonic():.0f} s from share {first:.3f}")
    try:
        trainer.run(deadline, run.options.until, rewarm)
        done = True
    except Exception:
        traceback.print_exc()
        if trainer.snapshot is None:
            raise
        trainer.state, trainer.journal = trainer.snapshot
        run.say("TRAINING FAILED: going on with the last snapshot")
        done = False
    run.trained.set()
    run.note = f"trained from share {first:.3f} to {trainer.journal.share:.3f} of the plan"
    return done


def _save(run: Run, trainer: Trainer):
    """State for the next run, then a complete model without an evaluation yet."""
    state = jax.device_get(trainer.state)
    trainer.journal.invocations.append(_invocation(run))
    save_state(run.options.state, state, trainer.journal)
    shipped = _export(run, state, trainer.journal)
    run.say("state saved, model exported")
    return shipped


def _export(run: Run, state: TrainState, journal: Journal):
    save_weights(run.options.out, state[0], journal)
    shipped = export(run.options.out, state[0], run.plan.config)
    card.write_record(run.options.out, _record(run, journal, None))
    return shipped


def _start_watchdogs(run: Run) -> list[threading.Timer]:
    """Export the last snapshot if training hangs; end the process if anything after it does."""

    def rescue() -> None:
        if run.trained.is_set():
            return
        run.say("WATCHDOG: training hangs")
        if run.trainer is not None and run.trainer.snapshot is not None:
            state, journal = run.trainer.snapshot
            save_state(run.options.state, state, journal)
            _export(run, state, journal)
            run.say("WATCHDOG: the last snapshot is exported")
        os._exit(3)

    def stop() -> None:
        run.say("WATCHDOG: out of time")
        os._exit(4)

    left = run.end - time.monotonic()
    timers = [
        threading.Timer(left - run.plan.reserve + STUCK_SECONDS, rescue),
        threading.Timer(left + GRACE_SECONDS, stop),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    return timers


def _invocation(run: Run) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in packages},
        "note": run.note,
    }


def _record(run: Run, journal: Journal, evaluation: dict[str, Any] | None) -> dict[str, Any]:
    assert run.corpus is not None
    assert run.trainer is not None
    return {
        "model": dataclasses.asdict(run.plan.config),
        "parameters": run.trainer.parameter_count,
        "steps": journal.step,
        "bytes": journal.bytes,
        "seconds": journal.seconds,
        "share": journal.share,
        "seed": SEED,
        "peak_rate": PEAK_RATE,
        "stages": [
            stage._asdict() | {"bytes_per_s": card.stage_speed(journal.curve, stage.length)}
            for stage in run.plan.stages
        ],
        "invocations": journal.invocations,
        "evaluation": evaluation,
        "corpus_bytes": run.corpus.sizes,
        "packages": run.corpus.packages,
        "curve": card.curve_columns(journal.curve),
    }


def _summary(run: Run, evaluation: dict[str, Any]) -> None:
    run.say("done; evaluation of the int8 weights:")
    for name, figures in evaluation["held_out"].items():
        print(f"  held-out {name:9s} {figures['bits_per_byte']:.4f} bits per byte")
    for task, row in evaluation["tasks"].items():
        cells = sorted((int(length), entry["accuracy"]) for length, entry in row.items())
        print(f"  {task:18s} " + "  ".join(f"{length}: {value:.3f}" for length, value in cells))
    for path in sorted(Path(run.options.out).iterdir()):
        print(f"  {path.name:24s} {path.stat().st_size:10d} bytes")
