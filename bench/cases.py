"""Cases of a suite by `--case`, as in ``--case B=4,S=128K,heads=32/8,T=10``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

Case = dict[str, Any]  # sizes by their letters, and words


def parse(
    text: str,
    default: Mapping[str, Any],
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Case:
    """The default case updated by the options of ``text``, as in ``B=4,S=128K``; 1K is 1024.

    Args:
        text: options separated by commas; empty for the default case.
        default: every option and its default value.
        choices: the words that an option can be.

    Raises:
        ValueError: for an option that is not in ``default``, or a value that it cannot have.
    """
    case = dict(default)
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in case:
            raise ValueError(f"{part!r} must be one of {', '.join(default)}, a = and a value")
        case[key] = _value(key, value, default[key], choices)
    if "heads" in case:
        query_heads, kv_heads = heads(case)
        if query_heads % kv_heads:
            raise ValueError(f"heads={case['heads']}: {query_heads} is no multiple of {kv_heads}")
    return case


def _value(
    key: str, value: str, default: Any, choices: Mapping[str, tuple[str, ...]]
) -> int | float | str | tuple[int, ...]:
    if key in choices:
        if value not in choices[key]:
            raise ValueError(f"{key}={value} must be one of {', '.join(choices[key])}")
        return value
    if key == "heads":
        if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", value):
            raise ValueError(f"heads={value} must be query heads / KV heads, such as 32/8")
        return value
    if isinstance(default, float):
        if not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", value):
            raise ValueError(f"{key}={value} must be a share from 0 to 1, such as 0.9")
        return float(value)
    if isinstance(default, tuple):
        if not re.fullmatch(r"[1-9]\d*(/[1-9]\d*)*", value):
            raise ValueError(f"{key}={value} must be whole numbers of 1 or more, such as 32/8")
        return tuple(map(int, value.split("/")))
    if not re.fullmatch(r"[1-9]\d*K?", value):
        raise ValueError(f"{key}={value} must be a whole number of 1 or more, such as 8 or 32K")
    return int(value.removesuffix("K")) * (1024 if value.endswith("K") else 1)


def product(**options: Sequence[Any]) -> list[str]:
    """Every combination of the values of some options, each as the text of a case."""
    values = itertools.product(*options.values())
    return [",".join(map("{}={}".format, options, combination)) for combination in values]


def heads(case: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of query heads N and KV heads K."""
    query_heads, kv_heads = map(int, case["heads"].split("/"))
    return query_heads, kv_heads


def kilo(size: int) -> str:
    """Format a number of slots, as in 32K for 32768."""
    return f"{size // 1024}K" if size % 1024 == 0 and size else str(size)
