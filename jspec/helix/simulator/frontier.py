"""What a machine can serve: throughput against interactivity, and the best layout at each point."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.helix.simulator.configurations import (
    BASELINES,
    BATCHES,
    Configurations,
    configurations,
)
from jspec.helix.simulator.constants import CONSTANTS, Constants
from jspec.helix.simulator.cost import Floats, StepTimes, step_times
from jspec.helix.simulator.shapes import Hardware, ModelShape


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The Pareto frontier of layouts: none is better in both rates. Sorted by ``users``, falling.

    Attributes:
        users: tokens a second of one row, float64 ``[n]``.
        gpus: tokens a second of a GPU, float64 ``[n]``.
        indices: index of each layout in the `Configurations`, int64 ``[n]``.
    """

    users: Floats
    gpus: Floats
    indices: NDArray[np.int64]

    def throughput(self, users: ArrayLike) -> Floats:
        """Tokens a second of a GPU where a row gets at least ``users``; 0 where none can."""
        above = np.searchsorted(-self.users, -np.asarray(users, float), side="right")
        return np.concatenate([[0.0], self.gpus])[above]

    def interactivity(self, gpus: ArrayLike) -> Floats:
        """Tokens a second of a row where a GPU gives at least ``gpus``; 0 where none can."""
        first = np.searchsorted(self.gpus, np.asarray(gpus, float), side="left")
        return np.concatenate([self.users, [0.0]])[first]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The layouts of a model on a machine.

    Attributes:
        layouts: the n layouts.
        times: times and memory of a step of each.
        fits: whether each fits the memory of a GPU, bool ``[n]``.
        total_gpus: GPUs of the machine, which copies of a layout share.
    """

    layouts: Configurations
    times: StepTimes
    fits: NDArray[np.bool_]
    total_gpus: int

    @property
    def users(self) -> Floats:
        """Tokens a second of a row."""
        return 1 / self.times.total

    @property
    def gpus(self) -> Floats:
        """Tokens a second of a GPU."""
        return self.layouts.users / self.times.total / self.layouts.gpus

    def served(self, latency: ArrayLike, *strategies: str) -> NDArray[np.int64]:
        """The most rows that all GPUs serve by copies of one layout of ``strategies``.

        ``latency``: limits on the seconds of a token; 0 rows where no layout meets one.
        """
        (indices,) = np.nonzero(self.fits & self.layouts.of(*strategies))
        order = indices[np.argsort(self.times.total[indices])]
        copies = self.total_gpus // self.layouts.gpus[order]
        rows = np.maximum.accumulate(self.layouts.users[order] * copies)
        count = np.searchsorted(self.times.total[order], latency, side="right")
        return np.concatenate([[0], rows])[count]

    def frontier(self, *strategies: str, overlap: bool | None = None) -> Frontier:
        """The frontier of the layouts of ``strategies``; ``overlap`` restricts them to HOP-B's."""
        chosen = self.fits & self.layouts.of(*strategies)
        if overlap is not None:
            chosen &= (self.layouts.overlap > 0) == overlap
        (indices,) = np.nonzero(chosen)
        users, gpus = self.users[indices], self.gpus[indices]
        order = np.lexsort((-gpus, -users))
        users, gpus, indices = users[order], gpus[order], indices[order]
        before = np.concatenate([[-np.inf], np.maximum.accumulate(gpus)[:-1]])
        best = gpus > before
        return Frontier(users[best], gpus[best], indices[best])

    def headlines(self) -> dict[str, float]:
        """The ratios of figures 5 to 7, Helix to the best baseline.

        ``interactivity``: of the most tokens a second that a row can get. ``throughput``: the most
        that tokens a second of a GPU grow at one interactivity. ``batch``: the most that the rows
        on all GPUs grow within one time of a token. ``overlap``: the largest share of a row's
        tokens a second that is lost without HOP-B, in a layout that is on its frontier.
        """
        base, helix = self.frontier(*BASELINES), self.frontier("helix", overlap=True)
        if not len(base.users) or not len(helix.users):
            raise ValueError("no layout of one of the two sides fits; take more or larger GPUs")
        # A baseline's layout serves all rows that ask for more than the next one's gets.
        slowest = np.nextafter(np.append(base.users[1:], 0), np.inf)
        hidden = self.times.hidden[helix.indices]
        times = np.unique(self.times.total[self.fits])
        rows, base_rows = self.served(times, "helix"), self.served(times, *BASELINES)
        both = base_rows > 0
        return {
            "interactivity": float(helix.users[0] / base.users[0]),
            "throughput": float((helix.throughput(slowest) / base.gpus).max()),
            "batch": float((rows[both] / base_rows[both]).max()),
            "overlap": float((hidden / (self.times.total[helix.indices] + hidden)).max()),
        }


def simulate(
    shape: ModelShape,
    hardware: Hardware,
    *,
    context: float = 1e6,
    gpus: int = 64,
    batches: Sequence[int] = BATCHES,
    constants: Constants = CONSTANTS,
) -> Simulation:
    """Estimate every layout of a model.

    Args:
        shape: sizes of the model.
        hardware: rates of the machine.
        context: positions of a row.
        gpus: GPUs of the machine, and the most of a layout.
        batches: numbers of rows to try.
        constants: constants of the cost model.

    Returns:
        The layouts and their times.

    Raises:
        ValueError: ``gpus`` exceeds those of ``hardware``, or ``context`` is below 1.
    """
    if gpus > hardware.gpus:
        raise ValueError(f"gpus={gpus} exceeds the {hardware.gpus} of {hardware.name}")
    if not context >= 1:
        raise ValueError(f"context={context} must be at least 1 position")
    layouts = configurations(shape, gpus, batches)
    times = step_times(shape, hardware, layouts, context, constants)
    room = hardware.memory_gb * (1 - constants.memory_kept)
    return Simulation(layouts, times, times.memory_gb <= room, gpus)


def swept(
    shape: ModelShape,
    hardware: Hardware,
    name: str,
    values: ArrayLike,
    *,
    constants: Constants = CONSTANTS,
    **settings: Any,
) -> Iterator[dict[str, float]]:
    """Yield `Simulation.headlines` with the constant ``name`` at each of ``values``.

    ``settings``: other keyword arguments of `simulate`.
    """
    for value in np.asarray(values, float):
        changed = dataclasses.replace(constants, **{name: float(value)})
        simulation = simulate(shape, hardware, constants=changed, **settings)
        yield {name: float(value)} | simulation.headlines()


__all__ = ["Frontier", "Simulation", "simulate", "swept"]
