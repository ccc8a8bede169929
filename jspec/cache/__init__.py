"""The cache of keys, values and what policies keep beside them."""

from jspec.cache.cache import Cache, Shards
from jspec.cache.layout import Layout, LinearLayout, RingLayout, Stripe, StripedLayout

__all__ = ["Cache", "Layout", "LinearLayout", "RingLayout", "Shards", "Stripe", "StripedLayout"]
