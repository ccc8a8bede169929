"""The backends and the cases of an operation as test parameters.

A backend that refuses is a skip with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jspec.dispatch import Case, Operation


def every_backend(operation: Operation) -> pytest.MarkDecorator:
    """Runs a test over all backends of ``operation``, by their names in ``backend``."""
    return pytest.mark.parametrize("backend", operation.backends)


def every_case(
    operation: Operation, selects: Callable[[Case], bool] = lambda case: True
) -> pytest.MarkDecorator:
    """Runs a test over the cases of ``operation`` that are wanted, given as ``case``."""
    cases = list(filter(selects, operation.cases()))
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def run_or_skip(function: Callable, operation: Operation, backend: str, *args: Any) -> Any:
    """``function(*args)``, the public face of ``operation``, by the backend of that name.

    Jitted: the primitives of an eager reference are a program each.
    """
    if reason := operation.backend(backend).supports(*args):
        pytest.skip(f"{backend}: {reason}")
    return jax.jit(functools.partial(function, implementation=backend))(*args)
