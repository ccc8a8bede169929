"""Predictions of times that ``python -m bench`` measured and that no constant is fitted to.

These are attention with its exchange on several devices, and whole steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jspec.helix.simulator.configurations import STRATEGIES, Configurations
from jspec.helix.simulator.cost import Constants, attention_seconds, step_times
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_shape
from jspec.models.files import INTEGER_LIMIT, read_json


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A measured time and the simulator's prediction of it, in microseconds."""

    name: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted_us / self.measured_us - 1


def predictions(
    path: str | Path, hardware: Hardware, constants: Constants
) -> tuple[Prediction, ...]:
    """Predict the steps and the layers of a result of ``python -m bench helix``.

    Rows that the simulator does not model are left out: speculation, gathered queries, and latents
    whose values are projected after the exchange.

    Args:
        path: the JSON file.
        hardware: rates of the machine.
        constants: constants of the cost model.

    Raises:
        ValueError: the file holds no such result.
    """
    result = read_json(Path(path))
    try:
        results = [
            _prediction(row, PREDICTED[row["operation"]](row["case"], hardware, constants))
            for row in result["rows"]
            if row.get("step_ns") and row["operation"] in PREDICTED and _is_known(row["case"])
        ]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} has no times of steps or attention: {type(error).__name__}: {error!s:.200}; "
            f"write them with python -m bench helix --json FILE --case op=step or op=layer"
        ) from None
    return tuple(results)


def _prediction(row: dict[str, Any], seconds: float) -> Prediction:
    case = row["case"]
    what = f"{case['heads']} heads" if "heads" in case else case["shape"]
    what += f", latent {case['latent']}" if case.get("latent") else ""
    sizes = f"B={case['B']}, S={case['S']}, kvp={case['kvp']}, tpa={case['tpa']}"
    measured = statistics.median(map(float, row["step_ns"])) / 1e3
    if not 0 < measured < math.inf:
        raise ValueError(f"{sizes}: {measured:g} us must be above 0 and finite")
    return Prediction(f"{row['name']}, {what}, {sizes}", measured, 1e6 * seconds)


def _is_known(case: dict[str, Any]) -> bool:
    plain = case.get("draft", "plain") == "plain" and case.get("T", 1) == 1
    whole = case.get("part", "layer") == "layer" and case["overlap"] == 1
    projected = not case.get("latent") or case["kvp"] == 1 or case["up"] == "before"
    return (
        plain and whole and case["strategy"] != "gather" and (projected or case["strategy"] == "tp")
    )


def _layout(case: dict[str, Any]) -> Configurations:
    """The layout of a case's devices; on one axis where they do not split rows."""
    for name in ("B", "S", "kvp", "tpa"):
        if type(case[name]) is not int or not 1 <= case[name] <= INTEGER_LIMIT:
            raise ValueError(f"{name}={case[name]!s:.20} must be a whole number, at least 1")
    kvp, tpa, strategy = case["kvp"], case["tpa"], case["strategy"]
    if strategy == "tp" or (strategy == "helix" and kvp == 1):
        kvp, tpa, strategy = 1, kvp * tpa, "tp"
    width = tpa if strategy == "medha" else kvp * tpa
    fields = {"strategy": STRATEGIES.index(strategy), "kvp": kvp, "tpa": tpa, "tpf": width}
    fields |= {"dp": 1, "ep": 1, "pp": 1, "batch": case["B"], "overlap": 0}
    return Configurations(**{name: np.array([x]) for name, x in fields.items()})


def _step(case: dict[str, Any], hardware: Hardware, constants: Constants) -> float:
    shape = load_shape(case["shape"])
    return float(step_times(shape, hardware, _layout(case), case["S"], constants).total[0])


def _attention(case: dict[str, Any], hardware: Hardware, constants: Constants) -> float:
    heads, kv_heads = map(int, case["heads"].split("/"))
    latent = case["latent"]
    sizes = {"latent": latent, "rope": case["H"] - latent, "nope": 1, "value_size": latent // 4}
    shape = ModelShape(
        *("attention", 1, 1, heads, kv_heads, case["H"], 1, 1), **(sizes if latent else {})
    )
    return float(attention_seconds(shape, hardware, _layout(case), case["S"], constants)[0])


PREDICTED: dict[str, Callable[[dict[str, Any], Hardware, Constants], float]] = {
    "step": _step,
    "attend": _attention,
}

__all__ = ["Prediction", "predictions"]
