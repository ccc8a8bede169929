"""The matmuls of a layer and of the logits, alone and as a chain: every backend.

Each includes the norm before it and the activation and sum after it, which are launches of their
own in XLA.
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
from bench.suite import Layers, OperationBenchmark, Setup, suite_of
from jspec.ops.linear import LINEAR
from jspec.ops.linear_chain import LINEAR_CHAIN, Arrays
from jspec.ops.norm import RMS
from jspec.ops.quantized import KINDS, quantized

TOLERANCE = 0.03  # of a value of about 1, rounded to bfloat16 after each operation
PARTS = ("qkv", "output", "gate_up", "down", "logits")
CHAIN = ("output", "gate_up", "down", "qkv")  # what follows attention, up to that of the next layer
DENSE = tuple(name for name, config in MODELS.items() if config.experts is None)
LAYERS = 8  # whose chains run after each other
BFLOAT16 = np.dtype(jnp.bfloat16)


class _Weights:
    """Random arguments of the matmuls of a layer, in bfloat16."""

    def __init__(self, case: Case):
        self.config, self.rows, self.kind = MODELS[case["model"]], case["rows"], case["weights"]
        count = 5 * len(PARTS) * LAYERS
        self._keys = iter(jax.random.split(jax.random.key(workload.SEED), count))

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(self._keys), shape)).astype(jnp.bfloat16)

    def shape(self, part: str) -> tuple[int, tuple[int, ...]]:
        """The inputs and the outputs of a matmul."""
        config, spec = self.config, self.config.layers[0]
        hidden, values = config.hidden_size, spec.kv_heads * spec.value_size
        projections = (config.num_heads + spec.kv_heads) * spec.key_size + values
        return {
            "qkv": (hidden, (projections,)),
            "output": (config.num_heads * spec.value_size, (hidden,)),
            "gate_up": (hidden, (2, config.intermediate_size)),
            "down": (config.intermediate_size, (hidden,)),
            "logits": (hidden, (config.vocab_size,)),
        }[part]

    def op(self, part: str, *, transposed: bool = False) -> Arrays:
        """Kernel, bias, norm and residual of a matmul."""
        inputs, outputs = self.shape(part)
        shape = (*outputs, inputs) if transposed else (inputs, *outputs)
        kernel = self.normal(*shape, scale=inputs**-0.5)
        if self.kind != "bfloat16":
            kernel = quantized(kernel, self.kind)
        ends = part in ("output", "down")  # of an attention or a feed-forward block
        bias = self.normal(*outputs) if part == "qkv" and self.config.qkv_bias else None
        norm = None if ends else RMS(self.normal(inputs), self.config.norm_eps)
        return kernel, bias, norm, self.normal(self.rows, *outputs) if ends else None


def linear_setup(case: Case) -> Setup:
    """A matmul of ``rows`` rows, as decoding has it."""
    weights, part = _Weights(case), case["part"]
    is_head = part == "logits"
    static = {
        "gated": part == "gate_up",
        "transposed": is_head and weights.config.tie_embeddings,
        "dtype": np.dtype("float32") if is_head else BFLOAT16,
    }
    x = weights.normal(case["rows"], weights.shape(part)[0])
    arguments = x, *weights.op(part, transposed=static["transposed"])
    in_float32 = static | {"dtype": np.dtype("float32")}
    expected = reference(LINEAR, jax.tree.map(_float32, arguments), **in_float32)
    moved = _bytes(arguments) + expected.size * static["dtype"].itemsize
    return Setup(arguments, _is_near(expected), moved, static)


def chain_setup(case: Case) -> Setup:
    """The matmuls between the attentions of two layers, of ``rows`` rows, for each of `LAYERS`.

    A layer's x, which attention would make, is the first columns of the qkv of the layer before.
    """
    weights = _Weights(case)
    static = {"added": (None, None, 0, None), "gated": (False, True, False, False)}
    inputs, _ = weights.shape("output")
    x = weights.normal(case["rows"], inputs)

    def follow(outputs: tuple[jax.Array, ...]) -> jax.Array:
        return outputs[-1][:, :inputs]

    layers = [_chain(weights) for _ in range(LAYERS)]
    expected, to_check = (), x.astype(jnp.float32)
    for ops in layers:
        expected = reference(LINEAR_CHAIN, (to_check, jax.tree.map(_float32, ops)), **static)
        to_check = follow(expected)
    arguments = x, layers[0]
    moved = _bytes(arguments) + sum(y.size * BFLOAT16.itemsize for y in expected)
    after = Layers(tuple((ops,) for ops in layers[1:]), follow)
    # What a layer rounds is added to a residual of its own, so that errors do not grow.
    check = _is_near(expected, roundings=len(CHAIN))
    return Setup(arguments, check, moved, static, layers=after)


def _chain(weights: _Weights) -> tuple[Arrays, ...]:
    """The arrays of a layer's matmuls."""
    output, gate_up, down, qkv = map(weights.op, CHAIN)
    return output, gate_up, (*down[:-1], None), qkv  # down's residual is the output's result


def _bytes(arguments: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))


def _float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _is_near(expected: Any, roundings: int = 1) -> Callable[[Any], bool]:
    """A check that outputs are near these; ``roundings``: matmuls that follow each other."""
    pairs = [(x, roundings * TOLERANCE * (1 + np.abs(x))) for x in jax.tree.leaves(expected)]

    def check(outputs: Any) -> bool:
        arrays = (np.asarray(y, np.float32) for y in jax.tree.leaves(outputs))
        near = zip(arrays, pairs, strict=True)
        return all(bool((np.abs(y - x) <= bound).all()) for y, (x, bound) in near)

    return check


SMALL = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen3-0.6b")
LAYER = PARTS[:-1]
ROWS = (12, 24, 32, 64, 96, 192, 320, 576)
SUITE = suite_of(
    "linear",
    "the matmuls of a layer and of the logits with what is fused into them, alone and as a chain: "
    "every backend",
    OperationBenchmark(
        operation=LINEAR,
        setup=linear_setup,
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
    OperationBenchmark(
        operation=LINEAR_CHAIN,
        setup=chain_setup,
        default={"model": "qwen3-8b", "rows": 1, "weights": "bfloat16"},
        choices={"model": DENSE, "weights": ("bfloat16", *KINDS)},
        gpu=[
            *product(model=SMALL, rows=(1, 8, 12, 16, 24, 32, 64, 96)),
            *product(model=("qwen3-1.7b", "llama-3.2-1b"), rows=(12, 64)),
            *product(model=("qwen3-8b",), rows=(1, 10), weights=("bfloat16", "int8", "mxfp4")),
        ],
        quick=product(model=SMALL[:2], rows=(12,)),
        cpu=product(model=("tiny",), rows=(8,)),
    ),
)
