"""A model sharded over the devices of a `HelixConfig`, with the same outputs as on one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jspec.cache import Cache, Layout
from jspec.config import LayerSpec
from jspec.decode.settings import StepConfig
from jspec.decode.state import Exact, Models
from jspec.helix.cache import (
    cache_specs,
    column_spec,
    layouts_on,
    local_spec,
    part_of,
    whole_of,
)
from jspec.helix.mesh import HelixConfig
from jspec.models import checkpoint
from jspec.models.decoder import Decoder
from jspec.models.fingerprint import SAMPLES, fingerprint
from jspec.models.modules import MLP
from jspec.models.quantized import is_quantized
from jspec.policies import Dense
from jspec.processes import all_or_none, check_same, digest, several, versions
from jspec.sharding import put
from jspec.typing import Array, Attend, ModelShape

Spec = PartitionSpec
Specs = Callable[[HelixConfig, str, tuple[int, ...]], PartitionSpec]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """A model whose parameters are sharded over the mesh of ``helix``.

    It takes the place of a model in `jspec.generate`, `jspec.start_decoding`,
    `jspec.decode_chunk` and the rest of jspec. `shard` and `load_model` create one from a
    `Decoder`.

    Args:
        model: a `jspec.Model` that computes with its device's share of each parameter, inside a
            `jax.shard_map` over the mesh. It passes N / TPA query heads and K / TPA key-value heads
            to ``attend``, which returns the heads of the device's part of the output projection.
            The model itself sums over ``helix.axes`` after that projection and the feed-forward.
        helix: the layout.
        specs: ``specs(helix, name, shape)`` returns the `PartitionSpec` of the parameter ``name``.
            A function at the top level of a module, so that it can be hashed and compared.
        vocabulary_axes: mesh axes over which the logits are sharded; empty if they are not.
        inside: whether this is the view inside the mesh. Set by jspec.

    Raises:
        ValueError: the heads do not divide into the devices.
    """

    model: Any
    helix: HelixConfig = dataclasses.field(metadata={"static": True})
    specs: Specs = dataclasses.field(metadata={"static": True})
    vocabulary_axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    inside: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def config(self) -> ModelShape:
        """The model's; inside the mesh, with the key-value heads of one device."""
        config = self.model.config
        if not self.inside:
            return config
        layers = tuple(local_spec(spec, self.helix.tpa) for spec in config.layers)
        return _DeviceShape(config.vocab_size, layers, config.max_context, config.stop_tokens)

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(
        self, tokens: Array, positions: Array, attend: Attend, cache: Any
    ) -> tuple[Array, Any]:
        return self.model(tokens, positions, attend, cache)

    def logits(self, hidden: Array) -> Array:
        return self.model.logits(hidden)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """The ``compiler_options`` of `jax.jit` for steps on the mesh."""
        return self.helix.compiler_options

    @property
    def processes(self) -> int:
        return len({device.process_index for device in self.helix.mesh.devices.flat})

    def over_mesh(self, function: Callable[..., Any], *arguments: Any, like: Any) -> Any:
        """``function(*arguments)`` on every device of the mesh, by `jax.shard_map`.

        A device gets its share of the arrays. Models and caches come as its view of them: a cache
        has the layouts, the key-value heads and the `Exchange` of one device.

        Args:
            function: Takes a device's view of each argument; its caches are made global again.
            arguments: Pytrees of global arrays. Parameters, what a policy stores and caches are
                sharded, and whatever has ``partition_specs``; all else is replicated.
            like: Arrays or shapes in the structure of the result, which say how it is sharded.

        Returns:
            The result, of global arrays.
        """

        def on_device(*shares: Any) -> Any:
            return self._global_view(function(*map(self._device_view, shares)))

        run = jax.shard_map(
            on_device,
            mesh=self.helix.mesh,
            in_specs=tuple(map(self._specs_of, arguments)),
            out_specs=self._specs_of(like),
            # JAX does not know that the sums of a kernel are the same on all devices.
            check_vma=self.helix.exchange != "cuda",
        )
        return run(*arguments)

    def layouts(self, capacity: int, gamma: int, longest: int | None = None) -> tuple[Layout, ...]:
        """The layout of each layer's cache on the mesh, by `jspec.helix.cache.layouts_on`."""
        return layouts_on(self.helix, self.config.layers, capacity, gamma, longest)

    def placing(self, name: str, shape: tuple[int, ...]) -> NamedSharding | None:
        """The sharding of an array of the state; None for a drafter's, which stay in place."""
        if name.partition(".")[0] == "draft":
            return None
        if name.startswith("cache.columns"):
            return NamedSharding(self.helix.mesh, column_spec(self.helix))
        return self.helix.sharding()

    def placed(self, models: Models) -> Models:
        """``models`` with what a policy takes on the mesh; steps then need not bring it there."""
        to = self.helix.sharding(self.helix.tpa_axes)
        return models._replace(policy=jax.tree.map(lambda x: put(x, to), models.policy))

    def check(self, config: StepConfig) -> None:
        """Raise `ValueError` for a drafter or policy that needs all positions on one device."""
        draft = config.draft
        if not draft.traits.runs_on_mesh:
            raise ValueError(
                f"{draft} does not run on the mesh of {self.helix}, as its traits.runs_on_mesh is "
                "False: it needs all positions on one device; take NoDraft, NgramDraft, "
                "SuffixDraft, SelfDraft or GuidedDraft without a quantized copy, or a Chain of two "
                "of them"
            )
        reads = config.target if config.is_lossy else draft.collect_policy or draft.cache_policy
        if not reads.runs_on_mesh:
            raise ValueError(
                f"{reads} does not run on the mesh of {self.helix}, as its runs_on_mesh is False: "
                "it cannot select from a device's share of the cache; take Dense, Streaming at the "
                "original positions, ExactTopK, Loki, Hata, Vegas, or SparseSpec"
            )
        if not isinstance(reads, Dense) and self.helix.strategy != "helix":
            raise ValueError(
                f"strategy={self.helix.strategy!r} is there to be compared with and reads all "
                f"there is; take strategy='helix' for {reads}"
            )

    def refuses_exact(self, exact: Exact) -> str | None:
        """Why passes on the mesh are not exact at this level, or None."""
        from jspec.cuda_ffi.attention import SLOTS

        helix = self.helix
        if exact != "tokens":
            return 'XLA sums prompts over devices in an order of its own; pass exact="tokens"'
        if helix.devices == 1:
            return "XLA adds residuals on a mesh of one device; pass the model without a mesh"
        if helix.exchange != "cuda":
            return (
                f"exchange={helix.exchange!r} sums over devices in an order of its own; "
                "HelixConfig(exchange='cuda') sums in that of the ranks"
            )
        if helix.strategy != "helix":
            return f"strategy={helix.strategy!r} is to be compared with; take strategy='helix'"
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            return f"XLA sums {self.dtype} over devices; load the model in bfloat16"
        if helix.kvp > 1 and helix.block % SLOTS:
            return (
                f"block={helix.block} must be a multiple of {SLOTS} slots for exact attention; "
                "leave it out"
            )
        if any(spec.window is not None for spec in self.model.config.layers):
            return "a layer with a sliding window has a ring on each device"
        return None

    def _specs_of(self, tree: Any) -> Any:
        """How each array of ``tree`` is sharded, in its structure; replicated unless known."""

        def of(node: Any) -> Any:
            if isinstance(node, Sharded):
                return parameter_specs(node)
            if isinstance(node, Models):
                # Policies keep one array for each key-value head.
                arrays = jax.tree.map(lambda x: Spec(self.helix.tpa_axes), node.policy)
                return Models(of(node.target), jax.tree.map(of, node.draft), arrays)
            if isinstance(node, Cache):
                return cache_specs(self.helix, node)
            if hasattr(node, "partition_specs"):
                return node.partition_specs(self.helix.tpa_axes, self.helix.kvp_axes)
            return Spec()

        def is_known(node: Any) -> bool:
            return isinstance(node, (Sharded, Models, Cache)) or hasattr(node, "partition_specs")

        return jax.tree.map(of, tree, is_leaf=is_known)

    def _device_view(self, tree: Any) -> Any:
        """``tree`` as a device sees it: its models and caches know that they are parts."""

        def of(node: Any) -> Any:
            if isinstance(node, Sharded):
                return dataclasses.replace(node, inside=True)
            return part_of(self.helix, node) if isinstance(node, Cache) else node

        return _map_nodes(of, tree)

    def _global_view(self, tree: Any) -> Any:
        """Undo `_device_view`: caches get the layouts and heads that they have outside the mesh."""

        def of(node: Any) -> Any:
            return whole_of(self.helix, node) if isinstance(node, Cache) else node

        return _map_nodes(of, tree)


@dataclasses.dataclass(frozen=True)
class _DeviceShape:
    """A `jspec.ModelShape` whose layers have the key-value heads of one device."""

    vocab_size: int
    layers: tuple[LayerSpec, ...]
    max_context: int
    stop_tokens: tuple[int, ...]


def shard(model: Decoder, helix: HelixConfig) -> Sharded:
    """Place ``model`` on the mesh of ``helix``, each device with its share of the parameters.

    Args:
        model: the decoder; its weights are not modified.
        helix: the layout.

    Returns:
        The sharded model.

    Raises:
        TypeError: ``model`` is no `Decoder`.
        ValueError: there are too few devices, a size does not divide, weights are quantised, or
            processes differ in weights or mesh (raised on all of them).
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"{type(model).__name__} is no jspec.Decoder; put a model of your own on a mesh by "
            "helix.Sharded (docs/helix.md)"
        )
    if is_quantized(model):
        raise ValueError(
            "weights in MXFP4, int8 or fp8 have no shares on a mesh; load the model with "
            "jspec.helix.load_model(path, helix), or jspec.load_model(path, keep_mxfp4=False)"
        )
    _check_same(model, helix)
    if helix.ep > 1 and model.config.experts is None:
        raise ValueError(
            f"ep={helix.ep} shares out experts, and a model of the family {model.config.family} "
            "has none; leave ep out"
        )
    if model.config.joint_qk_norm and helix.tpa > 1:
        raise ValueError(
            f"tpa={helix.tpa} shares out heads, over all of which a model of the family "
            f"{model.config.family} norms queries and keys; pass tpa=1"
        )
    for layer, spec in enumerate(model.config.layers):
        helix.check_layer(layer, model.config.num_heads, spec)
    graph, state = nnx.split(model)
    copy: Decoder = nnx.merge(graph, state)
    for block in copy.layers:
        mlp = block.mlp
        for part in (block.attention.out, mlp.down if isinstance(mlp, MLP) else mlp):
            part.axes, part.reduced_by = helix.axes, helix.exchange
        if not isinstance(mlp, MLP):
            mlp.experts.axes = helix.ep_axes
    if model.config.vocab_size % helix.shares == 0:
        copy.vocabulary_axes = helix.axes
    sharded = Sharded(copy, helix, decoder_spec, copy.vocabulary_axes)
    return dataclasses.replace(sharded, model=place_parameters(sharded))


def load_model(path: str | os.PathLike, helix: HelixConfig, *, dtype: Any = None) -> Sharded:
    """Load a model as `jspec.load_model` does, each parameter directly onto its devices.

    Experts in MXFP4 are dequantised.

    Args:
        path: a model directory or a GGUF file.
        helix: the layout.
        dtype: as in `jspec.load_model`.

    Returns:
        The sharded model.

    Raises:
        CheckpointError: as `jspec.load_model`; an error of one process is raised on all.
        ValueError: as `jspec.load_model` and `shard`.
    """
    with all_or_none():
        _ = helix.mesh
        files = fingerprint(os.fspath(path)) if several() else ""
    same = {"mesh settings": digest(helix), "dtypes": digest(dtype)}
    check_same({**versions(), "model files": files, **same})
    with all_or_none():
        options: Any = {"dtype": dtype, "sharding": decoder_sharding(helix)}
        model = checkpoint.load_model(path, **options, keep_mxfp4=False)
    return shard(model, helix)


def decoder_sharding(helix: HelixConfig) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Where each parameter of a `Decoder` lies, for the ``sharding`` of `jspec.load_model`."""
    return lambda name, shape: NamedSharding(helix.mesh, decoder_spec(helix, name, shape))


def _check_same(model: Decoder, helix: HelixConfig) -> None:
    """Raise `ValueError` on all processes if they differ in ``model`` or ``helix``."""
    if not several():
        return
    leaves = jax.tree.leaves(nnx.state(model))
    local_leaves = [x for x in leaves if getattr(x, "is_fully_addressable", True)]
    # On the device, so that no weight is copied whole.
    weights = [np.asarray(x.ravel()[:: max(x.size // SAMPLES, 1)]).tobytes() for x in local_leaves]
    same = {"mesh settings": helix, "model settings": model.config, "weights": weights}
    check_same({**versions(), **{name: digest(value) for name, value in same.items()}})


def place_parameters(sharded: Sharded) -> Any:
    """The model's parameters on their devices."""
    mesh = sharded.helix.mesh
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(sharded).model)
    return jax.tree.map(put, sharded.model, shardings)


def parameter_specs(sharded: Sharded) -> Sharded:
    """``sharded`` with the `PartitionSpec` of each parameter in its place."""

    def of(path: Any, parameter: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.tree.map(lambda x: sharded.specs(sharded.helix, name, x.shape), parameter)

    # Of Flax's variables the array is a leaf of its own, which adds nothing to the name.
    specs = jax.tree.map_with_path(
        of, sharded.model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return dataclasses.replace(sharded, model=specs)


def decoder_spec(helix: HelixConfig, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """How a parameter of `jspec.models.decoder.Decoder` is sharded; small ones are not.

    Queries, keys and values by key-value heads over TPA, copied over KVP; the output projection and
    the feed-forward over all N devices, and so the vocabulary, if they divide it. Experts go over
    the EP groups and their channels over the TPF devices of a group; projections to and from
    latents are whole. Raises `ValueError` for heads and a feed-forward that they do not divide.
    """
    match name.split("."):
        case [*_, "qkv", "kernel"]:
            helix.check_kv_heads(int(name.split(".")[1]), shape[1])
            return Spec(None, helix.tpa_axes)
        case [*_, "qkv", "bias"]:
            return Spec(helix.tpa_axes)
        case [*_, "attention", "sinks"]:
            return Spec(helix.tpa_axes)
        case [*_, "attention", "down", "kernel"] | [*_, "experts", "down", "bias"]:
            return Spec()
        case [*_, "experts", "gate_up", "bias"]:
            return Spec(helix.ep_axes, None, helix.tpf_axes)
        case [*_, "experts", which, "kernel"]:
            gates, groups, group = which == "gate_up", helix.ep_axes, helix.tpf_axes
            _check_divides("n_routed_experts", shape[0], f"ep={helix.ep}", helix.ep)
            size, tpf = shape[-1 if gates else 1], helix.shares // helix.ep
            _check_divides("moe_intermediate_size", size, f"tpf={tpf}", tpf)
            return Spec(groups, None, None, group) if gates else Spec(groups, group)
        case [*_, "gate_up", leaf]:
            _check_shares(helix, "intermediate_size", shape[-1])
            return Spec(None, None, helix.axes) if leaf == "kernel" else Spec(None, helix.axes)
        case [*_, "down", "kernel"]:
            _check_shares(helix, "intermediate_size", shape[0])
            return Spec(helix.axes)
        case [*_, "out", "kernel"]:
            _check_shares(helix, "the query heads' channels", shape[0])
            return Spec(helix.axes)
        case ["embedding"] if shape[0] % helix.shares == 0:
            return Spec(helix.axes)
        case ["head", "kernel"] if shape[1] % helix.shares == 0:
            return Spec(None, helix.axes)
        case _:
            return Spec()


def _check_shares(helix: HelixConfig, name: str, size: int) -> None:
    _check_divides(name, size, f"kvp={helix.kvp} times tpa={helix.tpa}", helix.shares)


def _check_divides(name: str, size: int, settings: str, devices: int) -> None:
    if size % devices:
        raise ValueError(f"{name}={size} does not divide into {settings} devices; choose others")


def _map_nodes(of: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``of`` in the place of each model, cache and other leaf."""
    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, (Sharded, Cache)))
