"""The loss of hash training as a picture."""

from __future__ import annotations

import json
from pathlib import Path


def draw_loss(source: Path, picture: Path) -> None:
    """Draw ``source``, the curve.json of a run: each term over the steps, a line for each layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = json.loads(source.read_text())
    widest = max(len(layers[0]) for layers in curves.values())
    figure = Figure(figsize=(3.7 * widest, 3.2 * len(curves)), dpi=110, layout="tight")
    plots = figure.subplots(len(curves), widest, squeeze=False)
    for row, (variant, layers) in zip(plots, curves.items(), strict=True):
        for plot in row[len(layers[0]) :]:
            plot.axis("off")
        for plot, term in zip(row, layers[0], strict=False):
            for layer, curve in enumerate(layers):
                shade = colormaps["viridis"](layer / max(len(layers) - 1, 1))
                plot.plot(curve[term], color=shade, linewidth=0.9)
            plot.set(title=f"{variant}: {term}", xlabel="step")
            plot.set_yscale("symlog", linthresh=1e-3)
    figure.suptitle("Hash training, dark to light: first to last layer")
    figure.savefig(picture)
