"""A copy of a decoder whose linear weights have 8 or 4 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jspec.models.decoder import Decoder
from jspec.models.experts import ExpertMLPs
from jspec.models.modules import JoinedLinear, Kernel, Linear
from jspec.ops.quantized import KINDS, MXFP4, Quantized, quantized
from jspec.typing import Array, Model


def quantized_copy(model: Model, kind: str) -> Decoder:
    """Copy a decoder with quantised linear weights.

    The copy shares these weights with ``model``: embeddings (also as the head), norms, biases,
    routers, the maps of a latent, weights that are quantised already and, with 8 bits, experts.
    Quantised weights take one byte each and 4 bytes a column; in MXFP4, 17 bytes for 32 weights.

    Args:
        model: the decoder.
        kind: ``int8``, ``fp8`` or ``mxfp4``. Only ``mxfp4`` quantises experts.

    Returns:
        The copy.

    Raises:
        TypeError: ``model`` is no `Decoder`.
        ValueError: ``kind`` is unknown, or MXFP4 meets a layer whose inputs are no multiple of 32.
    """
    if kind not in KINDS:
        raise ValueError(f"quantized={kind!r} must be one of {', '.join(KINDS)}")
    if not isinstance(model, Decoder):
        raise TypeError(
            f"a model of type {type(model).__name__} is no jspec.Decoder, whose weights jspec "
            "knows how to quantise; pass a quantised one of your own as draft_model"
        )
    # `nnx.merge` would leave a reference cycle, which holds the weights until Python collects it.
    copy = jax.tree.map(lambda x: x, model)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, (Linear, JoinedLinear)):
            _quantize(module, functools.partial(quantized, kind=kind))
        elif isinstance(module, ExpertMLPs) and kind == "mxfp4":
            _quantize(module.gate_up, _experts)
            _quantize(module.down, _experts)
    return copy


def is_quantized(model: Model) -> bool:
    """Whether a weight of ``model`` has less than 16 bits."""
    kinds = (Quantized, MXFP4)
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _quantize(module: Linear | JoinedLinear | Kernel, as_kind: Callable[[Array], Any]) -> None:
    kernel = module.kernel.get_value()
    if not isinstance(kernel, (Quantized, MXFP4)):
        module.kernel = nnx.Param(as_kind(kernel))


@jax.jit
def _experts(kernel: Array) -> MXFP4:
    """``kernel [E, in, *out]`` in MXFP4, expert by expert, since in float32 it is large."""
    kernels = jax.lax.map(lambda expert: quantized(expert, "mxfp4"), kernel)
    return MXFP4(kernels.codes, kernels.scales, leading=1)
