"""Helix parallelism: attention over KVP x TPA devices, the feed-forward over the same ones.

Bhatia et al. 2025 (arXiv 2507.07120). `HelixConfig` says how many devices there are, `load_model`
and `shard` put a model there, `Hosts` joins the processes of several hosts, and
`jspec.helix.simulator` tells what other layouts could serve. Names are loaded on first use: the
simulator needs no JAX.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
