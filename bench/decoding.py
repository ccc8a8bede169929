"""Tokens a second of the bundled model, plain and speculative, and what a step costs.

Clocks: *decode* is wall time of decoding by `jspec.generate` in chunks of 16 steps, of which the
host reads each; *step* is the marginal wall time of one step inside a jitted loop, from two loop
lengths. Both exclude compiling.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jspec
from bench.machine import read_ceiling
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import times
from jspec.cache import Cache, LinearLayout
from jspec.decode.programs import PROGRAMS

NEW_TOKENS = 640  # more than the longer loop can commit, so that no row ends inside it
CPU_NEW_TOKENS = 256
LOOPS = (16, 64)  # steps; in the difference of shorter ones the host's noise is large
CPU_LOOPS = (4, 16)
CHUNK = 16  # steps of a program while decoding
NEAR_TIE = 0.25  # margin of logits that bf16 rounding of a long sum may reverse
SOURCES = {
    "none": jspec.PLAIN,
    "ngram": jspec.StepConfig(8, jspec.NgramDraft()),
    "stream": jspec.StepConfig(4, jspec.SelfDraft(jspec.policies.Streaming())),
}


def run(settings: Settings) -> dict[str, Any]:
    """Every source at every batch and context; each output is checked against plain decoding."""
    model, tokenizer = jspec.load_bundled()
    ceiling = read_ceiling()
    return {
        "read_ceiling_bytes_per_s": ceiling,
        "dtype": str(model.dtype),
        "rows": _rows(model, tokenizer, ceiling, settings),
    }


def _rows(
    model: jspec.Decoder, tokenizer: jspec.Tokenizer, ceiling: float, settings: Settings
) -> Iterator[dict[str, Any]]:
    cases = [(1, 2048)] if settings.quick else [(1, 8192), (1, 32768), (32, 8192), (32, 32768)]
    if jax.default_backend() == "cpu" and not settings.quick:
        cases = [(1, 8192)]
    with bar("step", len(cases) * len(SOURCES)) as advance:
        for batch, context in cases:
            prompts = texts(tokenizer, batch, context - _params().max_new_tokens - 1)
            prefill_s, state = _prefill(model, prompts)
            floor_s = _step_bytes(model, prompts) / ceiling
            plain = None
            for name, config in SOURCES.items():
                figures, tokens = decoded(jspec.Models(model), prompts, _params(), state, config)
                plain = (figures, tokens) if plain is None else plain
                speedup = figures["decode_tokens_per_s"] / plain[0]["decode_tokens_per_s"]
                row = {"source": name, "gamma": config.gamma, "batch": batch, "context": context}
                row |= figures | _marginal(model, state, config)
                row |= {"speedup": speedup, "read_floor_ms": floor_s * 1e3}
                row |= {"prefill_tokens_per_s": sum(map(len, prompts)) / prefill_s}
                row |= check_tokens(model, prompts, tokens, plain[1])
                if not settings.check:
                    row["checked"] = None
                yield row
                advance()
            del state


def texts(tokenizer: jspec.Tokenizer, batch: int, length: int) -> list[list[int]]:
    """Stretches of ``length`` bytes of the standard library's own source, spread evenly."""
    root = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    stride = (len(text) - length) // max(batch - 1, 1)
    return [tokenizer.encode(text[i * stride : i * stride + length]) for i in range(batch)]


def _prefill(model: jspec.Decoder, prompts: list[list[int]]) -> tuple[float, jspec.DecodeState]:
    """Seconds of a prefill whose programs are compiled, and the state it leaves."""
    params, longest = _params(), SOURCES["ngram"]
    jax.block_until_ready(jspec.start_decoding(model, prompts, params, longest))
    begin = time.perf_counter()
    state = jax.block_until_ready(jspec.start_decoding(model, prompts, params, longest))
    return time.perf_counter() - begin, state


def decoded(
    models: jspec.Models,
    prompts: list[list[int]],
    params: jspec.SamplingParams | list[jspec.SamplingParams],
    state: jspec.DecodeState,
    config: jspec.StepConfig,
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Decode to the end three times, after a warm-up, as `jspec.generate` does; figures of the
    median, and the tokens.

    ``state``: that of ``prompts``, which have been taken up.
    """
    settings = {"gamma": config.gamma, "backends": config.backends, "exact": config.exact}
    settings |= {"rule": config.rule, "target": config.target}
    settings |= {"draft": config.draft, "draft_model": models.draft, "steps_per_chunk": CHUNK}
    settings |= {"policy_params": models.policy, "prefilled": state}
    runs = [jspec.generate(models.target, prompts, params, **settings) for _ in range(4)][1:]
    runs.sort(key=lambda run: run.stats.decode_s)
    stats = runs[1].stats
    figures = {
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "decode_s_samples": [run.stats.decode_s for run in runs],
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "committed": stats.committed,
        "steps": stats.steps,
        "attempts_at": [at.attempts for at in stats.acceptance_by_position],
    }
    return figures, list(runs[1].tokens)


def _params() -> jspec.SamplingParams:
    cpu = jax.default_backend() == "cpu"
    return jspec.SamplingParams(max_new_tokens=CPU_NEW_TOKENS if cpu else NEW_TOKENS)


def _marginal(model: jspec.Decoder, state: jspec.DecodeState, config: jspec.StepConfig):
    """Marginal time of a step: loops of two lengths from the same state, medians of 5."""
    short, long = CPU_LOOPS if jax.default_backend() == "cpu" else LOOPS
    seconds: dict[int, list[float]] = {short: [], long: []}
    for repeat in range(7):
        for steps, samples in seconds.items():
            current = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            begin = time.perf_counter()
            current, _ = PROGRAMS(jspec.decode_chunk, model, current, config=config, steps=steps)
            jax.block_until_ready(current.cache.lengths)
            if repeat >= 2:
                samples.append(time.perf_counter() - begin)
            del current
    medians = {steps: statistics.median(samples) for steps, samples in seconds.items()}
    return {
        "step_ms": (medians[long] - medians[short]) / (long - short) * 1e3,
        "loop_s_samples": {str(k): v for k, v in seconds.items()},
    }


def _step_bytes(model: jspec.Decoder, prompts: list[list[int]]) -> int:
    """Bytes that a plain step must read: every weight once and every cached token once."""
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model))
    specs = model.config.layers
    one = jax.eval_shape(
        lambda: Cache.create(specs, [LinearLayout(1)] * len(specs), 1, model.dtype)
    )
    return weights + sum(map(len, prompts)) * one.nbytes


def check_tokens(model: jspec.Decoder, prompts, tokens, plain) -> dict[str, Any]:
    """Rows equal to plain decoding; where one parts, the two tokens must be a near tie.

    In bf16 a pass over several tokens rounds differently from a pass over one. The margin is the
    difference of the two tokens' logits after the common prefix, from a prefill of that prefix.
    """
    parted = []
    for prompt, row, reference in zip(prompts, tokens, plain, strict=True):
        pairs = list(zip(row, reference, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            parted.append(([*prompt, *row[:at]], *pairs[at]))
    margins = []
    if parted:
        texts = [text for text, _, _ in parted]
        texts += texts[-1:] * (
            2 ** (len(texts) - 1).bit_length() - len(texts)
        )  # pad to a power of two: few shapes to compile
        state = jspec.start_decoding(model, texts, jspec.SamplingParams(max_new_tokens=1))
        logits = np.asarray(_logits_of_next(model, state))
        for logits_of_row, (_, a, b) in zip(logits, parted, strict=False):
            margins.append(abs(float(logits_of_row[a] - logits_of_row[b])))
    lengths = [len(row) == len(other) for row, other in zip(tokens, plain, strict=True)]
    return {
        "identical_rows": len(tokens) - len(parted),
        "rows": len(tokens),
        "flip_margins": margins,
        "checked": all(margin <= NEAR_TIE for margin in margins) and (bool(parted) or all(lengths)),
    }


@jax.jit
def _logits_of_next(model: jspec.Decoder, state: jspec.DecodeState) -> jax.Array:
    positions = state.cache.lengths[:, None]
    attend = jspec.policies.DenseAttend(positions)
    hidden, _ = model(state.last_token[:, None], positions, attend, state.cache)
    return model.logits(hidden)[:, 0]


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its speedup over the earlier result; returns how many had one."""
    where = ("source", "gamma", "batch", "context")
    before = {tuple(row[key] for key in where): row["step_ms"] for row in earlier["rows"]}
    met = 0
    for row in result["rows"]:
        then = before.get(tuple(row[key] for key in where))
        if then is not None:
            row["ratio"] = then / row["step_ms"]
            met += 1
    return met


def show(result: dict[str, Any]) -> None:
    """One line a case."""
    table = Table(
        title=f"{result['machine']['device']}, {result['dtype']}",
        title_justify="left",
        padding=(0, 1, 0, 0),
        box=None,
    )
    for heading in ("B", "context", "draft", "tok/s", "vs plain", "mean len", "ms/step", "floor"):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    table.add_column("identical", justify="right")
    compared = any("ratio" in row for row in result["rows"])
    if compared:
        table.add_column("vs before", justify="right")
    for row in result["rows"]:
        speed = f"{row['decode_tokens_per_s']:,.0f}" if row["checked"] else "unchecked"
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            row["source"] + (f" {row['gamma']}" if row["gamma"] else ""),
            speed,
            times(row["speedup"]),
            f"{row['mean_accepted_length']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['read_floor_ms']:.2f}",
            f"{row['identical_rows']}/{row['rows']}",
            *([times(row["ratio"]) if "ratio" in row else ""] if compared else []),
        )
    screen = console()
    screen.print(table)
    screen.print(FOOT, markup=False)


FOOT = (
    "x: how many times as fast, above 1 for faster; vs plain: tok/s against plain decoding; vs "
    "before: ms/step against --compare. floor: ms to read all weights and the cache once"
)


# The name of committed results is "step".
SUITE = Suite(
    "step",
    "plain and speculative decoding of the bundled model, end to end",
    run,
    show,
    compare=compare,
    custom_clocks=True,
)
