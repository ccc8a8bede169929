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

from jspec.helix.simulator.calibration import is_fitted, uses_defaults
from jspec.helix.simulator.configurations import Configurations
from jspec.helix.simulator.constants import Constants
from jspec.helix.simulator.cost import attention_seconds, step_times
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_shape
from jspec.models.files import INTEGER_LIMIT, read_json


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A measured time and the simulator's prediction of it, in microseconds.

    ``operation`` and ``case`` are the bench's; ``name`` is of them in words.
    """

    name: str
    operation: str
    case: dict[str, Any]
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted_us / self.measured_us - 1


def predictions(
    path: str | Path, hardware: Hardware, constants: Constants, *, fitted: bool = False
) -> tuple[Prediction, ...]:
    """Predict the steps and the layers of a result of ``python -m bench helix``.

    Rows that the simulator does not model are left out: drafts, gathered queries, latents whose
    values are projected after the exchange, chunks, and other messages and kernels than the
    default ones.

    Args:
        path: the JSON file.
        hardware: rates of the machine.
        constants: constants of the cost model.
        fitted: whether ``constants`` were fitted to this file; the rows that a fit used are left
            out, so that nothing predicts itself.

    Raises:
        ValueError: the file holds no such result.
    """
    result = read_json(Path(path))
    try:
        results = [
            _prediction(row, predicted_us(row["operation"], row["case"], hardware, constants))
            for row in result["rows"]
            if row.get("step_ns") and row["operation"] in PREDICTED and _is_known(row["case"])
            if not (fitted and row["operation"] == "attend" and is_fitted(row))
        ]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} has no times of steps or attention: {type(error).__name__}: {error!s:.200}; "
            f"write them with python -m bench helix --json FILE --case op=step or op=layer"
        ) from None
    return tuple(results)


def predicted_us(
    operation: str, case: dict[str, Any], hardware: Hardware, constants: Constants
) -> float:
    """The predicted microseconds of a case of the bench.

    Args:
        operation: ``"step"`` or ``"attend"``.
        case: its case, with all options.
        hardware: rates of the machine.
        constants: constants of the cost model.
    """
    return 1e6 * PREDICTED[operation](case, hardware, constants)


def _prediction(row: dict[str, Any], microseconds: float) -> Prediction:
    case = row["case"]
    what = f"{case['heads']} heads" if "heads" in case else case["shape"]
    what += f", latent {case['latent']}" if case.get("latent") else ""
    what += f", {case['layers']} layers" if case.get("layers") else ""
    sizes = f"B={case['B']}, S={case['S']}, kvp={case['kvp']}, tpa={case['tpa']}"
    sizes += f", ep={case['ep']}" if case.get("ep", 1) > 1 else ""
    sizes += f", {tokens} tokens" if (tokens := _tokens(case)) > 1 else ""
    measured = statistics.median(map(float, row["step_ns"])) / 1e3
    if not 0 < measured < math.inf:
        raise ValueError(f"{sizes}: {measured:g} us must be above 0 and finite")
    name = f"{row['name']}, {what}, {sizes}"
    return Prediction(name, row["operation"], case, measured, microseconds)


def _is_known(case: dict[str, Any]) -> bool:
    whole = case.get("part", "layer") == "layer" and case["overlap"] == 1 and uses_defaults(case)
    projected = not case.get("latent") or case["kvp"] == 1 or case["up"] == "before"
    drafts = case.get("draft", "plain") not in ("plain", "verify")
    return (
        whole
        and not drafts
        and case["strategy"] != "gather"
        and (projected or case["strategy"] == "tp")
    )


def _tokens(case: dict[str, Any]) -> int:
    """Tokens of a row in a pass."""
    return case["gamma"] + 1 if case.get("draft") == "verify" else case.get("T", 1)


def _layout(case: dict[str, Any]) -> Configurations:
    """The layout of a case's devices; on one axis where they do not split rows."""
    optional = (name for name in ("T", "gamma", "ep") if name in case)
    for name in ("B", "S", "kvp", "tpa", *optional):
        if type(case[name]) is not int or not 1 <= case[name] <= INTEGER_LIMIT:
            raise ValueError(f"{name}={case[name]!s:.20} must be a whole number, at least 1")
    kvp, tpa, strategy = case["kvp"], case["tpa"], case["strategy"]
    if strategy == "tp" or (strategy == "helix" and kvp == 1):
        kvp, tpa, strategy = 1, kvp * tpa, "tp"
    width, ep = tpa if strategy == "medha" else kvp * tpa, case.get("ep", 1)
    return Configurations.single(strategy, case["B"], kvp=kvp, tpa=tpa, tpf=width // ep, ep=ep)


def _step(case: dict[str, Any], hardware: Hardware, constants: Constants) -> float:
    shape = load_shape(case["shape"])
    shape = dataclasses.replace(shape, layers=case.get("layers") or shape.layers)
    inputs = shape, hardware, _layout(case), case["S"], constants
    return float(step_times(*inputs, tokens=_tokens(case)).total[0])


def _attention(case: dict[str, Any], hardware: Hardware, constants: Constants) -> float:
    heads, kv_heads = map(int, case["heads"].split("/"))
    latent = case["latent"]
    sizes = {"latent": latent, "rope": case["H"] - latent, "nope": 1, "value_size": latent // 4}
    shape = ModelShape(
        *("attention", 1, 1, heads, kv_heads, case["H"], 1, 1), **(sizes if latent else {})
    )
    inputs = shape, hardware, _layout(case), case["S"], constants
    return float(attention_seconds(*inputs, tokens=_tokens(case))[0])


PREDICTED: dict[str, Callable[[dict[str, Any], Hardware, Constants], float]] = {
    "step": _step,
    "attend": _attention,
}

__all__ = ["Prediction", "predicted_us", "predictions"]
