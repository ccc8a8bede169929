"""Prefill at a model's true shape: tokens a second, and their share of the matrix ceiling."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import point
from bench.decode.check import LAYERS, REFERENCE, TOLERANCE
from bench.decode.shapes import part_of, prefill_flops
from bench.program import failure
from bench.settings import Settings
from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState
from jspec.dispatch import Backends
from jspec.models.decoder import Decoder

PARAMS = SamplingParams(max_new_tokens=1)
REFERENCE_CHUNK = (
    256  # tokens: the reference materialises a score for each of them and each cached token
)
REPEATS = 3


def row(
    name: str, model: Decoder, tokens: int, settings: Settings, matrix_ceiling: float
) -> point.Row:
    """The row of a prefill of one prompt of ``tokens`` tokens."""
    case = {"model": name, "layers": model.config.num_layers, "B": 1, "tokens": tokens}
    backends = settings.decode.backends
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens, np.int32)
    row = point.row("prefill", case, "jspec", checked=None)
    if not settings.check:
        return row | {"reason": "not checked, so not timed"}
    try:
        layers = min(LAYERS, model.config.num_layers)
        part = part_of(model, slice(layers))
        error = _distance(part, _prefilled(part, prompt, backends), prompt)
        if not error <= TOLERANCE:
            reason = f"its keys are wrong by {error:.1%}"
            return row | {"checked": False, "reason": reason, "error": error}
        _prefilled(model, prompt, backends)
        samples = []
        for _ in range(REPEATS):
            begin = time.perf_counter_ns()
            _prefilled(model, prompt, backends)
            samples.append(time.perf_counter_ns() - begin)
    except Exception as error:
        return row | {"checked": False, "reason": failure("prefill", error).reason}
    return row | {
        "checked": f"{layers} layers",
        "error": error,
        "wall_ns": samples,
        "flops": prefill_flops(model, tokens),
        "matrix_ceiling_flops_per_s": matrix_ceiling,
    }


def _prefilled(
    model: Decoder, prompt: np.ndarray, backends: Backends, chunk: int | None = None
) -> DecodeState:
    config = StepConfig(0, NoDraft(), backends)
    return jax.block_until_ready(start_decoding(model, [prompt], PARAMS, config, chunk=chunk))


def _distance(part: Decoder, state: DecodeState, prompt: np.ndarray) -> float:
    """The relative error of the last layer's keys against a prefill by ``xla``.

    These keys depend on the attention of the layers before.
    """
    reference = _prefilled(part, prompt, REFERENCE, REFERENCE_CHUNK)
    last = part.config.num_layers - 1
    return float(_apart(state.cache.keys(last), reference.cache.keys(last)))


@jax.jit
def _apart(actual: Any, expected: Any) -> jax.Array:
    """The largest relative error of a position."""
    actual, expected = (x.astype(jnp.float32).reshape(x.shape[1], -1) for x in (actual, expected))
    norm = jnp.linalg.norm(expected, axis=-1)
    apart = jnp.linalg.norm(actual - expected, axis=-1)
    # Unused slots are zero in both.
    return (apart / jnp.where(norm > 0, norm, 1)).max()
