"""The cache: keys, values, and further columns and pages that policies store."""

from jspec.cache.cache import Cache, Shards
from jspec.cache.layout import (
    Layout,
    LinearLayout,
    PagedLayout,
    RingLayout,
    Stripe,
    StripedLayout,
)
from jspec.cache.storage import HostStorage

__all__ = [
    "Cache",
    "HostStorage",
    "Layout",
    "LinearLayout",
    "PagedLayout",
    "RingLayout",
    "Shards",
    "Stripe",
    "StripedLayout",
]
