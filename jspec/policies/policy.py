"""The base class of policies: frozen settings with a few methods, most of which have a default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jspec.cache import Cache, LinearLayout
from jspec.cache.cache import Shapes
from jspec.cache.layout import Layout
from jspec.cache.storage import HostStorage
from jspec.config import LayerSpec, refuse_class, shown
from jspec.ops.hash import hash_encode
from jspec.policies.selection import NewTokens, Selection
from jspec.sharding import Placing
from jspec.typing import Array, Model

# Returns the keys of a sample text, float32 [M, K, H] per layer.
SampleKeys = Callable[[], Sequence[np.ndarray]]
# Maps keys [B, T, K, H] and values [B, T, K, H'] of new tokens, None where these are part of the
# keys, to the policy's columns of these tokens by name.
Encoder = Callable[[Array, Array | None], Mapping[str, Array]]


@dataclasses.dataclass(frozen=True)
class HashEncoder:
    """The encoder of the one column ``codes``: `jspec.ops.hash_encode` of the keys.

    An append may encode in the kernel that writes the keys.

    Attributes:
        matrices: ``[K, H, R]``: the hash matrices.
    """

    matrices: Array

    def __call__(self, k: Array, v: Array | None) -> dict[str, Array]:
        return {"codes": hash_encode(k, self.matrices)}


class Pages(NamedTuple):
    """What a policy stores per page of neighbouring positions in a layer.

    Attributes:
        size: Positions of a page, the same in all layers.
        shapes: Shape and dtype of a page's entry by name; a dtype of None is that of the keys.
        fold: ``fold(policy_params, layer, cache, before, after, max_new)`` returns the layer's
            pages ``[B, P, ...]`` by name once positions ``before`` to ``after - 1``, int32 ``[B]``,
            are committed. ``cache`` has the pages of before. At most ``max_new`` positions of a row
            are new; a row with ``after <= before`` has none.
    """

    size: int
    shapes: Shapes
    fold: Callable[[Any, int, Cache, Array, Array, int], Mapping[str, Array]]


class TokenAttention(NamedTuple):
    """A layer's attention for one new token.

    Attributes:
        out: The output ``[B, 1, N, H']``.
        lse: Its log-sum-exp ``[B, 1, N]``, float32.
        selection: What was selected.
        cache: The cache with the token.
    """

    out: Array
    lse: Array
    selection: Selection
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Policy:
    """A sparse view of the cache. Subclasses are frozen dataclasses of settings.

    Methods take ``policy_params``, which `prepare` made, from `jspec.Models`. A layer with a
    sliding window is read whole and stores nothing for a policy: no method is called for it.

    Attributes:
        runs_on_mesh: Whether `select` also selects on a device that has some of a row's positions
            only, as a `jspec.cache.Stripe` lays them out. Of the positions that it returns a
            device reads those that it has.
        reads_queries: False promises that `select` ignores its query and returns positions of None
            or ``[B, n]``: one selection then serves a whole draft.
        storage: Which layers have their keys and values in host memory; None for no layer. `select`
            then scores by the policy's columns alone, and returns ascending positions, never None.
    """

    runs_on_mesh: ClassVar[bool] = False
    reads_queries: ClassVar[bool] = True

    @property
    def storage(self) -> HostStorage | None:
        return None

    def prepare(self, model: Model, sample_keys: SampleKeys | None) -> Any:
        """The ``policy_params`` that the other methods take, a pytree; None if it needs none.

        Args:
            model: The target.
            sample_keys: Returns the keys of a sample text, float32 ``[M, K, H]`` per layer; None
                where there is no sample.

        Raises:
            ValueError: Where ``sample_keys`` is None and the policy needs them.
        """
        return None

    def columns(self, layer: int, spec: LayerSpec) -> Shapes:
        """Shape and dtype, by name, of what a layer stores per token in addition to key and value.

        A dtype of None is that of the keys. Empty where the policy never selects in the layer.
        """
        return {}

    def encoder(self, policy_params: Any, layer: int) -> Encoder:
        """The function that computes the `columns` of new tokens from their keys and values."""
        return lambda k, v: {}

    def pages(self, layer: int, spec: LayerSpec) -> Pages | None:
        """What a layer stores per page of positions, computed as positions are committed."""
        return None

    def select(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        q: Array | None,
        context_len: Array,
        budget_share: float = 1.0,
    ) -> Selection:
        """The committed positions that queries read in a layer.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache.
            q: ``[B, 1, N, H]``: the queries of the pass's first token; None where `reads_queries`
                is False.
            context_len: int32 ``[B]``: committed positions per row. Positions from there on, the
                query's own among them, are always read.
            budget_share: The share of the policy's budget to select, where it has one: below 1 to
                prefetch what a later call is likely to select.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have a method "
            "select(policy_params, layer, cache, q, context_len, budget_share)"
        )

    def attend_token(
        self,
        policy_params: Any,
        layer: int,
        cache: Cache,
        token: NewTokens,
        context_len: Array,
        num_uncommitted: int,
    ) -> TokenAttention | None:
        """A layer's whole attention for one new token, where the policy has one operation for it.

        It must equal the append, `encoder`, `select` and attention over the selection and the new
        positions; these run one by one where it returns None. It is called where slots are
        positions (`LinearLayout`), and not for layers in host memory, in blocks, with a sliding
        window or on several devices, nor for those that read the selection of another layer.

        Args:
            policy_params: What `prepare` made.
            layer: The layer's index.
            cache: The cache without the token.
            token: The token's projections, T = 1, neither normed nor rotated.
            context_len: int32 ``[B]``: committed positions per row.
            num_uncommitted: How many positions from ``context_len`` on are read, whatever is
                selected: those that earlier passes of the draft wrote, and the token's own.

        Returns:
            The attention, or None.
        """
        return None


def check_policy(name: str, value: Any) -> None:
    """Raise `TypeError` for a value that is no policy, with what was probably meant."""
    refuse_class(name, value)
    if not isinstance(value, Policy):
        named = "pass jspec.policies.named_policy(...)"
        way_out = named if isinstance(value, str) else "as Quest() is one"
        raise TypeError(f"{name}={shown(value)} must be a policy; {way_out}")


def select_with(policy: Policy, *args: Any, **settings: Any) -> Selection:
    """What `Policy.select` returns. Raises `TypeError` where that is no `Selection`."""
    result = policy.select(*args, **settings)
    if not isinstance(result, Selection):
        wrong = type(result).__name__
        raise TypeError(f"{type(policy).__name__}.select must return a Selection, not {wrong}")
    return result


def needs_params(policy: Policy, model: Model) -> bool:
    """Whether ``policy`` cannot run with ``policy_params=None`` on ``model``."""
    try:
        return policy.prepare(model, None) is not None
    except ValueError:
        return True


def columns_of(policy: Policy, layer: int, spec: LayerSpec) -> Shapes:
    """Shape and dtype of the columns that ``policy`` stores in a layer."""
    return {} if spec.window is not None else policy.columns(layer, spec)


def pages_of(policy: Policy, layer: int, spec: LayerSpec) -> Pages | None:
    """The pages that ``policy`` stores in a layer."""
    return None if spec.window is not None else policy.pages(layer, spec)


def create_cache(
    policy: Policy,
    specs: Sequence[LayerSpec],
    layouts: Sequence[Layout],
    batch: int,
    dtype: Any,
    sharding: Placing = None,
) -> Cache:
    """An empty `Cache` with the columns, the pages and the storage of ``policy``.

    Raises:
        ValueError: For a policy that keeps keys and values in host memory where there is none, and
            where the positions of a layout are not in order.
    """
    storage = policy.storage
    host_layers = () if storage is None else storage.layers(specs)
    for layer in host_layers:
        if not isinstance(layouts[layer], LinearLayout):
            raise ValueError(
                f"{type(policy).__name__} keeps layer {layer} in host memory, where positions lie "
                f"in order, not as {layouts[layer]}; take a policy that keeps it on the device"
            )
    pages = [pages_of(policy, layer, spec) for layer, spec in enumerate(specs)]
    return Cache.create(
        *(specs, layouts, batch, dtype),
        extra=lambda layer, spec: columns_of(policy, layer, spec),
        sharding=sharding,
        pages=lambda layer, spec: page.shapes if (page := pages[layer]) else {},
        page=next((page.size for page in pages if page), 1),
        storage=storage,
    )


def with_pages(
    policy: Policy, policy_params: Any, cache: Cache, before: Array, after: Array, max_new: int
) -> Cache:
    """The cache once positions ``before [B]`` to ``after - 1`` are committed: ``max_new`` at most.

    Raises `ValueError` where the cache was made for another policy.
    """
    pages_by_layer = cache.pages or ({},) * len(cache.specs)
    folded = []
    for layer, (spec, layer_pages) in enumerate(zip(cache.specs, pages_by_layer, strict=True)):
        pages = pages_of(policy, layer, spec)
        if layer_pages.keys() != (expected := pages.shapes if pages else {}).keys():
            raise ValueError(
                f"layer {layer} keeps pages {sorted(layer_pages)}, but {type(policy).__name__} "
                f"keeps {sorted(expected)}; start decoding with the config of its steps"
            )
        arguments = (policy_params, layer, cache, before, after, max_new)
        folded.append(dict(pages.fold(*arguments)) if pages else layer_pages)
    return dataclasses.replace(cache, pages=tuple(folded)) if any(folded) else cache
