"""The figures of the Helix paper (Bhatia et al. 2025), and the simulations that correspond."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jspec.helix.simulator.configurations import BATCHES, Configurations
from jspec.helix.simulator.constants import CONSTANTS, Constants
from jspec.helix.simulator.cost import step_times
from jspec.helix.simulator.frontier import Simulation, simulate
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_shape

# Of each model, keys of `Simulation.headlines` with the paper's values: section 3.2 and figures 5
# and 6, and section 3.3 and figure 7.
PAPER: dict[str, dict[str, float]] = {
    "deepseek-r1": {"interactivity": 1.5, "throughput": 32, "batch": 32, "overlap": 0.01},
    "llama-405b": {"interactivity": 1.13, "throughput": 4, "batch": 4, "overlap": 0.12},
}
# Figure 3 draws 8 rows, 16 units of attention and 1.2 units of messages a row, without a fixed
# time. Its unit is a microsecond: by appendix A a layer of Llama-405B takes 16 us to read 8 caches
# of a million positions on 8 x 8 GPUs.
FIGURE_3_BATCH = 8
FIGURE_3 = {"exchange_us": 0.0, "row_us": 1.2}
BY_BYTES = {"exchange_us": 0.0, "row_us": 0.0}
NO_EXCHANGE = BY_BYTES | {"link_share": 1e9}


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What HOP-B saves in one layout of Helix: of a layer, in microseconds.

    Attributes:
        attention_us: attention without its exchange.
        message_us: the exchange, without HOP-B.
        saved_us: the part of the exchange that HOP-B hides.
        layer_us: a layer, without HOP-B.
    """

    attention_us: float
    message_us: float
    saved_us: float
    layer_us: float

    @property
    def saved_share(self) -> float:
        """The share of a row's tokens a second that is lost without HOP-B."""
        return self.saved_us / self.layer_us


def layer_overlap(
    shape: ModelShape,
    hardware: Hardware,
    constants: Constants = CONSTANTS,
    *,
    context: float = 1e6,
    gpus: int = 64,
    batch: int = FIGURE_3_BATCH,
) -> Overlap:
    """What HOP-B saves where all ``gpus`` share a row, by heads as far as there are KV heads.

    Args:
        shape: sizes of the model.
        hardware: rates of the machine.
        constants: constants of the cost model.
        context: positions of a row.
        gpus: a power of two.
        batch: rows.
    """
    tpa = min(shape.kv_heads, gpus)
    layout = Configurations.single("helix", batch, kvp=gpus // tpa, tpa=tpa, tpf=gpus, overlap=1)
    times = step_times(shape, hardware, layout, context, constants)
    free = dataclasses.replace(constants, **NO_EXCHANGE)
    alone = step_times(shape, hardware, layout, context, free)
    layer = 1e6 / shape.layers
    hidden = float(times.hidden[0]) * layer
    exposed = float(times.attention[0] - alone.attention[0]) * layer
    return Overlap(
        attention_us=float(alone.attention[0]) * layer,
        message_us=exposed + hidden,
        saved_us=hidden,
        layer_us=float(times.total[0]) * layer + hidden,
    )


def paper_simulations(
    hardware: Hardware,
    constants: Constants = CONSTANTS,
    *,
    context: float = 1e6,
    gpus: int = 64,
    batches: Sequence[int] = BATCHES,
) -> Iterator[tuple[str, Simulation]]:
    """Yield each model of the paper with its `Simulation`; the arguments are `simulate`'s."""
    for name in PAPER:
        settings = {"context": context, "gpus": gpus, "batches": batches}
        yield name, simulate(load_shape(name), hardware, constants=constants, **settings)


__all__ = [
    "BY_BYTES",
    "FIGURE_3",
    "FIGURE_3_BATCH",
    "PAPER",
    "Overlap",
    "layer_overlap",
    "paper_simulations",
]
