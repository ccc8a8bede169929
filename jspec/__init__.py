"""jspec: fast, lossless long-context decoding in JAX.

The public names, which `__init__.pyi` lists, are loaded on first use, so that importing jspec costs
nothing and touches no device.
"""

import lazy_loader as _lazy

__version__ = "0.2.0.dev0"
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
