"""Parameters of tests: which of them the default run has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def default_run(
    values: Mapping[str, Any] | Iterable[Any], *names: str, slow: Collection[str] = ()
) -> list[Any]:
    """``values`` as parameters of a test, all but those of ``names`` marked `exhaustive`.

    Args:
        values: what `pytest.mark.parametrize` takes, or such values by their names. A value
            without one has that of its attribute ``name`` or its text; a tuple those of its parts,
            joined by hyphens.
        names: of the values of the default run.
        slow: of values that are marked `slow` in place of `exhaustive`.
    """
    by_name = values if isinstance(values, Mapping) else {_name(value): value for value in values}
    missing = {*names, *slow} - by_name.keys()
    assert not missing, f"{sorted(missing)} are none of {list(by_name)}"
    marks = dict.fromkeys(by_name, pytest.mark.exhaustive)
    marks |= dict.fromkeys(slow, pytest.mark.slow)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name if isinstance(values, Mapping) else None,
            marks=[] if name in names else marks[name],
        )
        for name, value in by_name.items()
    ]


def _name(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "-".join(str(getattr(part, "name", part)) for part in parts)
