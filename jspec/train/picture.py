"""The loss of hash training as a picture."""

from __future__ import annotations

import json
from pathlib import Path


def draw_loss(source: Path, picture: Path) -> None:
    """Draw ``source``, the curve.json of a run: each term over the steps, a line for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = json.loads(source.read_text())
    terms = list(next(iter(curves.values()))[0])
    figure, plots = plt.subplots(
        *(len(curves), len(terms)), figsize=(11, 3.2 * len(curves)), dpi=110, squeeze=False
    )
    for row, (variant, layers) in zip(plots, curves.items(), strict=True):
        for plot, term in zip(row, terms, strict=True):
            for layer, curve in enumerate(layers):
                shade = plt.get_cmap("viridis")(layer / max(len(layers) - 1, 1))
                plot.plot(curve[term], color=shade, linewidth=0.9)
            plot.set(title=f"{variant}: {term}", xlabel="step")
            plot.set_yscale("symlog", linthresh=1e-3)
    figure.suptitle("Hash training, dark to light: first to last layer")
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)
