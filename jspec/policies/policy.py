"""The base class of policies: frozen settings with a few methods, most of which have a default."""

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

    Methods take ``policy_params``, which `prepare` made, from `jspec.Models`. A layer with a
    sliding window is read whole and keeps nothing for a policy: its methods are not called for it.

    Attributes:
        reads_queries: False promises that `select` ignores its query and returns None or ``[B,
            n]``: one selection then serves a whole draft.
        needs_arrays: Whether the policy cannot run without parameters.
        needs_keys: Whether the parameters depend on the keys of a sample text.
    """

    reads_queries: ClassVar[bool] = True
    needs_arrays: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    @property
    def layers_served(self) -> int:
        """How many layers read one selection: the layer that made it, and those after it."""
        return 1

    @property
    def moves_keys(self) -> bool:
        """Whether queries read a copy of the selected keys, moved by `moved`."""
        return False

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return 1

    def keeps_in(self, layer: int) -> bool:
        """Whether a layer has the policy's `columns` and `pages`; False where it never selects."""
        return True

    def columns(self, spec: LayerSpec) -> Shapes:
        """Shape and dtype, by name, of what a layer keeps per token in addition to key and value.

        A dtype of None is that of the keys.
        """
        return {}

    def in_host(self, layer: int) -> bool:
        """Whether the keys and values of a layer lie in the host's memory, and its columns on the
        device.

        Its `select` then scores by the columns alone, and returns ascending positions, never None.
        """
        return False

    def num_device_rows(self, layer: int, capacity: int) -> int:
        """How many rows of a layer in the host's memory stay on the device for the next step.

        All that `select` returns of ``capacity`` positions, or 0.
        """
        return 0

    def prefetch_policy(self, layer: int) -> Policy | None:
        """The policy that predicts what a layer in the host's memory reads; None for no prediction.

        It selects by queries that are nearly the layer's own. The rows are fetched while the layer
        before computes.
        """
        return None

    def pages(self, spec: LayerSpec) -> Shapes:
        """Shape and dtype, by name, of what a layer keeps per page of ``page_size`` positions."""
        return {}

    def prepare(self, specs: Sequence[LayerSpec], keys: Sequence[np.ndarray] | None) -> Any:
        """The ``policy_params`` that the other methods take, a pytree.

        Args:
            specs: The `LayerSpec` of each layer.
            keys: Keys of a sample text, float32 ``[M, K, H]`` per layer, or None.

        Raises:
            ValueError: Where ``keys`` is None and the policy needs them.
        """
        return None

    def prepare_for(self, model: Model, keys: Sequence[np.ndarray] | None) -> Any:
        """What `jspec.policies.prepare_params` returns: `prepare`, unless it needs the model."""
        return self.prepare(model.config.layers, keys)

    def encode(self, policy_params: Any, layer: int, k: Array) -> dict[str, Array]:
        """The `columns` of new tokens, ``[B, T, ...]``, from their keys ``k [B, T, K, H]``."""
        return {}

    def encode_values(self, policy_params: Any, layer: int, v: Array) -> dict[str, Array]:
        """Further `columns` of new tokens, from their values ``v [B, T, K, value size]``."""
        return {}

    def codes_by(self, policy_params: Any, layer: int) -> Array | None:
        """The matrices ``[K, H, R]`` of `jspec.ops.hash_encode` for the only column, ``codes``.

        None where `encode` does anything else. Otherwise the codes are made as the keys are
        written.
        """
        return None

    def fold(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        before: Array,
        after: Array,
        max_new: int,
    ) -> dict[str, Array]:
        """The `pages` of a layer once positions ``before`` to ``after - 1`` are committed.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache, with the pages of before.
            before: int32 ``[B]``: committed positions per row before.
            after: int32 ``[B]``: committed positions per row now; a row with ``after <= before``
                has none that are new.
            max_new: Most new positions of a row.
        """
        return cache.pages[layer]

    def select(
        self, policy_params: Any, layer: int, cache: Cache, q: Array | None, context_len: Array
    ) -> Array | None:
        """The committed positions that queries read in a layer.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache.
            q: ``[B, T, N, H]``: the queries; None where ``reads_queries`` is False.
            context_len: int32 ``[B]``: committed positions per row. Positions from there on, the
                query's own among them, are always read.

        Returns:
            int32 ``[B, n]``, shared by all heads, or ``[B, K, n]``: positions below
            ``context_len``, each once, -1 for none. None reads all of them.
        """
        raise NotImplementedError

    def read_as(self, policy_params: Any, layer: int, cache: Cache) -> dict[str, Array] | None:
        """``keys`` and ``values`` of a layer's slots as queries read them, None for cached ones.

        Called where `select` returns None. Positions after the committed context are read from the
        cache.
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
        """The log-weights of the positions ``chosen`` that `select` returned for the queries ``q``.

        float32 ``[B, T, N, n]``, as `jspec.ops.gathered_attention` takes them; None weighs all
        equally. It is not called for layers that read the selection of another one.
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

        It must equal `encode`, `select` and attention over the selection and the new positions;
        these run one by one where it returns None. It is not called for layers whose keys lie in
        the host's memory or on several devices, nor for those that read the selection of another
        one.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache without the token.
            q: ``[B, 1, N, H]``: queries, before ``qk_rope`` norms and rotates them.
            k: ``[B, 1, K, H]``: keys, before ``qk_rope`` norms and rotates them.
            v: ``[B, 1, K, H']``: values.
            qk_rope: Norms and rotates queries and keys.
            positions: int32 ``[B, 1]``: positions of the token.
            context_len: int32 ``[B]``: committed positions per row.
            num_new: How many positions from ``context_len`` on are read, up to the token's own.
            backends: Named backends of operations.

        Returns:
            The output, its log-sum-exp, the selection, and the cache with the token; or None.
        """
        return None


def encoded(
    policy: Policy, policy_params: Any, layer: int, k: Array, v: Array | None
) -> dict[str, Array]:
    """The columns of new tokens with keys ``k`` and values ``v``, None if these are in the keys."""
    more = {} if v is None else policy.encode_values(policy_params, layer, v)
    return policy.encode(policy_params, layer, k) | more


def columns_of(policy: Policy, layer: int, spec: LayerSpec) -> Shapes:
    """Shape and dtype of the columns that ``policy`` keeps in a layer."""
    return policy.columns(spec) if _keeps_in(policy, layer, spec) else {}


def pages_of(policy: Policy, layer: int, spec: LayerSpec) -> Shapes:
    """Shape and dtype of the pages that ``policy`` keeps in a layer."""
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
    """An empty `Cache` with the columns and pages of ``policy``.

    Raises `ValueError` for a policy that keeps keys and values in the host's memory where there is
    none, and where the positions of a layout are not in order.
    """
    columns, pages = (functools.partial(shapes_of, policy) for shapes_of in (columns_of, pages_of))
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
    policy: Policy, policy_params: Any, cache: Cache, before: Array, after: Array, max_new: int
) -> Cache:
    """The cache once positions ``before [B]`` to ``after - 1`` are committed: ``max_new`` at most.

    Raises `ValueError` where the cache was made for another policy.
    """
    pages_by_layer = cache.pages or ({},) * len(cache.specs)
    for layer, (spec, layer_pages) in enumerate(zip(cache.specs, pages_by_layer, strict=True)):
        if layer_pages.keys() != (expected := pages_of(policy, layer, spec)).keys():
            raise ValueError(
                f"layer {layer} keeps pages {sorted(layer_pages)}, but {type(policy).__name__} "
                f"keeps {sorted(expected)}; start decoding with the config of its steps"
            )
    pages = tuple(
        policy.fold(policy_params, layer, cache, before, after, max_new)
        if layer_pages
        else layer_pages
        for layer, layer_pages in enumerate(pages_by_layer)
    )
    return dataclasses.replace(cache, pages=pages) if any(pages) else cache
