"""The cache of keys, values and what policies keep beside them."""

from jspec.cache.cache import Cache
from jspec.cache.layout import Layout, Linear, Ring, Striped

__all__ = ["Cache", "Layout", "Linear", "Ring", "Striped"]
