"""Constants of the simulator from measurements: results that ``python -m bench`` wrote as JSON.

Times are fitted as a fixed part and bytes over a rate, by least squares of the relative errors, so
that a message of 2 KiB counts as much as one of 16 MiB. The fixed time of the exchange is what
attention over several devices takes longer than the fit of attention on one says: inside a layer
an all-to-all takes less than in a loop of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.helix.simulator.constants import Constants
from jspec.helix.simulator.shapes import Hardware
from jspec.models.files import read_json

# Bytes on a link of each of P devices that gives n of them, as `jspec.helix.simulator.cost` counts.
SENT: dict[str, Callable[[int, float], float]] = {
    "all_to_all": lambda ranks, size: (ranks - 1) / ranks * size,
    "all_gather": lambda ranks, size: (ranks - 1) * size,
    "all_reduce": lambda ranks, size: 2 * (ranks - 1) / ranks * size,
    "reduce_scatter": lambda ranks, size: (ranks - 1) / ranks * size,
}
# Of one device that reads all keys and values by itself.
ALONE = {"strategy": "helix", "kvp": 1, "tpa": 1, "T": 1}


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured time and its fit, in microseconds.

    ``bytes``: bytes moved; None where the fit is to arithmetic.
    """

    name: str
    bytes: float | None
    measured_us: float
    fitted_us: float

    @property
    def residual(self) -> float:
        """The fit over the measurement, less 1."""
        return self.fitted_us / self.measured_us - 1


@dataclasses.dataclass(frozen=True)
class Fit:
    """The fit of a fixed time and a rate to times of the bench.

    Attributes:
        kind: ``"messages"``, ``"attention"`` or ``"exchange"``, a key of `FITTED`.
        fixed_us: microseconds that do not depend on bytes; None where all points have the same
            bytes, so that only the rate is fitted.
        gbps: gigabytes a second; None where only the fixed time is fitted.
        points: the measurements.
        tflops: rate of attention to latents; None where none was measured.
    """

    kind: str
    fixed_us: float | None
    gbps: float | None
    points: tuple[Point, ...]
    tflops: float | None = None


def load_fits(path: str | Path) -> tuple[Fit, ...]:
    """Fit the times of messages and of attention in a result of ``python -m bench helix``.

    Raises:
        ValueError: the file holds neither, or too few measurements.
    """
    result = read_json(Path(path))
    try:
        rows = [row for row in result["rows"] if row.get("step_ns")]
        by_kind = {
            kind: [_measured(point) for point in map(of, rows) if point is not None]
            for kind, of in READERS.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} has no times of messages or attention: {type(error).__name__}: "
            f"{error!s:.200}; write them with python -m bench helix --json FILE"
        ) from None
    latents, exchanges = by_kind.pop("latents"), by_kind.pop("exchange")
    kinds = [kind for kind, times in by_kind.items() if times]
    if not kinds:
        raise ValueError(
            f"{path} has no times of messages between devices or of attention by one device "
            "(kvp=1); measure them with python -m bench helix"
        )
    try:
        fits = {kind: _fitted(kind, by_kind[kind]) for kind in kinds}
        if "attention" in fits:
            fits["attention"] = _with_latents(fits["attention"], latents)
            if exchanges:
                fits["exchange"] = _exchange_fit(fits["attention"], exchanges)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(fits.values())


def calibrated(constants: Constants, hardware: Hardware, fits: Iterable[Fit]) -> Constants:
    """Replace the constants that ``fits`` determine.

    ``hardware``: what was measured; rates become shares of its rates.
    """
    changed: dict[str, float] = {}
    # The exchange is a collective like others unless its own time was measured.
    for fit in sorted(fits, key=lambda fit: fit.kind == "exchange"):
        fitted = FITTED[fit.kind]
        if fit.gbps is not None:
            changed[fitted.share] = fit.gbps / getattr(hardware, fitted.rate)
        if fit.fixed_us is not None:
            changed |= dict.fromkeys(fitted.fixed, fit.fixed_us)
        if fit.tflops is not None:
            rate = hardware.tflops * constants.arithmetic_share
            changed["attention_share"] = fit.tflops / rate
    return dataclasses.replace(constants, **changed)


Measurement = tuple[str, float, Sequence[float]]  # its name, bytes, and nanoseconds of each sample


def _collective(row: dict[str, Any]) -> Measurement | None:
    if "P" not in row["case"]:
        return None
    operation, _, by = row["name"].partition(", ")
    if by:  # one-sided: the fit is of NCCL
        return None
    ranks, size = int(row["case"]["P"]), float(row["case"]["bytes"])
    name = f"{operation}, P={ranks}, {size:,.0f} bytes"
    return name, SENT[operation](ranks, size), row["step_ns"]


def _read(row: dict[str, Any]) -> Measurement | None:
    case = row["case"]
    if case.get("latent") or not _is_alone(case):
        return None
    name = f"attention, B={case['B']}, S={case['S']}, {case['heads']} heads"
    return name, float(row["bytes"]), row["step_ns"]


def _exchange(row: dict[str, Any]) -> Measurement | None:
    case = row["case"]
    whole = case.get("part", "layer") == "layer" and case.get("overlap") == 1
    plain = case.get("T") == 1 and not case.get("latent") and uses_defaults(case)
    if not (whole and plain and case.get("strategy") == "helix" and case["kvp"] > 1):
        return None
    name = f"attention, B={case['B']}, S={case['S']}, {case['heads']} heads, kvp={case['kvp']}"
    return name, float(row["bytes"]), row["step_ns"]


def uses_defaults(case: dict[str, Any]) -> bool:
    """Whether a case is of NCCL's messages and the measured order of backends."""
    backends = (case.get(name, "default") for name in ("kernel", "backends"))
    return case.get("exchange") == "xla" and all(name == "default" for name in backends)


def is_fitted(row: dict[str, Any]) -> bool:
    """Whether `load_fits` fits a constant to a row of attention."""
    return any(of(row) is not None for of in (_read, _exchange, _latent))


def _is_alone(case: dict[str, Any]) -> bool:
    return all(case.get(key) == value for key, value in ALONE.items())


def _latent(row: dict[str, Any]) -> Measurement | None:
    """Operations in place of bytes: many heads share one latent, whose arithmetic outlasts it."""
    case = row["case"]
    if not (case.get("latent") and _is_alone(case)):
        return None
    heads = int(case["heads"].split("/")[0])
    name = f"attention, B={case['B']}, S={case['S']}, {heads} heads, latent {case['latent']}"
    channels = case["H"] + case["latent"]  # of a key, and of its value
    return name, 2.0 * case["B"] * case["S"] * heads * channels, row["step_ns"]


# For each kind of times, the function that reads a row.
READERS: dict[str, Callable[[dict[str, Any]], Measurement | None]] = {
    "messages": _collective,
    "attention": _read,
    "exchange": _exchange,
    "latents": _latent,
}


class Fitted(NamedTuple):
    """The constants that a kind of `Fit` determines.

    Attributes:
        fixed: fields of `Constants` that are its fixed time.
        share: field of `Constants` that is its rate, as a share of ``rate``; empty without one.
        rate: field of `Hardware`.
    """

    fixed: tuple[str, ...]
    share: str = ""
    rate: str = ""


FITTED = {
    "messages": Fitted(("collective_us", "exchange_us"), "link_share", "link_gbps"),
    "attention": Fitted(("attention_us",), "memory_share", "memory_gbps"),
    "exchange": Fitted(("exchange_us",)),
}


def _measured(measurement: Measurement) -> tuple[str, float, float]:
    """Name, bytes and microseconds, the median of the samples."""
    name, size, samples = measurement
    microseconds = statistics.median(map(float, samples)) / 1e3
    if not (size > 0 and 0 < microseconds < float("inf")):
        raise ValueError(f"{name}: {microseconds:g} us must be above 0, for bytes above 0")
    return name, size, microseconds


def _fitted(kind: str, measured: Sequence[tuple[str, float, float]]) -> Fit:
    from scipy.optimize import nnls

    names, sizes, times = zip(*measured, strict=True)
    sizes, times = np.array(sizes), np.array(times)
    terms = [np.ones(len(sizes)), sizes] if len(set(sizes)) > 1 else [sizes]
    # Relative errors: each row is over its time, and should give 1.
    matrix = np.stack(terms, axis=1) / times[:, None]
    scale = matrix.max(axis=0)
    coefficients = nnls(matrix / scale, np.ones(len(times)))[0] / scale
    *fixed, slope = coefficients  # microseconds, and those of a byte
    if not slope > 0:
        raise ValueError(
            f"the times of {kind} do not grow with the bytes, {sizes.min():,.0f} to "
            f"{sizes.max():,.0f}; measure larger ones, as with --case"
        )
    fits = matrix @ coefficients * times
    points = map(Point, names, sizes.tolist(), times.tolist(), fits.tolist())
    return Fit(kind, float(fixed[0]) if fixed else None, float(1e-3 / slope), tuple(points))


def _exchange_fit(attention: Fit, measured: Sequence[tuple[str, float, float]]) -> Fit:
    """The fixed time of the exchange: what ``measured`` layers take longer than ``attention``."""
    assert attention.gbps is not None
    names, sizes, times = zip(*measured, strict=True)
    sizes, times = np.array(sizes), np.array(times)
    alone = (attention.fixed_us or 0.0) + sizes / attention.gbps / 1e3
    weights = times**-2.0  # of squared relative errors
    fixed = max(float((weights * (times - alone)).sum() / weights.sum()), 0.0)
    points = map(Point, names, sizes.tolist(), times.tolist(), (alone + fixed).tolist())
    return Fit("exchange", fixed, None, tuple(points))


def _with_latents(fit: Fit, measured: Sequence[tuple[str, float, float]]) -> Fit:
    """The fit with the rate of ``measured`` operations, and their points."""
    if not measured:
        return fit
    rates = np.array([size / time for _, size, time in measured])  # in millions a second
    rate = float((rates**2).sum() / rates.sum())
    points = tuple(Point(name, None, time, size / rate) for name, size, time in measured)
    return dataclasses.replace(fit, points=fit.points + points, tflops=rate / 1e6)


__all__ = ["Fit", "Point", "calibrated", "is_fitted", "load_fits", "uses_defaults"]
