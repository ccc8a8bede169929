"""How projections that share an input are stored in one parameter, so that one matmul does all.

Checkpoints store them separately: queries, keys and values, and gate and up of a SwiGLU. A joined
kernel is ``[in, rows, columns]``, its bias ``[rows, columns]``. Each part is a rectangle of rows
and columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from jspec.config import LayerSpec, ModelConfig
from jspec.parts import Latent

_OF_EXPERTS = ".experts."  # in the name of a parameter that holds all of them


@dataclasses.dataclass(frozen=True)
class Part:
    """A projection within a joined parameter; its outputs are ``rows x columns``, row by row.

    Attributes:
        module: its name without layer and leaf, such as ``"attention.q"``.
        rows: first row, and one past the last.
        columns: first column, and one past the last.
    """

    module: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def index(self) -> tuple:
        return ..., slice(*self.rows), slice(*self.columns)

    def of(self, joined: Any) -> Any:
        """The part of ``joined [..., rows, columns]``; a view of a NumPy array."""
        return joined[self.index]

    @property
    def outputs(self) -> int:
        return math.prod(end - first for first, end in (self.rows, self.columns))


def qkv_parts(num_heads: int, spec: LayerSpec) -> tuple[Part, Part, Part]:
    """The parts of attention: one row for each KV head, with its G queries, its key and its value.

    Sharded by rows, each device computes the attention of complete groups.
    """
    queries = num_heads // spec.kv_heads * spec.key_size
    ends = itertools.accumulate((0, queries, spec.key_size, spec.value_size))
    (q, k, v), rows = itertools.pairwise(ends), (0, spec.kv_heads)
    return (
        Part("attention.q", rows, q),
        Part("attention.k", rows, k),
        Part("attention.v", rows, v),
    )


def gate_up_parts(width: int, mlp: str = "mlp") -> tuple[Part, Part]:
    """Gate in row 0, up in row 1. Sharded by columns, each device has matching pairs."""
    return Part(f"{mlp}.gate", (0, 1), (0, width)), Part(f"{mlp}.up", (1, 2), (0, width))


def down_parts(num_heads: int, latent: Latent) -> tuple[Part, Part]:
    """The projections of latent attention: to the latent of queries, or queries, and to KV."""
    name, queries = "attention.q_down", latent.query_rank
    if queries is None:
        name, queries = "attention.q", num_heads * latent.query_size
    columns, rows = queries + latent.rank + latent.rope_size, (0, 1)
    return Part(name, rows, (0, queries)), Part("attention.kv_down", rows, (queries, columns))


def joined_shape(parts: tuple[Part, ...]) -> tuple[int, int]:
    """Rows and columns that hold all of ``parts``."""
    return max(part.rows[1] for part in parts), max(part.columns[1] for part in parts)


def separate(
    config: ModelConfig, parameter: str, array: Any, *, packed: bool = False
) -> dict[str, Any]:
    """The parts of ``array``, which has the shape of ``parameter``, by their names apart.

    ``layers.0.mlp.gate_up.kernel`` has ``layers.0.mlp.gate.kernel`` and ``layers.0.mlp.up.kernel``,
    each ``[in, rows, columns]``. The experts of ``layers.3.mlp.experts.gate_up.kernel`` are apart
    too, as in ``layers.3.mlp.experts.7.gate.kernel``, unless they are ``packed``. A parameter
    that is not joined is its own part.
    """
    wholes = {parameter: array}
    if _OF_EXPERTS in parameter:
        if packed:
            return wholes
        wholes = {_of_expert(parameter, expert): value for expert, value in enumerate(array)}
    apart = {}
    for whole, value in wholes.items():
        parts = _parts(config, whole)
        apart |= {name: part.of(value) for name, part in parts.items()} or {whole: value}
    return apart


def separate_shapes(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, packed: bool = False
) -> dict[str, tuple[int, ...]]:
    """The ``shapes`` of a decoder's parameters, by name, as those of its separate projections."""
    wholes, apart = {}, {}
    for parameter, shape in shapes.items():
        if _OF_EXPERTS in parameter and packed:
            apart[parameter] = shape
        elif _OF_EXPERTS in parameter:
            wholes |= {_of_expert(parameter, expert): shape[1:] for expert in range(shape[0])}
        else:
            wholes[parameter] = shape
    for whole, shape in wholes.items():
        parts = _parts(config, whole)
        apart |= {name: (*shape[:-2], part.outputs) for name, part in parts.items()} or {
            whole: shape
        }
    return apart


def _of_expert(parameter: str, expert: int) -> str:
    """The name of an expert's own part of a parameter that holds all experts."""
    return parameter.replace(_OF_EXPERTS, f"{_OF_EXPERTS}{expert}.")


def _parts(config: ModelConfig, parameter: str) -> dict[str, Part]:
    """Parts of a parameter by their names apart; none where it is not joined."""
    match parameter.split("."):
        case ["layers", layer, "attention", "qkv", leaf]:
            parts = qkv_parts(config.num_heads, config.layers[int(layer)])
        case ["layers", layer, "attention", "down", leaf] if config.latent is not None:
            parts = down_parts(config.num_heads, config.latent)
        case ["layers", layer, *mlp, "gate_up", leaf]:
            size = config.intermediate_size
            if config.experts is not None and len(mlp) > 1:
                experts = config.experts
                size = experts.size if mlp[1] == "experts" else experts.shared_size or 0
            parts = gate_up_parts(size, ".".join(mlp))
        case _:
            return {}
    return {f"layers.{layer}.{part.module}.{leaf}": part for part in parts}
