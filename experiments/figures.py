"""Figures of a run, as SVG: loss over steps, loss over seconds, quality over steps. Needs Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.files import replacing

# For colour-blind readers, too.
_COLOURS: Final = {"none": "0.4", "batch": "#e69f00", "weight": "#cc79a7", "layer": "#009e73", "rms": "#d55e00",
                   "prms": "#0072b2", "rms-channels": "#0072b2"}  # fmt: skip
_FEW: Final = 25  # points, which are marked
FIGURES: Final = {  # file: row of x, row of y; None for the quality
    "loss-steps.svg": ("step", "loss"),
    "loss-seconds.svg": ("seconds", "loss"),
    "quality.svg": ("step", None),
}


def draw(folder: Path, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """Draw the figures of the rows of metrics.csv: a line for every norm, the mean over the seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    for name, (x, y) in FIGURES.items():
        y = y or result["quality"]
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axis = figure.subplots()
        for norm in result["norms"]:
            lines = [[row for row in rows if row["norm"] == norm and row["seed"] == s and y in row]
                     for s in result["seeds"]]  # fmt: skip
            across, up = (np.mean([[row[column] for row in line] for line in lines], axis=0) for column in (x, y))
            axis.plot(
                across,
                up,
                color=_COLOURS[norm],
                label=norm,
                linewidth=1.2,
                marker="o" if len(up) < _FEW else None,
                markersize=3,
            )
        axis.set_xlabel({"step": "steps", "seconds": "seconds of training"}[x])
        axis.set_ylabel(y)
        axis.grid(True, color="0.9")
        axis.legend(fontsize=8, frameon=False)
        axis.set_title(f"{result['title']}, {len(result['seeds'])} seeds", fontsize=9)
        with (
            matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}),
            replacing(folder / name) as temporary,
        ):
            figure.savefig(temporary, format="svg", metadata={"Date": None})
