"""The tables of docs/simulator.md.

The ratios of the Helix paper as the simulator computes them, and what it predicts of the results in
bench/results and of layouts that are not measured yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import show
from bench.helix import shapes
from bench.helix.steps import LONG, STEP
from bench.report.markdown import Line, table
from jspec.cli import simulate_paper
from jspec.helix.simulator import (
    Constants,
    Hardware,
    Prediction,
    calibrated,
    load_fits,
    load_hardware,
    predicted_us,
    predictions,
)
from jspec.helix.simulator.shapes import shipped

RESULTS = Path(__file__).parents[1] / "results"
CALIBRATION = ("collectives", "helix-attention")  # results that constants are fitted to
BFLOAT16 = Constants(bytes_per_value=2, bytes_per_activation=2)
# A result of 8 GPUs is predicted from the machine with the most results.
MACHINE = "h200"
SIMULATED = tuple(dict.fromkeys([*LONG, *shapes.quick()]))  # cases of `long_table`


def calibration(folder: Path) -> list[Path]:
    """The results of a machine that constants are fitted to."""
    paths = (folder / f"{name}.json" for name in CALIBRATION)
    return [path for path in paths if path.is_file()]


def constants_of(folder: Path, hardware: Hardware) -> Constants:
    """The constants of a machine in bfloat16, from its results."""
    fits = [fit for path in calibration(folder) for fit in load_fits(path)]
    return calibrated(BFLOAT16, hardware, fits)


def predicted(folder: Path) -> list[Prediction]:
    """Predictions of all results of a machine but those of a fit; the last result of each case."""
    hardware, fitted = load_hardware(folder.name), calibration(folder)
    constants = constants_of(folder, hardware)
    paths = sorted(folder.glob("helix*.json"), key=_date)
    by_name = {
        prediction.name: prediction
        for path in paths
        for prediction in predictions(path, hardware, constants, fitted=path in fitted)
    }
    return list(by_name.values())


def _date(path: Path) -> str:
    return show.read(path)["machine"]["date"]


def machines(results: Path) -> Iterator[Path]:
    """The folders of machines that the simulator knows and whose results it can predict."""
    for name in shipped("hardware"):
        folder = results / name
        if calibration(folder) and list(folder.glob("helix*.json")):
            yield folder


def layout(case: dict[str, Any]) -> str:
    """A layout in words, such as ``KVP2 x TPA2``."""
    axes = [f"{axis.upper()}{case[axis]}" for axis in ("kvp", "tpa") if case[axis] > 1]
    name = "Medha " if case["strategy"] == "medha" else ""
    copies = ", copies" if case["strategy"] == "tp" else ""
    axes = [f"TP{case['kvp'] * case['tpa']}"] if copies else axes
    axes += [f"EP{case['ep']}"] if case.get("ep", 1) > 1 else []
    return name + (" x ".join(axes) or "one GPU") + copies


def _what(operation: str, case: dict[str, Any]) -> dict[str, str]:
    """The cells that say what was measured."""
    if operation == "step":
        tokens = case["gamma"] + 1 if case["draft"] == "verify" else 1
        name = f"step, {_model(case)}"
    else:
        tokens, name = case["T"], f"attention, {case['heads']} heads"
        name += f", latent {case['latent']}" if case["latent"] else ""
    sizes = {"B": f"{case['B']}", "S": f"{case['S'] // 1024}K", "tokens": f"{tokens}"}
    return {"what": name} | sizes | {"layout": layout(case)}


def _model(case: dict[str, Any]) -> str:
    return case["shape"] + (f", {case['layers']} layers" if case.get("layers") else "")


def measured_table(results: Path) -> str:
    """Predicted times next to measured ones."""
    lines = [
        {"card": folder.name.upper()}
        | _what(prediction.operation, prediction.case)
        | {"measured us": f"{prediction.measured_us:,.1f}"}
        | {"predicted us": f"{prediction.predicted_us:,.1f}", "error": f"{prediction.error:+.1%}"}
        for folder in machines(results)
        for prediction in predicted(folder)
    ]
    return table([Line(cells) for cells in lines], 6)


def long_table(results: Path) -> str:
    """Simulated steps at a million tokens, with the measured ones as far as there are any."""
    hardware, folder = load_hardware(MACHINE), results / MACHINE
    constants = constants_of(folder, hardware)
    measured = {_words(prediction): prediction.measured_us for prediction in predicted(folder)}
    lines = []
    for text in SIMULATED:
        case = STEP.case(text)
        what, gpus = _what("step", case), case["kvp"] * case["tpa"]
        simulated = predicted_us("step", case, hardware, constants)
        time = measured.get(("step", *what.values()))
        lines.append(
            {"model": _model(case), "GPUs": f"{gpus}", "layout": what["layout"]}
            | {"simulated ms": f"{simulated / 1e3:.2f}"}
            | {"measured ms": "not yet" if time is None else f"{time / 1e3:.2f}"}
            | {"`python -m bench helix --case`": f"`op=step,{text}`"}
        )
    lines.sort(key=lambda line: int(line["GPUs"]))
    return table([Line(cells) for cells in lines], 3)


def _words(prediction: Prediction) -> tuple[str, ...]:
    return (prediction.operation, *_what(prediction.operation, prediction.case).values())


def paper_tables(results: Path) -> dict[str, str]:
    """The ratios of the paper, and HOP-B at figure 3's batch, by name."""
    folder, hardware = results / MACHINE, load_hardware("gb200")
    fits = [fit for path in calibration(folder) for fit in load_fits(path)]
    arguments = argparse.Namespace(set=[], calibrated_on=MACHINE, hardware=hardware.name)
    variants = list(simulate_paper.variants(arguments, fits))
    rows, _ = simulate_paper.paper_rows(hardware, variants)
    ratios = [Line(dict(zip(row, simulate_paper.ratio_cells(row), strict=True))) for row in rows]
    columns = simulate_paper.OVERLAP_COLUMNS
    overlaps = [
        Line(dict(zip(columns, simulate_paper.overlap_cells(row), strict=True)))
        for row in simulate_paper.overlap_rows(hardware, Constants())
    ]
    return {"paper": table(ratios, 2), "HOP-B": table(overlaps, 2)}


def tables(results: Path) -> dict[str, str]:
    """The tables of docs/simulator.md by name."""
    measured = {"measured": measured_table(results), "long": long_table(results)}
    return paper_tables(results) | measured
