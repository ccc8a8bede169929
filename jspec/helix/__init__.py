"""Helix parallelism: attention over KVP x TPA devices, the feed-forward over the same ones.

Bhatia et al. 2025 (arXiv 2507.07120). `HelixConfig` says how many devices there are, `load_model`
and `shard` put a model there, `Hosts` joins the processes of several hosts, and
`jspec.helix.simulator` tells what other layouts could serve. Names are loaded on first use: the
simulator needs no JAX.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.helix.cache import cache_specs, layouts_on, part_of, whole_of
    from jspec.helix.hosts import Hosts
    from jspec.helix.mesh import HelixConfig
    from jspec.helix.sharded import Sharded, load_model, shard

_HOMES = {
    "jspec.helix.cache": ["cache_specs", "layouts_on", "part_of", "whole_of"],
    "jspec.helix.hosts": ["Hosts"],
    "jspec.helix.mesh": ["HelixConfig"],
    "jspec.helix.sharded": ["Sharded", "load_model", "shard"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "HelixConfig",
    "Hosts",
    "Sharded",
    "cache_specs",
    "layouts_on",
    "load_model",
    "part_of",
    "shard",
    "whole_of",
]


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOME_OF[name]), name)
