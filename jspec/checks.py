"""Checks of settings; all raise `ValueError` with the name and the value."""

from __future__ import annotations

import difflib
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 8  # items of a list or an object in a message
_LINE = 80  # characters of a value in a message


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with ``message`` unless ``condition``."""
    if not condition:
        raise ValueError(message)


def suggestion(name: str, names: Iterable[str]) -> str:
    """`` (did you mean ...?)`` with the one of ``names`` nearest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {close[0]}?)" if close else ""


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
        require(valid, f"{name}={shown(value)} must be a positive int32")


def check_numbers(setting: Any, *names: str) -> None:
    """Raise unless each of the fields ``names`` of ``setting`` is positive and finite."""
    for name in names:
        value = getattr(setting, name)
        valid = is_number(value) and value > 0
        require(valid, f"{name}={shown(value)} must be a positive, finite number")


def check_flags(setting: Any, *names: str) -> None:
    """Raise unless each of the fields ``names`` of ``setting`` is a bool."""
    for name in names:
        value = getattr(setting, name)
        require(type(value) is bool, f"{name}={shown(value)} must be True or False")


def present_fields(setting: Any, *names: str) -> tuple[str, ...]:
    """Those of the fields ``names`` of ``setting`` that are not None."""
    return tuple(name for name in names if getattr(setting, name) is not None)


def whole_number(value: Any) -> int | None:
    """``value`` as an int, also from numpy; None for anything else, bools and floats included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as token ids. Raises `ValueError`, by ``name``, for anything but a list of them."""
    listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    ids = tuple(map(whole_number, value)) if listed else (None,)
    known = tuple(token for token in ids if token is not None and 0 <= token < 2**31)
    require(
        len(known) == len(ids),
        f"{name}={shown(value)} must be token ids, whole numbers below 2**31, as in (2, 7)",
    )
    return known


def shown(value: Any) -> str:
    """``value`` as Python writes it, on one line of at most 80 characters.

    For arguments, and for what files say: line breaks and escape sequences are spelled out.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _LINE
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = _SHOWN
    short.maxlevel = 4
    try:
        text = " ".join(short.repr(value).split())
    except ValueError:  # Python prints no int of thousands of digits
        return f"{type(value).__name__} of thousands of digits"
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."
