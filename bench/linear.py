"""The matmuls of a layer and of the logits, each with what is fused into it: every backend.

XLA takes several launches for what the other backends do in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.cases import Case, product
from bench.decode.catalogue import MODELS
from bench.program import reference
from bench.suite import OperationBenchmark, Setup, suite_of
from jspec.ops.linear import LINEAR
from jspec.ops.norm import RMS
from jspec.ops.quantized import KINDS, quantized

TOLERANCE = 0.03  # of a value of about 1, rounded to bfloat16 after each operation
PARTS = ("qkv", "output", "gate_up", "down", "logits")
DENSE = tuple(name for name, config in MODELS.items() if config.experts is None)


def setup(case: Case) -> Setup:
    """A matmul of ``rows`` rows, as decoding has it, in bfloat16."""
    config, part = MODELS[case["model"]], case["part"]
    spec, width = config.layers[0], config.num_heads * config.layers[0].value_size
    queries = config.num_heads * spec.key_size
    projections = queries + spec.kv_heads * (spec.key_size + spec.value_size)
    inputs, outputs = {
        "qkv": (config.hidden_size, (projections,)),
        "output": (width, (config.hidden_size,)),
        "gate_up": (config.hidden_size, (2, config.intermediate_size)),
        "down": (config.intermediate_size, (config.hidden_size,)),
        "logits": (config.hidden_size, (config.vocab_size,)),
    }[part]
    keys = iter(jax.random.split(jax.random.key(workload.SEED), 5))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    static = {
        "gated": part == "gate_up",
        "transposed": part == "logits" and config.tie_embeddings,
        "dtype": np.dtype("float32") if part == "logits" else np.dtype(jnp.bfloat16),
    }
    shape = (*outputs, inputs) if static["transposed"] else (inputs, *outputs)
    x, kernel = normal(case["rows"], inputs), normal(*shape, scale=inputs**-0.5)
    if case["weights"] != "bfloat16":
        kernel = quantized(kernel, case["weights"])
    norm = None if part in ("output", "down") else RMS(normal(inputs), config.norm_eps)
    add = normal(case["rows"], *outputs) if part in ("output", "down") else None
    bias = normal(*outputs) if part == "qkv" and config.qkv_bias else None
    arguments = x, kernel, bias, norm, add
    expected = reference(
        LINEAR, jax.tree.map(_float32, arguments), **static | {"dtype": np.float32}
    )
    moved = expected.size * static["dtype"].itemsize
    moved += sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments))
    return Setup(arguments, _is_near(expected), moved, static)


def _float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _is_near(expected: np.ndarray) -> Callable[[Any], bool]:
    bound = TOLERANCE * (1 + np.abs(expected))

    def check(output: Any) -> bool:
        return bool((np.abs(np.asarray(output, np.float32) - expected) <= bound).all())

    return check


SMALL = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen3-0.6b")
LAYER = PARTS[:-1]
ROWS = (12, 24, 32, 64, 96, 192, 320, 576)
SUITE = suite_of(
    "linear",
    "the matmuls of a layer and of the logits, with what is fused into them: every backend",
    OperationBenchmark(
        operation=LINEAR,
        setup=setup,
        default={"model": "qwen3-8b", "part": "qkv", "rows": 1, "weights": "bfloat16"},
        choices={"model": DENSE, "part": PARTS, "weights": ("bfloat16", *KINDS)},
        gpu=[
            *product(model=SMALL, part=LAYER, rows=ROWS),
            *product(model=("qwen3-1.7b", "llama-3.2-1b"), part=LAYER, rows=(12, 32, 64, 320)),
            *product(model=("qwen3-8b",), part=LAYER, rows=(1, 8, 10, 24, 40, 96)),
            *product(model=("qwen3-8b",), part=LAYER, rows=(1, 10, 40), weights=("int8", "mxfp4")),
            *product(model=SMALL, part=("logits",), rows=(12, 96, 576)),
        ],
        quick=product(model=SMALL[:2], part=LAYER, rows=(12, 96)),
        cpu=product(model=("tiny",), part=PARTS, rows=(8,)),
    ),
)
