"""How the devices of a mesh share attention and feed-forward (Helix, section 2)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jspec.config import LayerSpec

# The rank of a device is tpa * KVP + kvp: devices that hold the same heads stand side by side, as
# the heads do that they get from the exchange, and so do the rows of the output projection.
TPA, KVP = "tpa", "kvp"
AXES = (TPA, KVP)
Strategy = Literal["helix", "gather", "medha", "tp"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclasses.dataclass(frozen=True)
class HelixConfig:
    """N = ``kvp`` x ``tpa`` = ``tpf`` x ``ep`` devices (Bhatia et al. 2025, section 2).

    ``kvp`` devices share the positions of a row, ``block`` of them to each in turn; ``tpa`` share
    the key-value heads. All N share the output projection, the vocabulary and the feed-forward;
    ``tpf`` None is N / ``ep``. Of a mixture of experts, ``ep=1`` shares out the channels of each
    expert, ``ep=N`` the experts.

    ``strategy``: ``helix``, or one to compare it with. ``gather``: queries are gathered before
    attention, and outputs summed and scattered behind it. ``medha``: TPA alone shares the weights,
    and attention is summed over KVP (Agrawal et al. 2024). ``tp``: tensor parallelism, whose
    devices beyond the key-value heads hold copies of the cache.

    Raises `ValueError` for sizes that do not fit together.
    """

    kvp: int = 1
    tpa: int = 1
    tpf: int | None = None
    ep: int = 1
    block: int = 16
    strategy: Strategy = "helix"

    def __post_init__(self) -> None:
        for name in ("kvp", "tpa", "ep", "block"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        if self.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ValueError(f"strategy={self.strategy!r} must be one of {known}")
        if self.tpf is None:
            object.__setattr__(self, "tpf", self.devices // self.ep)
        if type(self.tpf) is not int or self.tpf * self.ep != self.devices:
            raise ValueError(
                f"tpf={self.tpf} times ep={self.ep} must be kvp={self.kvp} times tpa={self.tpa}, "
                f"{self.devices} devices; leave tpf out"
            )
        if self.ep not in (1, self.shares):
            raise ValueError(
                f"ep={self.ep} must be 1, which shares out the channels of each expert, or "
                f"{self.shares}, which shares out the experts"
            )

    @property
    def devices(self) -> int:
        """N."""
        return self.kvp * self.tpa

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that share the weights behind attention."""
        return (TPA,) if self.strategy == "medha" else AXES

    @property
    def shares(self) -> int:
        """How many devices share the weights behind attention."""
        return self.tpa if self.strategy == "medha" else self.devices

    @property
    def stripes(self) -> int:
        """How many devices share the positions of a row."""
        return 1 if self.strategy == "tp" else self.kvp

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The first N devices, axes ``tpa`` and ``kvp``. Raises `ValueError` where there are
        fewer."""
        found = jax.devices()
        if len(found) < self.devices:
            raise ValueError(
                f"kvp={self.kvp} times tpa={self.tpa} needs {self.devices} devices and this "
                f"machine has {len(found)} ({found[0].device_kind}); lower kvp or tpa"
            )
        return jax.make_mesh(
            (self.tpa, self.kvp),
            AXES,
            axis_types=(AxisType.Auto,) * 2,
            devices=found[: self.devices],
        )

    def sharding(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Of an array whose axes are sharded over these of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def check_layer(self, layer: int, num_heads: int, spec: LayerSpec) -> None:
        """Raise `ValueError` where the heads of a layer do not divide into the devices."""
        heads = spec.kv_heads
        self.check_kv_heads(layer, heads)
        if num_heads % self.devices:
            raise ValueError(
                f"layer {layer} has {num_heads} query heads, which do not divide into "
                f"kvp={self.kvp} times tpa={self.tpa} devices; choose others"
            )
        if self.strategy == "tp" and self.kvp > 1 and heads > self.tpa:
            raise ValueError(
                f"strategy='tp' copies the cache over kvp={self.kvp} devices, but layer {layer} "
                f"has {heads} key-value heads to share; pass tpa={min(heads, self.devices)} first"
            )

    def check_kv_heads(self, layer: int, heads: int) -> None:
        """Raise `ValueError` where the key-value heads of a layer do not divide into ``tpa``."""
        if self.tpa > heads:
            kvp = self.devices // heads
            raise ValueError(
                f"tpa={self.tpa} is more than the {heads} key-value heads of layer {layer}: the "
                "devices beyond them would hold copies of the cache; share the positions instead, "
                f"as with kvp={kvp}, tpa={heads}"
            )
        if heads % self.tpa:
            raise ValueError(
                f"tpa={self.tpa} must divide the {heads} key-value heads of layer {layer}"
            )
