"""The cache of keys, values and what policies keep beside them."""

from jspec.cache.cache import Cache, Shards
from jspec.cache.layout import Layout, Linear, Ring, Stripe, Striped

__all__ = ["Cache", "Layout", "Linear", "Ring", "Shards", "Stripe", "Striped"]
