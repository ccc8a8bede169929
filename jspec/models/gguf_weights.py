"""A model in a GGUF file: its settings, and its tensors dequantised, through the gguf package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.config import ModelConfig
from jspec.extras import install
from jspec.models.errors import CheckpointError, on_one_line, quoted
from jspec.models.files import TENSOR_LIMIT
from jspec.models.gguf_settings import config_of
from jspec.models.weights import listed, stored_shape, write_rows

_PART = re.compile(r"layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"experts\.([0-9]+)\.")
_BLOCK = 1 << 18  # numbers that are dequantised at a time
_LONGEST = 1 << 14  # items of a list; longer ones are of the tokenizer
# Modules of jspec, each projection by its own, and their tensors; other files may differ in a few.
_TENSORS = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.post_norm": "post_attention_norm",
    "attention.sinks": "attn_sinks.weight",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.post_norm": "post_ffw_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
_OF_FAMILY = {"gpt_oss": {"mlp_norm": "post_attention_norm"}}
_OUTSIDE = {
    "embedding": "token_embd.weight",
    "norm.scale": "output_norm.weight",
    "head.kernel": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFWeights:
    """The tensors of the file ``path``, and the ``config`` that it says.

    Raises `CheckpointError` where the file is malformed or of another model, and `ValueError`
    where the gguf package is missing.
    """

    def __init__(self, path: Path):
        try:
            import gguf  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(f"{path} needs the gguf package: {install('gguf')}") from None
        self.path, self._gguf = path, gguf
        try:
            reader = gguf.GGUFReader(path)
            metadata = {name: _value(field) for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._shapes = {
                name: tuple(map(int, reversed(tensor.shape)))
                for name, tensor in self._tensors.items()
            }
        except Exception as error:  # the package has no one type for what it cannot read
            raise CheckpointError(f"{path} is no sound GGUF file: {on_one_line(error)}") from None
        if len(self._tensors) > TENSOR_LIMIT:
            raise CheckpointError(f"{path} has more than {TENSOR_LIMIT} tensors")
        if metadata.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{path} is one of {quoted(metadata['split.count'])} parts; merge them with "
                "llama.cpp's llama-gguf-split"
            )
        self.config: ModelConfig = config_of(metadata, self._shapes, str(path), self._factors)

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with ``wanted``, parameters and their shapes in jspec."""
        used = {_ROPE_FACTORS} if self.config.family == "llama" else set()
        for parameter, shape in wanted.items():
            name, expert = self._stored_name(parameter)
            used.add(name)
            if name not in self._tensors:
                raise CheckpointError(f"{self.path} lacks {quoted(name)}, which its fields ask for")
            stored = stored_shape(parameter, shape)
            if expert is not None and self.config.experts is not None:
                stored = (self.config.experts.routed, *stored)
            if self._shapes[name] != stored:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} has shape {self._shapes[name]}, but its "
                    f"fields ask for {stored}"
                )
        if extra := [name for name in self._tensors if name not in used]:
            raise CheckpointError(f"{self.path} has {listed(extra)}, which no field asks for")

    def read(self, parameter: str, out: np.ndarray, axes: Sequence[np.ndarray] = ()) -> None:
        """Fill ``out``, in jspec's layout, whatever ``axes`` say.

        Arguments are those of `jspec.models.weights.Weights.read`.
        """
        name, expert = self._stored_name(parameter)
        shift = 1 if self.config.centered_norms and parameter.endswith("norm.scale") else 0
        data = self._tensors[name].data
        data = data if expert is None else data[expert]
        target = np.moveaxis(out, 0, -1) if parameter.endswith(".kernel") else out
        target = target[None] if target.ndim == len(data.shape) else target
        for first, block in self._blocks(name, data, self._order(parameter, len(data))):
            # Such files have 1 added to what scales.
            write_rows(target, first, block - shift)

    def _blocks(
        self, name: str, data: np.ndarray, order: np.ndarray | None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of a tensor, dequantised, each block with the number of its first."""
        kind = self._tensors[name].tensor_type
        step = max(1, _BLOCK // max(1, int(np.prod(data.shape[1:]))))
        for first in range(0, len(data), step):
            place = slice(first, first + step)
            rows = np.ascontiguousarray(data[place if order is None else order[place]])
            try:
                yield first, self._gguf.dequantize(rows, kind)
            except (NotImplementedError, ValueError, self._gguf.QuantError) as error:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} of type {kind.name} cannot be read: "
                    f"{on_one_line(error)}"
                ) from None

    def _order(self, parameter: str, rows: int) -> np.ndarray | None:
        """Where the rows of queries and keys of a Llama are: it rotates neighbouring channels."""
        module = parameter.rpartition(".")[0]
        if self.config.family != "llama" or not module.endswith(("attention.q", "attention.k")):
            return None
        pairs = np.arange(rows).reshape(-1, self.config.layers[0].key_size // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def _stored_name(self, parameter: str) -> tuple[str, int | None]:
        """The tensor of a parameter, or of a part of one, and the expert that it is of."""
        if parameter in _OUTSIDE:
            return _OUTSIDE[parameter], None
        match = _PART.fullmatch(parameter)
        assert match is not None, parameter
        layer, rest = match.groups()
        expert = _EXPERT.search(rest)
        if expert is not None:
            rest = rest.replace(expert[0], "experts.")
        names = _TENSORS | _OF_FAMILY.get(self.config.family, {})
        module, _, leaf = rest.rpartition(".")
        if (stored := names.get(rest)) is None:
            stored = f"{names[module]}.{'bias' if leaf == 'bias' else 'weight'}"
        return f"blk.{layer}.{stored}", None if expert is None else int(expert[1])

    def _factors(self) -> np.ndarray:
        blocks = self._blocks(_ROPE_FACTORS, self._tensors[_ROPE_FACTORS].data, None)
        return np.concatenate([block for _, block in blocks])


def _value(field: Any) -> Any:
    """A field's value; nothing of a long list."""
    return None if len(field.data) > _LONGEST else field.contents()
