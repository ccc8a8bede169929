"""Tokens a second of the bundled model, plain and speculative, and what a step costs.

Clocks: *decode* is wall time of chunks of steps as `jspec.generate` runs them; *step* is the
marginal wall time of one step inside a jitted loop, from two loop lengths. Both exclude compiling.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from bench.machine import read_ceiling
from jspec.cache import KVCache
from jspec.decode.programs import Programs

TITLE = "plain and speculative decoding of the bundled model, end to end"
NEW_TOKENS = 256
NEAR_TIE = 0.25  # logits apart: what bf16 rounding of a long sum may turn around
SOURCES = {
    "none": (None, 0),
    "ngram": (jspec.NgramDraft(), 8),
    "stream": (jspec.StreamDraft(), 4),
}


def run(quick: bool) -> dict[str, Any]:
    """Every source at every batch and context; each output is checked against plain decoding."""
    model, tokenizer = jspec.load_bundled()
    cases = [(1, 2048)] if quick else [(1, 8192), (1, 32768), (32, 8192), (32, 32768)]
    if jax.default_backend() == "cpu" and not quick:
        cases = [(1, 8192)]
    ceiling = read_ceiling()
    rows = []
    for batch, context in cases:
        prompts = _prompts(tokenizer, batch, context - NEW_TOKENS)
        plain = None
        for name, (draft, gamma) in SOURCES.items():
            row, tokens = _case(model, prompts, draft, gamma)
            plain = (row, tokens) if plain is None else plain
            row |= _check(model, prompts, tokens, plain[1])
            floor = _step_bytes(model, prompts) / ceiling
            row |= {
                "source": name,
                "gamma": gamma,
                "batch": batch,
                "context": context,
                "speedup": row["decode_tokens_per_s"] / plain[0]["decode_tokens_per_s"],
                "read_floor_ms": floor * 1e3,
            }
            rows.append(row)
            print({k: row[k] for k in ("source", "batch", "context", "step_ms")}, flush=True)
    return {"read_ceiling_bytes_per_s": ceiling, "dtype": str(model.dtype), "rows": rows}


def _prompts(tokenizer: jspec.Tokenizer, batch: int, length: int) -> list[list[int]]:
    """Consecutive stretches of the standard library's own source, one a row."""
    root = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    stride = (len(text) - length) // max(batch - 1, 1)
    return [tokenizer.encode(text[i * stride : i * stride + length]) for i in range(batch)]


def _case(model: jspec.Decoder, prompts: list[list[int]], draft, gamma: int):
    """Figures of one source, and its tokens ``[B, NEW_TOKENS]``."""
    params = jspec.SamplingParams(max_new_tokens=NEW_TOKENS)
    settings = {"gamma": gamma, "draft": draft}
    jspec.generate(model, prompts, params, **settings)
    runs = [jspec.generate(model, prompts, params, **settings) for _ in range(3)]
    runs.sort(key=lambda r: r.stats.decode_s)
    stats = runs[1].stats
    figures = {
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "decode_s_samples": [r.stats.decode_s for r in runs],
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "committed": stats.committed,
    }
    config = jspec.StepConfig(gamma, draft)
    return figures | _marginal(model, prompts, config), runs[1].tokens


def _marginal(model: jspec.Decoder, prompts: list[list[int]], config: jspec.StepConfig):
    """Marginal time of a step: loops of 4 and 16 steps from the same state, medians of 5."""
    programs = Programs()
    state = jspec.start(model, prompts, jspec.SamplingParams(max_new_tokens=NEW_TOKENS))
    seconds: dict[int, list[float]] = {4: [], 16: []}
    for repeat in range(7):
        for steps, samples in seconds.items():
            begin_state = jax.tree.map(jnp.copy, state)
            jax.block_until_ready(begin_state)
            begin = time.perf_counter()
            end, _ = programs(
                jspec.decode_chunk, model, begin_state, None, config=config, steps=steps
            )
            jax.block_until_ready(end.cache.lengths)
            if repeat >= 2:
                samples.append(time.perf_counter() - begin)
            del end
    medians = {steps: statistics.median(samples) for steps, samples in seconds.items()}
    return {
        "step_ms": (medians[16] - medians[4]) / 12 * 1e3,
        "loop_s_samples": {str(k): v for k, v in seconds.items()},
    }


def _step_bytes(model: jspec.Decoder, prompts: list[list[int]]) -> int:
    """Bytes that a plain step must read: every weight once and every cached token once."""
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model))
    one = jax.eval_shape(lambda: KVCache.create(model.config, 1, 1, model.dtype))
    return weights + sum(map(len, prompts)) * one.nbytes


def _check(model: jspec.Decoder, prompts, tokens, plain) -> dict[str, Any]:
    """Rows equal to plain decoding; where one parts, the two tokens must be a near tie.

    In bf16 a pass over several tokens rounds differently from a pass over one. The margin is the
    difference of the two tokens' logits, from a float32 pass over the common prefix.
    """
    margins = []
    for prompt, row, reference in zip(prompts, tokens, plain, strict=True):
        if row == reference:
            continue
        at = next(i for i, (a, b) in enumerate(zip(row, reference, strict=False)) if a != b)
        logits = _last_logits(model, [*prompt, *row[:at]])
        margins.append(abs(float(logits[row[at]] - logits[reference[at]])))
    return {
        "identical_rows": len(tokens) - len(margins),
        "rows": len(tokens),
        "flip_margins": margins,
        "checked": all(margin <= NEAR_TIE for margin in margins),
    }


def _last_logits(model: jspec.Decoder, tokens: list[int]) -> np.ndarray:
    """Float32 logits ``[V]`` after ``tokens``."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), model)
    state = jspec.start(exact, [tokens], jspec.SamplingParams(max_new_tokens=1))
    return np.asarray(_logits_of_next(exact, state))


@jax.jit
def _logits_of_next(model: jspec.Decoder, state: jspec.DecodeState) -> jax.Array:
    last = jnp.take_along_axis(state.tokens, state.cache.lengths[:, None], axis=1)
    positions = state.cache.lengths[:, None]
    hidden, _ = model(last, positions, jspec.dense(positions), state.cache)
    return model.logits(hidden)[0, 0]


def show(result: dict[str, Any]) -> None:
    """One line a case, at most 100 columns."""
    table = Table(title=f"{result['machine']['device']}, {result['dtype']}", title_justify="left")
    for heading in ("B", "context", "draft", "tok/s", "vs plain", "mean len", "ms/step", "floor"):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    table.add_column("identical", justify="right")
    for row in result["rows"]:
        speed = f"{row['decode_tokens_per_s']:,.0f}" if row["checked"] else "unchecked"
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            row["source"] + (f" {row['gamma']}" if row["gamma"] else ""),
            speed,
            f"{row['speedup']:.2f}x",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['read_floor_ms']:.2f}",
            f"{row['identical_rows']}/{row['rows']}",
        )
    Console(width=100).print(table)
