"""`jspec simulate paper`: the ratios of the Helix paper's figures 5 to 7, by several constants."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from jspec.cli.simulate_options import (
    Output,
    Rows,
    Titled,
    calibrated_on,
    changed_constants,
    constants_of,
    context_of,
    fit_tables,
)
from jspec.helix.simulator.calibration import Fit, calibrated
from jspec.helix.simulator.configurations import BATCHES, FINE_BATCHES
from jspec.helix.simulator.constants import CONSTANTS, Constants
from jspec.helix.simulator.paper import (
    BY_BYTES,
    FIGURE_3,
    FIGURE_3_BATCH,
    PAPER,
    layer_overlap,
    paper_simulations,
)
from jspec.helix.simulator.shapes import Hardware, load_hardware, load_shape

QUANTITIES = {
    "interactivity": "fastest row",
    "throughput": "GPU throughput",
    "batch": "batch",
    "overlap": "HOP-B",
}
COLLECTIVES = ("messages", "exchange")  # kinds of fits


def paper(arguments: argparse.Namespace) -> Output:
    """The paper's ratios as it states them and by each set of constants."""
    start = time.perf_counter()
    hardware, (fits, constants) = load_hardware(arguments.hardware), constants_of(arguments)
    settings = {"context": context_of(arguments), "gpus": arguments.gpus}
    rows, layouts = paper_rows(hardware, list(variants(arguments, fits)), **settings)
    overlaps = overlap_rows(hardware, changed_constants(arguments, CONSTANTS), **settings)
    seconds = time.perf_counter() - start
    tables = fit_tables(arguments, fits, constants)
    tables += [_ratio_table(rows, hardware, layouts, seconds), _overlap_table(overlaps)]
    result = {
        "hardware": dataclasses.asdict(hardware),
        "constants": dataclasses.asdict(constants),
        "sources": Constants.sources(),
        "fits": [dataclasses.asdict(fit) for fit in fits],
        "layouts": layouts,
        "seconds": seconds,
        "ratios": rows,
        "overlaps": overlaps,
    }
    return rows, result, tables, None


Variant = tuple[str, Constants, Sequence[int]]  # its name, and the batches that are tried


def variants(arguments: argparse.Namespace, fits: Sequence[Fit]) -> Iterator[Variant]:
    """The constants that the ratios are computed with."""
    assumed = changed_constants(arguments, CONSTANTS)
    yield "assumed", assumed, BATCHES
    yield "all batches", assumed, FINE_BATCHES
    machine = calibrated_on(arguments)
    messages = [fit for fit in fits if fit.kind in COLLECTIVES]
    for name, chosen in (("collectives", messages), ("measured", fits)):
        if chosen:
            fitted = calibrated(CONSTANTS, machine, chosen)
            yield name, changed_constants(arguments, fitted), FINE_BATCHES


def paper_rows(hardware: Hardware, chosen: Sequence[Variant], **settings: Any) -> tuple[Rows, int]:
    """The ratios of each model, by variant, and the number of layouts that were simulated."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    count = 0
    for name, constants, batches in chosen:
        simulations = paper_simulations(hardware, constants, batches=batches, **settings)
        for model, simulation in simulations:
            count += len(simulation.layouts)
            ratios.setdefault(model, {})[name] = simulation.headlines()
    rows = [
        {"model": model, "quantity": quantity, "paper": PAPER[model][quantity]}
        | {name: ratio[quantity] for name, ratio in by_name.items()}
        for model, by_name in ratios.items()
        for quantity in QUANTITIES
    ]
    return rows, count


def overlap_rows(hardware: Hardware, constants: Constants, **settings: Any) -> Rows:
    """What HOP-B saves in a layer at figure 3's batch, by the time of the exchange."""
    rows = []
    for model in PAPER:
        for name, changed in (("bytes alone", BY_BYTES), ("1.2 us a row", FIGURE_3)):
            by = dataclasses.replace(constants, **changed)
            overlap = layer_overlap(load_shape(model), hardware, by, **settings)
            row = {"model": model, "exchange": name} | dataclasses.asdict(overlap)
            rows.append(row | {"saved_share": overlap.saved_share})
    return rows


def _ratio_table(rows: Rows, hardware: Hardware, layouts: int, seconds: float) -> Titled:
    table = Table()
    for column in rows[0]:
        left = column in ("model", "quantity")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*ratio_cells(row))
    title = f"Helix over the best of the others on {hardware.name}: "
    return title + f"{layouts:,} layouts in {seconds:.1f} s", table


def ratio_cells(row: dict[str, Any]) -> Iterator[str]:
    """The cells of a row of `paper_rows`."""
    for column, value in row.items():
        if column == "quantity":
            yield QUANTITIES[value]
        elif column == "model":
            yield value
        else:
            yield f"{value:.1%}" if row["quantity"] == "overlap" else f"{value:.2f}x"


def _overlap_table(rows: Rows) -> Titled:
    table = Table()
    for column in OVERLAP_COLUMNS:
        left = column in ("model", "exchange by")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(*overlap_cells(row))
    return f"A layer of Helix with and without HOP-B, {FIGURE_3_BATCH} rows, microseconds", table


OVERLAP_COLUMNS = ("model", "exchange by", "attention", "exchange", "saved", "layer", "share")


def overlap_cells(row: dict[str, Any]) -> Iterator[str]:
    """The cells of a row of `overlap_rows`, for `OVERLAP_COLUMNS`."""
    yield from (row["model"], row["exchange"])
    yield from (f"{row[name]:.2f}" for name in ("attention_us", "message_us"))
    yield from (f"{row['saved_us']:.3f}", f"{row['layer_us']:.1f}", f"{row['saved_share']:.2%}")
