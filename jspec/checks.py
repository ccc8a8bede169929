"""Checks of settings; all raise `ValueError` with the name and the value."""

from __future__ import annotations

from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with ``message`` unless ``condition``."""
    if not condition:
        raise ValueError(message)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, and no bool."""
    # Comparing never turns a huge int into a float, as math.isfinite does.
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and -1e300 < value < 1e300


def check_sizes(setting: Any, *names: str) -> None:
    """Raise unless each of the fields ``names`` of ``setting`` is a positive int32."""
    for name in names:
        value = getattr(setting, name)
        valid = type(value) is int and 1 <= value < 2**31
        require(valid, f"{name}={value!r:.80} must be a positive int32")


def check_numbers(setting: Any, *names: str) -> None:
    """Raise unless each of the fields ``names`` of ``setting`` is positive and finite."""
    for name in names:
        value = getattr(setting, name)
        valid = is_number(value) and value > 0
        require(valid, f"{name}={value!r:.80} must be a positive, finite number")


def check_flags(setting: Any, *names: str) -> None:
    """Raise unless each of the fields ``names`` of ``setting`` is a bool."""
    for name in names:
        value = getattr(setting, name)
        require(type(value) is bool, f"{name}={value!r:.80} must be True or False")


def present_fields(setting: Any, *names: str) -> tuple[str, ...]:
    """Those of the fields ``names`` of ``setting`` that are not None."""
    return tuple(name for name in names if getattr(setting, name) is not None)
