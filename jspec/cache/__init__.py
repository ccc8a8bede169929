"""The cache: keys, values, and further columns and pages that policies keep."""

from jspec.cache.cache import Cache, Shards
from jspec.cache.layout import Layout, LinearLayout, RingLayout, Stripe, StripedLayout

__all__ = ["Cache", "Layout", "LinearLayout", "RingLayout", "Shards", "Stripe", "StripedLayout"]
