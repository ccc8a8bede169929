"""Operations: each module has the signature, the checks, the reference, cases and backends."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
