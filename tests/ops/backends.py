"""The backends of an operation as test parameters; one that refuses is a skip with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jspec.dispatch import Operation


def every_backend(operation: Operation) -> pytest.MarkDecorator:
    """Runs a test over all backends of ``operation``, by their names in ``backend``."""
    return pytest.mark.parametrize("backend", operation.backends)


def run_or_skip(function: Callable, operation: Operation, backend: str, *args: Any) -> Any:
    """``function(*args)``, the public face of ``operation``, by the backend of that name."""
    if reason := operation.backend(backend).supports(*args):
        pytest.skip(f"{backend}: {reason}")
    return function(*args, implementation=backend)
