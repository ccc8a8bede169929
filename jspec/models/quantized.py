"""A copy of a decoder whose linear weights have 8 bits."""

from __future__ import annotations

from flax import nnx

from jspec.models.decoder import Decoder
from jspec.models.modules import JoinedLinear, Linear
from jspec.ops.quantized import KINDS, quantized
from jspec.typing import Model


def quantized_copy(model: Model, kind: str) -> Decoder:
    """A copy of ``model`` with all linear weights as ``kind``: ``int8`` or ``fp8``.

    Embeddings, also where they are the head, norms, biases, experts and the maps of a latent are
    shared with ``model``. The copy takes a byte a weight and 4 bytes a column besides. Raises
    `TypeError` for another model than `Decoder`, `ValueError` for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"quantized={kind!r} must be one of {', '.join(KINDS)}")
    if not isinstance(model, Decoder):
        raise TypeError(
            f"a model of type {type(model).__name__} is no jspec.Decoder, whose weights jspec "
            "knows how to quantise; pass a quantised one of your own as draft_model"
        )
    copy = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, (Linear, JoinedLinear)):
            module.kernel = nnx.Param(quantized(module.kernel.get_value(), kind))
    return copy
