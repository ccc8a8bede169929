"""A model in a GGUF file: its settings, and its tensors dequantised, through the gguf package."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.errors import CheckpointError, on_one_line
from jspec.models.gguf_file import GGUFFile, TensorEntry
from jspec.models.gguf_settings import config_of
from jspec.models.gguf_vocabulary import read_vocabulary
from jspec.models.rope import channel_order
from jspec.models.weights import listed, stored_shape, write_rows

_PART = re.compile(r"layers\.([0-9]+)\.(.+)")
_LAYER = re.compile(r"blk\.([0-9]+)\.")
_EXPERTS = re.compile(r"_exps\.(weight|bias)$")
_EXPERT = re.compile(r"experts\.([0-9]+)\.")
_BLOCK = 1 << 18  # numbers that are dequantised at a time
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

    Raises `CheckpointError` where the file is malformed or of another model.
    """

    def __init__(self, path: Path):
        # It takes a third of a second to import, which only such files should cost.
        import gguf

        self.path, self._gguf = path, gguf
        self._file = GGUFFile(path)
        fields = self._file.fields()
        if fields.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{path} is one of {shown(fields['split.count'])} parts; merge them with "
                "llama.cpp's llama-gguf-split"
            )
        self._shapes = {name: entry.shape for name, entry in self._file.tensors.items()}
        self._row_bytes = {name: self._checked(e) for name, e in self._file.tensors.items()}
        vocabulary = read_vocabulary(self._file)
        stops = [] if vocabulary is None else vocabulary.stop_tokens()
        self.config: ModelConfig = config_of(fields, self._shapes, str(path), self._factors, stops)

    def _checked(self, entry: TensorEntry) -> int:
        """The bytes of a row of a tensor, which lies within the file."""
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(entry.kind)]
        except (ValueError, KeyError):
            raise self._file.error(
                f"tensor {shown(entry.name)} has the unknown type {entry.kind}"
            ) from None
        columns = entry.shape[-1] if entry.shape else 1
        if columns % block:
            raise self._file.error(
                f"tensor {shown(entry.name)} has rows of {columns}, no multiple of {block}"
            )
        row = columns // block * size
        end = self._file.data_start + entry.offset + math.prod(entry.shape[:-1]) * row
        if end > self._file.size:
            raise self._file.damaged(
                f"tensor {shown(entry.name)} ends at byte {end}, but the file has {self._file.size}"
            )
        return row

    def check_counts(self) -> None:
        """Compare the numbers of layers and experts with the tensors, before work on each."""
        layers = {match[1] for name in self._shapes if (match := _LAYER.match(name))}
        if len(layers) != self.config.num_layers:
            raise CheckpointError(
                f"{self.path} has tensors of {len(layers)} layers, but its field block_count says "
                f"{self.config.num_layers}"
            )
        if (experts := self.config.experts) is None:
            return
        for name, shape in self._shapes.items():
            if _EXPERTS.search(name) and shape[:1] != (experts.routed,):
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} has shape {shape}, but its field "
                    f"expert_count says {experts.routed}"
                )

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with ``expected``, parameters and their shapes in jspec."""
        used = {_ROPE_FACTORS} if self.config.family == "llama" else set()
        for parameter, shape in expected.items():
            name, expert = self._stored_name(parameter)
            used.add(name)
            if name not in self._file.tensors:
                raise CheckpointError(f"{self.path} lacks {shown(name)}, which its fields ask for")
            stored = stored_shape(parameter, shape)
            if expert is not None and self.config.experts is not None:
                stored = (self.config.experts.routed, *stored)
            if self._shapes[name] != stored:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} has shape {self._shapes[name]}, but its "
                    f"fields ask for {stored}"
                )
        if extra := [name for name in self._file.tensors if name not in used]:
            raise CheckpointError(f"{self.path} has {listed(extra)}, which no field asks for")

    def read(self, parameter: str, out: np.ndarray, axes: Sequence[np.ndarray] = ()) -> None:
        """Fill ``out``, in jspec's layout, whatever ``axes`` say.

        Arguments are those of `jspec.models.weights.Weights.read`.
        """
        name, expert = self._stored_name(parameter)
        shift = 1 if self.config.centered_norms and parameter.endswith("norm.scale") else 0
        rank = len(self._shapes[name]) - (expert is not None)
        target = np.moveaxis(out, 0, -1) if parameter.endswith(".kernel") else out
        target = target[None] if target.ndim == rank else target
        for first, block in self._blocks(name, expert, self._order(parameter)):
            # Such files have 1 added to what scales.
            write_rows(target, first, block - shift if shift else block)

    def _blocks(
        self, name: str, expert: int | None, order: np.ndarray | None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of a tensor, or of an expert's part, float32, each block with its first's number.

        ``order``: where each row is stored; such a tensor is read as a whole.
        """
        entry, row = self._file.tensors[name], self._row_bytes[name]
        shape = entry.shape if expert is None else entry.shape[1:]
        start = self._file.data_start + entry.offset
        start += (expert or 0) * math.prod(shape[:-1]) * row
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            if len(shape) < 2:
                vector = self._dequantized(entry, self._rows(file, 1, row, name))[0]
                yield 0, vector if order is None else vector[order]
                return
            stored = None if order is None else self._rows(file, shape[0], row, name)
            step = max(1, _BLOCK // max(1, shape[1]))
            for first in range(0, shape[0], step):
                count = min(step, shape[0] - first)
                if stored is None or order is None:
                    rows = self._rows(file, count, row, name)
                else:
                    rows = stored[order[first : first + count]]
                yield first, self._dequantized(entry, rows)

    def _rows(self, file: BinaryIO, count: int, row: int, name: str) -> np.ndarray:
        data = np.fromfile(file, np.uint8, count * row)
        if len(data) != count * row:
            raise CheckpointError(f"{self.path} shrank while tensor {shown(name)} was read")
        return data.reshape(count, row)

    def _dequantized(self, entry: TensorEntry, rows: np.ndarray) -> np.ndarray:
        kind = self._gguf.GGMLQuantizationType(entry.kind)
        try:
            # Scales of a file may be infinite or NaN, and so are the weights then.
            with np.errstate(invalid="ignore", over="ignore"):
                # As one row: the package takes 16 rows at a time, which are few numbers.
                return self._gguf.dequantize(rows.reshape(1, -1), kind).reshape(len(rows), -1)
        except (NotImplementedError, ValueError, self._gguf.QuantError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {shown(entry.name)} of type {kind.name} cannot be read: "
                f"{on_one_line(error)}"
            ) from None

    def _order(self, parameter: str) -> np.ndarray | None:
        """Where the rows of queries and keys of a Llama are: it rotates neighbouring channels."""
        module = parameter.rpartition(".")[0]
        if self.config.family != "llama" or not module.endswith(("attention.q", "attention.k")):
            return None
        rows = self._shapes[self._stored_name(parameter)[0]][0]
        size = self.config.layers[0].key_size
        order = channel_order(size, self.config.ropes[0], interleaved=True)
        return (np.arange(0, rows, size)[:, None] + order).reshape(-1)

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
        return np.concatenate([block for _, block in self._blocks(_ROPE_FACTORS, None, None)])
