"""What the commands of `jspec simulate` share: their options, constants and tables of fits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from jspec.helix.simulator.calibration import FITTED, Fit, calibrated, load_fits
from jspec.helix.simulator.constants import CONSTANTS, Constants
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_hardware

Rows = list[dict[str, Any]]
Titled = tuple[str, Table]
Output = tuple[Rows, dict[str, Any], list[Titled], Callable[[str], None] | None]


def named(
    shape: ModelShape,
    hardware: Hardware,
    constants: Constants,
    context: float,
    fits: Sequence[Fit],
) -> dict[str, Any]:
    """The inputs of a simulation, for the JSON result."""
    return {
        "model": dataclasses.asdict(shape),
        "hardware": dataclasses.asdict(hardware),
        "constants": dataclasses.asdict(constants),
        "sources": Constants.sources(),
        "context": context,
        "fits": [dataclasses.asdict(fit) for fit in fits],
    }


def context_of(arguments: argparse.Namespace) -> float:
    text = arguments.context
    factor = {"K": 1e3, "M": 1e6}.get(text[-1:].upper(), 1.0)
    context = number(text[:-1] if factor > 1 else text, f"--context {text!r}") * factor
    if not 1 <= context < np.inf:
        raise ValueError(f"--context {text!r} must be at least 1 position, as in 1000000 or 1M")
    return context


def constants_of(
    arguments: argparse.Namespace, constants: Constants = CONSTANTS
) -> tuple[Sequence[Fit], Constants]:
    """The fits of ``--calibrate``, and ``constants`` by them, with what ``--set`` changes."""
    fits = [fit for path in arguments.calibrate for fit in load_fits(path)]
    return fits, changed_constants(arguments, calibrated(constants, calibrated_on(arguments), fits))


def calibrated_on(arguments: argparse.Namespace) -> Hardware:
    """The machine that the files of ``--calibrate`` were measured on."""
    return load_hardware(arguments.calibrated_on or arguments.hardware)


def changed_constants(arguments: argparse.Namespace, constants: Constants) -> Constants:
    """``constants`` with what ``--set`` changes."""
    changed = {}
    for text in arguments.set:
        name, values = constant_values(text)
        if len(values) != 1:
            raise ValueError(f"--set {text!r} must give one value; --sweep takes several")
        changed[name] = values[0]
    return dataclasses.replace(constants, **changed)


def fit_tables(
    arguments: argparse.Namespace, fits: Sequence[Fit], constants: Constants
) -> list[Titled]:
    """Tables of the points of each fit, titled by the constants that it determines."""
    hardware = calibrated_on(arguments)
    tables = []
    for fit in fits:
        table = Table()
        for column in (fit.kind, "measured us", "fitted us", "residual"):
            table.add_column(column, justify="left" if column == fit.kind else "right")
        for point in fit.points:
            times = f"{point.measured_us:,.2f}", f"{point.fitted_us:,.2f}"
            table.add_row(point.name, *times, f"{point.residual:+.1%}")
        tables.append((", ".join(_determined(fit, constants, hardware)), table))
    return tables


def _determined(fit: Fit, constants: Constants, hardware: Hardware) -> Iterator[str]:
    """The constants that a fit determines, with their values."""
    fitted = FITTED[fit.kind]
    if fit.gbps is not None:
        share, rate = getattr(constants, fitted.share), getattr(hardware, fitted.rate)
        yield f"{fit.gbps:,.0f} GB/s: {fitted.share}={share:.3g} of {rate:,.0f}"
    if fit.fixed_us is not None:
        names = [name for name in fitted.fixed if getattr(constants, name) == fit.fixed_us]
        yield from (f"{name}={fit.fixed_us:.3g}" for name in names)
    if fit.tflops is not None:
        yield f"{fit.tflops:,.0f} TFLOP/s: attention_share={constants.attention_share:.3g}"


def constant_values(text: str) -> tuple[str, Sequence[float]]:
    """The constant and the values of ``NAME=VALUE,...``."""
    name, _, values = text.partition("=")
    if name not in Constants.sources():
        raise ValueError(
            f"constant {name!r} is unknown; choose one of {', '.join(Constants.sources())}"
        )
    return name, [number(value, text) for value in values.split(",")]


def number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} must be a number") from None
