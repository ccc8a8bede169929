"""`jspec simulate`: read times, frontiers and overlap of Helix, as tables, JSON, CSV, pictures."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jspec.cli.show import PlainConsole
from jspec.cli.simulate_options import (
    Output,
    Rows,
    Titled,
    constant_values,
    constants_of,
    context_of,
    fit_tables,
    named,
)
from jspec.cli.simulate_paper import paper
from jspec.extras import check_matplotlib
from jspec.helix.simulator.configurations import BASELINES, BATCHES, FINE_BATCHES, STRATEGIES
from jspec.helix.simulator.constants import CONSTANTS
from jspec.helix.simulator.cost import pipelined
from jspec.helix.simulator.frontier import Frontier, Simulation, simulate, swept
from jspec.helix.simulator.measured import predictions
from jspec.helix.simulator.pictures import draw_frontiers, draw_overlap, draw_roofline
from jspec.helix.simulator.roofline import kv_read_us, weight_read_us
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_hardware, load_shape

LATENCIES_MS = (5, 10, 20, 50)
# Of what the bench measures: bfloat16.
MEASURED = dataclasses.replace(CONSTANTS, bytes_per_value=2, bytes_per_activation=2)
SHOWN = 10  # points of a frontier in the table; all are in JSON and CSV


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.png:
        check_matplotlib()
    commands: dict[str, Callable[[argparse.Namespace], Output]] = {
        "roofline": _roofline,
        "pareto": _pareto,
        "paper": paper,
        "hopb": _hopb,
        "measured": _measured,
    }
    rows, result, tables, draw = commands[arguments.what](arguments)
    if arguments.png and draw is not None:
        draw(arguments.png)
    if arguments.csv:
        with Path(arguments.csv).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if arguments.json:
        print(json.dumps(result))
    else:
        console = PlainConsole(highlight=False)
        for title, table in tables:
            console.print(f"\n{title}")
            console.print(table)
    return 0


def _roofline(arguments: argparse.Namespace) -> Output:
    """Appendix A over widths and contexts: the three panels of figure 1."""
    shape, hardware = (
        load_shape(arguments.model or "helix-figure-1"),
        load_hardware(arguments.hardware),
    )
    fits, constants = constants_of(arguments)
    context, batch = context_of(arguments), arguments.batch
    if shape.latent:
        raise ValueError(
            f"model {shape.name} has a latent cache, which appendix A leaves out; "
            "jspec simulate pareto knows it"
        )
    if batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1")
    rates: dict[str, Any] = {
        "bytes_per_value": constants.bytes_per_value,
        "memory_gbps": hardware.memory_gbps * constants.memory_share,
    }
    widths = 2 ** np.arange(7)
    contexts = context * 2.0 ** np.arange(-6, 3)
    head_ranks = min(shape.kv_heads, 8)
    panels = []
    for title, name, x, kv, weights in (
        ("TP", "tp", widths, {"tpa": widths}, {"tpa": widths, "tpf": widths}),
        (
            "context",
            "context",
            contexts,
            {"tpa": head_ranks},
            {"tpa": head_ranks, "tpf": head_ranks},
        ),
        (
            "KVP",
            "kvp",
            widths,
            {"tpa": head_ranks, "kvp": widths},
            {"tpa": head_ranks, "tpf": head_ranks * widths},
        ),
    ):
        length = contexts if name == "context" else context
        kv_us = np.broadcast_to(kv_read_us(shape, batch, length, **kv, **rates), x.shape)
        weight_us = np.broadcast_to(weight_read_us(shape, **weights, **rates), x.shape)
        points = zip(x.tolist(), kv_us.tolist(), weight_us.tolist(), strict=True)
        rows = [{name: a, "kv_us": b, "weights_us": c} for a, b, c in points]
        panels.append((f"{title}, batch {batch}", name, rows))
    tables = fit_tables(arguments, fits, constants)
    tables += [_read_table(panel, shape, hardware, context) for panel in panels]
    rows = [
        {"panel": name, "x": row[name], "kv_us": row["kv_us"], "weights_us": row["weights_us"]}
        for _, name, points in panels
        for row in points
    ]

    def draw(path: str) -> None:
        draw_roofline(panels, path)

    result = {name: points for _, name, points in panels}
    return rows, named(shape, hardware, constants, context, fits) | result, tables, draw


def _read_table(panel: Any, shape: ModelShape, hardware: Hardware, context: float) -> Titled:
    title, name, rows = panel
    title = f"{shape.name} on {hardware.name}: a layer's reads in us, {title}"
    if name != "context":
        title += f", {context:,.0f} positions"
    table = Table()
    for column in (name, "KV cache", "weights", "both"):
        table.add_column(column, justify="right")
    for row in rows:
        both = row["kv_us"] + row["weights_us"]
        table.add_row(f"{row[name]:,.0f}", *(f"{x:,.2f}" for x in (*list(row.values())[1:], both)))
    return title, table


def _pareto(arguments: argparse.Namespace) -> Output:
    """Throughput against interactivity, Helix against the baselines: figures 5 to 7."""
    shape, hardware = load_shape(arguments.model or "llama-405b"), load_hardware(arguments.hardware)
    (fits, constants), context = constants_of(arguments), context_of(arguments)
    settings: dict[str, Any] = {
        "context": context,
        "gpus": arguments.gpus,
        "batches": FINE_BATCHES if arguments.fine else BATCHES,
    }
    simulation = simulate(shape, hardware, constants=constants, **settings)
    frontiers = {"helix": simulation.frontier("helix", overlap=True)}
    frontiers["helix without HOP-B"] = simulation.frontier("helix", overlap=False)
    frontiers |= {name: simulation.frontier(name) for name in STRATEGIES if name in BASELINES}
    frontiers = {name: x for name, x in frontiers.items() if len(x.users)}
    headlines = simulation.headlines()
    served = _served(simulation)
    sweeps = [
        row
        for name, values in map(constant_values, arguments.sweep)
        for row in swept(shape, hardware, name, values, constants=constants, **settings)
    ]
    title = f"{shape.name} on {hardware.name}, {context:,.0f} positions"
    base = simulation.frontier(*BASELINES)
    tables = fit_tables(arguments, fits, constants)
    tables.append(_frontier_table(simulation, frontiers["helix"], base, title))
    tables.append(_served_table(served, arguments.gpus))
    tables.append(_ratio_table(headlines, simulation))
    tables += [_sweep_table(sweeps)] if sweeps else []
    rows = [
        {"frontier": name} | _point(simulation, frontier, i)
        for name, frontier in frontiers.items()
        for i in range(len(frontier.users))
    ]
    result = named(shape, hardware, constants, context, fits) | {
        "layouts": len(simulation.layouts),
        "fit": int(simulation.fits.sum()),
        "headlines": headlines,
        "served": served,
        "sweeps": sweeps,
        "frontiers": rows,
    }

    def draw(path: str) -> None:
        draw_frontiers(frontiers, title, path)

    return rows, result, tables, draw


def _point(simulation: Simulation, frontier: Frontier, i: int) -> dict[str, Any]:
    index = int(frontier.indices[i])
    point = {"tokens_per_s_row": float(frontier.users[i])}
    point |= {"tokens_per_s_gpu": float(frontier.gpus[i])}
    return (
        point
        | simulation.layouts.one(index)
        | {"memory_gb": float(simulation.times.memory_gb[index])}
    )


def _served(simulation: Simulation) -> Rows:
    """The most rows that all GPUs serve within each of `LATENCIES_MS`."""
    return [
        {
            "latency_ms": latency,
            "helix": int(simulation.served(latency / 1e3, "helix")),
            "baseline": int(simulation.served(latency / 1e3, *BASELINES)),
        }
        for latency in LATENCIES_MS
    ]


def _frontier_table(simulation: Simulation, helix: Frontier, base: Frontier, title: str) -> Titled:
    table = Table()
    for column in ("a row", "helix", "layout", "baseline", "layout"):
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    points = helix.users[np.linspace(0, len(helix.users) - 1, SHOWN).astype(int)]
    for users in np.unique(points)[::-1]:
        row = [f"{users:,.1f}"]
        for frontier in (helix, base):
            i = int(np.searchsorted(-frontier.users, -users, side="right")) - 1
            row += (
                [f"{frontier.gpus[i]:,.2f}", _layout(simulation, frontier, i)]
                if i >= 0
                else ["-"] * 2
            )
        table.add_row(*row)
    return f"{title}: tokens a second of a row, and of a GPU", table


def _layout(simulation: Simulation, frontier: Frontier, i: int) -> str:
    one = simulation.layouts.one(int(frontier.indices[i]))
    parts = [f"{one['strategy']}"] if one["strategy"] != "helix" else []
    for name in ("kvp", "tpa", "dp", "tpf", "ep", "pp"):
        if one[name] != 1:
            parts.append(f"{name}{one[name]}")
    return " ".join([*parts, f"B{one['batch']}"])


def _served_table(rows: Rows, gpus: int) -> Titled:
    table = Table()
    for column in ("ms a token", "helix", "best baseline"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row['latency_ms']}", f"{row['helix']:,.0f}", f"{row['baseline']:,.0f}")
    return f"Most rows on {gpus} GPUs", table


def _ratio_table(headlines: dict[str, float], simulation: Simulation) -> Titled:
    count, fit = len(simulation.layouts), int(simulation.fits.sum())
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "fastest row, over the best baseline's": f"{headlines['interactivity']:.2f}x",
        "throughput of a GPU at equal speed of a row, at most": f"{headlines['throughput']:.2f}x",
        "rows on all GPUs at equal time of a token, at most": f"{headlines['batch']:.2f}x",
        "speed of a row that HOP-B saves, at most": f"{headlines['overlap']:.1%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return f"Helix, of {count:,} layouts, {fit:,} of which fit", table


def _sweep_table(rows: Rows) -> Titled:
    table = Table()
    for column in ("constant", "value", "of a row", "of a GPU", "HOP-B"):
        table.add_column(column, justify="left" if column == "constant" else "right")
    for row in rows:
        name, value = next(iter(row.items()))
        ratios = f"{row['interactivity']:.2f}x", f"{row['throughput']:.2f}x"
        table.add_row(name, f"{value:g}", *ratios, f"{row['overlap']:.1%}")
    return "The ratios by one constant", table


def _hopb(arguments: argparse.Namespace) -> Output:
    """The span of attention and its exchange, by chunks: figure 3."""
    for name in ("requests", "compute", "message"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name} {getattr(arguments, name)} must be above 0")
    if arguments.fixed < 0:
        raise ValueError(f"--fixed {arguments.fixed} must be at least 0")
    requests = arguments.requests
    halves = [n for n in range(1, math.isqrt(requests) + 1) if requests % n == 0]
    chunks = sorted({*halves, *(requests // n for n in halves)})
    spans = pipelined(arguments.compute, arguments.message, chunks, arguments.fixed)
    rows = [{"chunks": n, "span": float(x)} for n, x in zip(chunks, spans, strict=True)]
    title = (
        f"{requests} rows: {arguments.compute:g} of attention, {arguments.message:g} of messages"
    )
    table = Table()
    for column in ("chunks", "span", "saved"):
        table.add_column(column, justify="right")
    for row in rows:
        saved = 1 - row["span"] / rows[0]["span"]
        table.add_row(f"{row['chunks']}", f"{row['span']:g}", f"{saved:.1%}")

    def draw(path: str) -> None:
        draw_overlap(rows, title, path)

    return rows, {"spans": rows}, [(title, table)], draw


def _measured(arguments: argparse.Namespace) -> Output:
    """Predictions of measured times, in the precision of the bench."""
    hardware = load_hardware(arguments.hardware)
    fits, constants = constants_of(arguments, MEASURED)
    tables, rows = fit_tables(arguments, fits, constants), []
    for path in arguments.results:
        table = Table()
        for column in ("", "measured us", "predicted us", "error"):
            table.add_column(column, justify="right" if column else "left")
        results = predictions(path, hardware, constants, fitted=path in arguments.calibrate)
        for prediction in results:
            times = f"{prediction.measured_us:,.1f}", f"{prediction.predicted_us:,.1f}"
            table.add_row(prediction.name, *times, f"{prediction.error:+.1%}")
        tables.append((f"{path}: predicted on {hardware.name}", table))
        rows += [
            {
                "file": path,
                "name": prediction.name,
                "measured_us": prediction.measured_us,
                "predicted_us": prediction.predicted_us,
                "error": prediction.error,
            }
            for prediction in results
        ]
    if not rows:
        raise ValueError(f"{', '.join(arguments.results)}: no row has times that can be predicted")
    result = {
        "hardware": dataclasses.asdict(hardware),
        "constants": dataclasses.asdict(constants),
        "fits": [dataclasses.asdict(fit) for fit in fits],
        "predictions": rows,
    }
    return rows, result, tables, None
