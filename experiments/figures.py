"""Figures as SVG: of a run its loss and its quality, of all runs what they say. Needs Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.files import replacing

# For colour-blind readers, too.
_COLOURS: Final = {"none": "0.4", "batch": "#e69f00", "weight": "#cc79a7", "layer": "#009e73", "rms": "#d55e00",
                   "prms": "#0072b2", "prms-12.5": "#3b9bd4", "prms-25": "#7cc0e8",
                   "prms-50": "#bcdff3"}  # fmt: skip
_FEW: Final = 25  # points, which are marked
_FAR: Final = 3  # margins; what is further is drawn there
FIGURES: Final = {  # file: row of x, row of y; None for the quality
    "loss-steps.svg": ("step", "loss"),
    "loss-seconds.svg": ("seconds", "loss"),
    "quality.svg": ("step", None),
}


OVERVIEW: Final = "overview.svg"
_KINDS: Final = {"separate": "#0072b2", "framework": "#009e73", "ours": "#d55e00"}


def draw(folder: Path, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """Draw the figures of the rows of metrics.csv: a line for every norm, the mean over the seeds."""
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
        _save(figure, folder / name)


def measured(times: Mapping[str, Any]) -> list[str]:
    """The kinds of norms whose times are known in all runs; the committed ones have none of this package."""
    return [kind for kind in _KINDS if all(kind in own["seconds"] for own in times.values())]


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}), replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def draw_overview(path: Path, results: Mapping[str, Any], times: Mapping[str, Any]) -> None:
    """Left the differences of quality, a dot for every seed, in units of the margin; right the times of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(results)
    for row, name in enumerate(names):
        own, margin = results[name]["norms"], results[name]["statement"]["margin"]
        pairs = zip(own["rms"]["quality"], own["layer"]["quality"], strict=True)
        units = [(value - other) / margin for value, other in pairs]
        left.plot([max(-_FAR, min(_FAR, unit)) for unit in units], [row] * len(units), "o", color="#d55e00", alpha=0.5)
    left.axvspan(-_FAR - 1, -1, color="0.9", linewidth=0)
    left.axvline(0, color="0.6", linewidth=0.8)
    left.set_xlim(-_FAR - 1, _FAR + 1)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("margins by which RMSNorm is better (grey: worse)", fontsize=8)
    left.set_title("Quality of RMSNorm minus LayerNorm, by seed", fontsize=9)
    names = list(times)
    kinds = {kind: _KINDS[kind] for kind in measured(times)}
    for row, name in enumerate(names):
        seconds = times[name]["seconds"]
        for index, (kind, colour) in enumerate(kinds.items()):
            own = {norm: part["step"] / seconds[kind]["layer"]["step"] for norm, part in seconds[kind].items()}
            height = row + (index - 1) * 0.25
            right.plot([own["rms"]], [height], "o", color=colour, label=None if row else f"RMSNorm, {kind}")
            ideal = {"marker": "|", "linestyle": "", "color": colour}
            right.plot([own["none"]], [height], **ideal, label=None if row or index else "no norm, of each")
    right.axvline(1, color="0.6", linewidth=0.8)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set_xlabel("time of a step over that with LayerNorm of the same kind", fontsize=8)
    right.set_title("Time", fontsize=9)
    right.legend(fontsize=7, frameon=False)
    _save(figure, path)
