"""What every policy is: frozen settings with a few methods, of which most policies write one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jspec.cache import Cache, LinearLayout
from jspec.cache.cache import Shapes
from jspec.cache.layout import Layout
from jspec.config import LayerSpec
from jspec.ops.append import QKRope
from jspec.sharding import Placing
from jspec.typing import Array, Model


@dataclasses.dataclass(frozen=True)
class Policy:
    """A sparse view of the cache. Subclasses are frozen dataclasses of settings.

    ``policy_params`` are what `prepare` made, from `jspec.Models`; a policy with ``needs_arrays``
    cannot do without. With ``needs_keys=False`` they do not depend on the keys of a sample text.
    ``reads_queries=False`` promises that `select` ignores its query and gives None or ``[B, n]``:
    one selection then serves a whole draft. A layer with a sliding window is read whole, and keeps
    nothing for a policy: its methods are not asked about it.
    """

    reads_queries: ClassVar[bool] = True
    needs_arrays: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    @property
    def layers_served(self) -> int:
        """How many layers read one selection: the one that made it, and those behind it."""
        return 1

    @property
    def moves_keys(self) -> bool:
        """Whether queries read what was selected as `moved` says, in a copy."""
        return False

    @property
    def page_size(self) -> int:
        """Positions of a page of `pages`."""
        return 1

    def keeps_in(self, layer: int) -> bool:
        """Whether a layer keeps `columns` and `pages`: not where it never selects."""
        return True

    def columns(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each token beside its key and value: shape and dtype by name.

        A dtype of None is that of the keys.
        """
        return {}

    def in_host(self, layer: int) -> bool:
        """Whether the keys and values of a layer lie in the host's memory, its columns apart.

        Its `select` then scores by the columns alone, and gives ascending positions, never None.
        """
        return False

    def num_device_rows(self, layer: int, capacity: int) -> int:
        """How many rows of such a layer stay on the device for the next step: all that `select`
        gives of ``capacity`` positions, or 0."""
        return 0

    def prefetch_policy(self, layer: int) -> Policy | None:
        """The policy that predicts what such a layer reads, by queries that are nearly its own.

        What it selects is fetched while the layer before computes. None predicts nothing.
        """
        return None

    def pages(self, spec: LayerSpec) -> Shapes:
        """What a layer keeps of each page of ``page_size`` positions: shape and dtype by name."""
        return {}

    def prepare(self, specs: Sequence[LayerSpec], keys: Sequence[np.ndarray] | None) -> Any:
        """The ``policy_params`` that the other methods take, a pytree.

        ``keys``: those of a sample text, float32 ``[M, K, H]`` a layer, or None. Raises
        `ValueError` where the policy cannot do without.
        """
        return None

    def prepare_for(self, model: Model, keys: Sequence[np.ndarray] | None) -> Any:
        """What `jspec.prepare` gives: `prepare`, unless the policy needs more of the model."""
        return self.prepare(model.config.layers, keys)

    def encode(self, policy_params: Any, layer: int, k: Array) -> dict[str, Array]:
        """The `columns` of new tokens, ``[B, T, ...]``, from their keys ``k [B, T, K, H]``."""
        return {}

    def encode_values(self, policy_params: Any, layer: int, v: Array) -> dict[str, Array]:
        """More of the `columns` of new tokens, from their values ``v [B, T, K, value size]``."""
        return {}

    def codes_by(self, policy_params: Any, layer: int) -> Array | None:
        """The matrices ``[K, H, R]`` of which `jspec.hash_encode` makes the only column, ``codes``.

        None where `encode` does something else. The codes are then made as the keys are written.
        """
        return None

    def fold(
        self, policy_params: Any, layer: int, cache: Cache, before: Array, after: Array, most: int
    ) -> dict[str, Array]:
        """The `pages` of a layer once positions ``before [B]`` to ``after - 1 [B]`` are committed.

        These are at most ``most`` a row, and none where ``after <= before``.
        """
        return cache.pages[layer]

    def select(
        self, policy_params: Any, layer: int, cache: Cache, q: Array | None, context_len: Array
    ) -> Array | None:
        """The positions that the queries ``q [B, T, N, H]`` read in a layer.

        They are below ``context_len [B]``: int32 ``[B, n]``, shared by all heads, or ``[B, K, n]``;
        each once, -1 for none. None reads all of them. Positions from ``context_len`` on, the
        query's own among them, are always read.
        """
        raise NotImplementedError

    def read_as(self, policy_params: Any, layer: int, cache: Cache) -> dict[str, Array] | None:
        """``keys`` and ``values`` of a layer's slots as queries read them, None for as they are.

        Asked where `select` gives None; what follows the committed context is read as it is.
        """
        return None

    def moved(
        self, policy_params: Any, layer: int, k: Array, chosen: Array, context_len: Array
    ) -> Array:
        """The keys ``k [B, n, K, H]`` of the positions ``chosen [B, n]`` as queries read them."""
        return k

    def weigh(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array,
        context_len: Array,
        chosen: Array,
    ) -> Array | None:
        """The log-weights of the positions ``chosen`` that `select` gave for the queries ``q``.

        float32 ``[B, T, N, n]``, as `jspec.gathered_attention` takes them; None weighs all alike.
        Layers that read the selection of another one are not asked.
        """
        return None

    def attend_token(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array,
        k: Array,
        v: Array,
        qk_rope: QKRope,
        positions: Array,
        context_len: Array,
        num_new: int,
        backends: Mapping[str, str],
    ) -> tuple[Array, Array, Array, Cache] | None:
        """A layer's whole attention for one new token, where the policy has one operation for it.

        ``q [B, 1, N, H]``, ``k [B, 1, K, H]`` and ``v [B, 1, K, H']`` at ``positions [B, 1]``,
        before ``qk_rope`` norms and rotates them. Returns the output and its log-sum-exp, what
        `select` gives for these queries, and the cache with the new token: all as `encode`,
        `select` and attention over it and the ``num_new`` positions from ``context_len [B]`` on
        give them, which run one by one for None. ``backends``: named ones, of operations. Layers
        whose keys lie elsewhere, and those that read the selection of another one, are not asked.
        """
        return None


def encoded(
    policy: Policy, policy_params: Any, layer: int, k: Array, v: Array | None
) -> dict[str, Array]:
    """What ``policy`` keeps of new tokens with keys ``k`` and values ``v``, None if in the keys."""
    more = {} if v is None else policy.encode_values(policy_params, layer, v)
    return policy.encode(policy_params, layer, k) | more


def columns_of(policy: Policy, layer: int, spec: LayerSpec) -> Shapes:
    """What ``policy`` keeps of each token in a layer."""
    return policy.columns(spec) if _keeps_in(policy, layer, spec) else {}


def pages_of(policy: Policy, layer: int, spec: LayerSpec) -> Shapes:
    """What ``policy`` keeps of each page in a layer."""
    return policy.pages(spec) if _keeps_in(policy, layer, spec) else {}


def _keeps_in(policy: Policy, layer: int, spec: LayerSpec) -> bool:
    return spec.window is None and policy.keeps_in(layer)


def create_cache(
    policy: Policy,
    specs: Sequence[LayerSpec],
    layouts: Sequence[Layout],
    batch: int,
    dtype: Any,
    sharding: Placing = None,
) -> Cache:
    """An empty `Cache` with what ``policy`` keeps beside keys and values.

    Raises `ValueError` for a policy that keeps keys and values in the host's memory where there is
    none, and where the positions of a layout do not lie in order.
    """
    columns, pages = (functools.partial(kept, policy) for kept in (columns_of, pages_of))
    host = [i for i, x in enumerate(specs) if x.window is None and policy.in_host(i)]
    for layer in host:
        if not isinstance(layouts[layer], LinearLayout):
            raise ValueError(
                f"{type(policy).__name__} keeps layer {layer} in host memory, where positions lie "
                f"in order, not as {layouts[layer]}; take a policy that keeps it on the device"
            )
    return Cache.create(
        *(specs, layouts, batch, dtype, columns, sharding),
        pages=pages,
        page=policy.page_size,
        host=host,
    )


def with_pages(
    policy: Policy, policy_params: Any, cache: Cache, before: Array, after: Array, most: int
) -> Cache:
    """The cache once positions ``before [B]`` to ``after - 1``, at most ``most``, are committed."""
    held = cache.pages or ({},) * len(cache.specs)
    for layer, (spec, own) in enumerate(zip(cache.specs, held, strict=True)):
        if own.keys() != (wanted := pages_of(policy, layer, spec)).keys():
            raise ValueError(
                f"layer {layer} keeps pages {sorted(own)}, but {type(policy).__name__} keeps "
                f"{sorted(wanted)}; start decoding with the config of its steps"
            )
    pages = tuple(
        policy.fold(policy_params, layer, cache, before, after, most) if own else own
        for layer, own in enumerate(held)
    )
    return dataclasses.replace(cache, pages=pages) if any(pages) else cache
