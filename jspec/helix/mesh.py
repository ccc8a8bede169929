"""How the devices of a mesh share attention and feed-forward (Helix, section 2)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jspec import tuned
from jspec.config import LayerSpec
from jspec.ops.all_to_all import By, refuses_all_to_all

# The rank of a device is tpa * KVP + kvp: devices that hold the same heads stand side by side, as
# the heads do that they get from the exchange, and so do the rows of the output projection.
TPA, KVP = "tpa", "kvp"
Strategy = Literal["helix", "gather", "medha", "tp"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
UpProjection = Literal["auto", "before", "after"]


class _MeshAxis(NamedTuple):
    """An axis of the mesh, ``of`` TPA or KVP or a part of one.

    ``in_group``: its devices are of one group, which shares the channels of each expert, and not
    of several groups, which share the experts.
    """

    name: str
    size: int
    of: str
    in_group: bool


@dataclasses.dataclass(frozen=True)
class HelixConfig:
    """The layout of a model over N = ``kvp`` x ``tpa`` = ``tpf`` x ``ep`` devices.

    All N devices share the output projection, the vocabulary and the feed-forward (Bhatia et al.
    2025, section 2).

    Args:
        kvp: devices that share the positions of a row.
        tpa: devices that share the key-value heads.
        tpf: devices of a group, which share the channels of each expert; None is N / ``ep``.
        ep: groups of devices, which share the experts of a mixture.
        block: consecutive positions on a device, before the next device of ``kvp`` takes over.
        strategy: ``helix``, or a layout to compare it with. ``gather`` gathers queries before
            attention, and sums and scatters outputs after it. ``medha`` shares the weights over
            ``tpa`` alone, and sums attention over ``kvp`` (Agrawal et al. 2024). ``tp`` is tensor
            parallelism: more devices than key-value heads hold copies of the cache.
        overlap: number of chunks of rows in which a decoding step exchanges the outputs of
            attention, each chunk while the next one attends (HOP-B, section 2.1.3). Chunks differ
            by at most one row, and are no more than the rows. None takes the number from the
            tuning table of the GPU.
        up_projection: whether latent attention applies the map to values ``before`` or ``after``
            the exchange; ``auto`` chooses the smaller message.
        exchange: the transport. ``xla`` is NCCL on GPUs. ``pallas`` and ``cuda`` are one-sided:
            each device stores its part in its peers' memory, within one process. The launch that
            sends a message also waits for it, so they exclude ``overlap``. ``cuda`` also sums over
            all N devices after the output projection and the feed-forward, for ``tp`` too. Its
            messages of more than 1 MiB to a device, as of a prompt, use XLA; exact passes send
            several instead.

    Raises:
        ValueError: the sizes or options do not fit together.
    """

    kvp: int = 1
    tpa: int = 1
    tpf: int | None = None
    ep: int = 1
    block: int = 16
    strategy: Strategy = "helix"
    overlap: int | None = None
    up_projection: UpProjection = "auto"
    exchange: By = "xla"

    def __post_init__(self) -> None:
        for name in ("kvp", "tpa", "ep", "block", "overlap"):
            value = getattr(self, name)
            if name == "overlap" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        if self.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ValueError(f"strategy={self.strategy!r} must be one of {known}")
        for name, choices in (("up_projection", UpProjection), ("exchange", By)):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {known}")
        if (self.overlap or 1) > 1 and not self._exchanges:
            raise ValueError(
                f"overlap={self.overlap} cuts the exchange of strategy='helix' over kvp of 2 or "
                f"more, but kvp={self.kvp} and strategy={self.strategy!r}; leave overlap out"
            )
        if self.exchange != "xla":
            of = {
                "pallas": (self._exchanges, "strategy='helix' over kvp of 2 or more"),
                "cuda": (self._sums, "strategy='helix' or 'tp' over 2 devices or more"),
            }
            is_carried, where = of[self.exchange]
            if not is_carried:
                raise ValueError(
                    f"exchange={self.exchange!r} is of {where}, but kvp={self.kvp}, "
                    f"tpa={self.tpa} and strategy={self.strategy!r}; leave exchange out"
                )
            if (self.overlap or 1) > 1:
                raise ValueError(
                    f"overlap={self.overlap} overlaps messages with attention, but "
                    f"exchange={self.exchange!r} waits for each message; leave one of them out"
                )
        if self.tpf is None:
            object.__setattr__(self, "tpf", max(self.shares // self.ep, 1))
        if type(self.tpf) is not int or self.tpf * self.ep != self.shares:
            raise ValueError(
                f"tpf={self.tpf!r} times ep={self.ep} must be {self.shares}, the devices that "
                "share the feed-forward; leave tpf out, and choose an ep that divides them"
            )

    @property
    def devices(self) -> int:
        """N, the number of devices."""
        return self.kvp * self.tpa

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that share the weights after attention."""
        return self.tpa_axes if self.strategy == "medha" else (*self.tpa_axes, *self.kvp_axes)

    @property
    def tpa_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the key-value heads: ``tpa``, or its two parts."""
        return tuple(axis.name for axis in self._mesh_axes if axis.of == TPA)

    @property
    def kvp_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the positions: ``kvp``, or its two parts."""
        return tuple(axis.name for axis in self._mesh_axes if axis.of == KVP)

    @property
    def ep_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the experts."""
        names = (axis.name for axis in self._mesh_axes if not axis.in_group)
        return tuple(name for name in names if name in self.axes)

    @property
    def tpf_axes(self) -> tuple[str, ...]:
        """The mesh axes that share the channels of each expert."""
        names = (axis.name for axis in self._mesh_axes if axis.in_group)
        return tuple(name for name in names if name in self.axes)

    @functools.cached_property
    def _mesh_axes(self) -> tuple[_MeshAxis, ...]:
        """In the order of ranks, the slowest first."""
        tpf = self.shares // self.ep
        # Groups take what they can of KVP. The rest divides TPA, as tpf divides KVP x TPA.
        of_kvp = 1 if self.strategy == "medha" else math.gcd(tpf, self.kvp)
        axes: list[_MeshAxis] = []
        for of, size, group in ((TPA, self.tpa, tpf // of_kvp), (KVP, self.kvp, of_kvp)):
            if group in (1, size):
                axes.append(_MeshAxis(of, size, of, in_group=group == size))
            else:
                axes.append(_MeshAxis(f"{of}_ep", size // group, of, in_group=False))
                axes.append(_MeshAxis(f"{of}_tpf", group, of, in_group=True))
        return tuple(axes)

    @property
    def shares(self) -> int:
        """How many devices share the weights after attention."""
        return self.tpa if self.strategy == "medha" else self.devices

    @property
    def stripes(self) -> int:
        """How many devices share the positions of a row."""
        return 1 if self.strategy == "tp" else self.kvp

    @property
    def _exchanges(self) -> bool:
        """Whether there is an exchange that can be cut into chunks, or one-sided."""
        return self.kvp > 1 and self.strategy == "helix"

    @property
    def _sums(self) -> bool:
        """Whether all N devices sum after the output projection and the feed-forward."""
        return self.devices > 1 and self.strategy in ("helix", "tp")

    @property
    def _in_chunks(self) -> bool:
        return self._exchanges and self.exchange == "xla"

    def chunks(self, rows: int) -> int:
        """The number of chunks in which a decoding step of ``rows`` exchanges its outputs."""
        if self.overlap is not None or not self._in_chunks:
            return min(self.overlap or 1, rows)
        return min(tuned.block("exchange", "helix", {"rows": rows})["chunks"], rows)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """The ``compiler_options`` of `jax.jit` for programs on the mesh.

        jspec passes them to the programs that it compiles; pass them to `jax.jit` for others.
        """
        chunks = self.overlap or 1
        if self.overlap is None and self._in_chunks:
            chunks = max(entry["chunks"] for entry in tuned.blocks("exchange", "helix"))
        # Off by default on GPUs, where messages then mostly end before other work begins.
        return {"xla_gpu_enable_latency_hiding_scheduler": True} if chunks > 1 else {}

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The first N devices, axes `tpa_axes` and `kvp_axes`.

        Raises `ValueError` where there are fewer, where several processes have more, one of which
        would have no part, and where they cannot exchange as ``exchange`` says.
        """
        devices, processes = jax.devices(), jax.process_count()
        available = "this machine has" if processes == 1 else f"{processes} processes have"
        if len(devices) < self.devices:
            message = (
                f"kvp={self.kvp} times tpa={self.tpa} needs {self.devices} devices and {available} "
                f"{len(devices)} ({devices[0].device_kind}); lower kvp or tpa"
            )
            if processes == 1 and devices[0].platform == "cpu":
                flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={self.devices}"
                message += f", or set {flag} (jspec generate: --devices {self.devices})"
            raise ValueError(message)
        if processes > 1 and len(devices) > self.devices:
            raise ValueError(
                f"kvp={self.kvp} times tpa={self.tpa} takes {self.devices} devices and {available} "
                f"{len(devices)}, all of which must have a part; raise kvp or tpa"
            )
        if reason := self.refuses_all_to_all():
            raise ValueError(f"{reason}; leave exchange out")
        axes = self._mesh_axes
        return jax.make_mesh(
            tuple(axis.size for axis in axes),
            tuple(axis.name for axis in axes),
            axis_types=(AxisType.Auto,) * len(axes),
            devices=devices[: self.devices],
        )

    def refuses_all_to_all(self) -> str | None:
        """Why the devices that there are cannot exchange as ``exchange`` says, or None."""
        reason = refuses_all_to_all(self.exchange, jax.devices()[: self.devices])
        return reason and f"exchange={self.exchange!r} cannot run here: {reason}"

    def sharding(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """The sharding of an array whose axes are sharded over ``axes`` of the mesh."""
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
