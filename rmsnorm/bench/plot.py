"""The benchmark as a picture: bytes per second over size, with the copies as the upper limit. Needs Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rmsnorm import dtypes
from rmsnorm.bench.backends import BACKENDS
from rmsnorm.bench.run import BackendRun
from rmsnorm.files import replacing

_LIMITS: Final = {"copy": "-", "copy into": "--"}
_STYLES: Final = {"": "-", "graph": "--"}  # dotted if compiled
_COLOURS: Final = {"ours": "#d55e00", "built-in": "#0072b2", "LayerNorm": "#009e73"}  # for colour-blind readers, too


def write_plot(runs: Sequence[BackendRun], path: Path) -> None:
    """Draw an SVG with a panel for every backend, op and dtype, and in it a line for every candidate.

    Raises:
        ValueError: nothing was timed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for record in run.records:
            if record["timing"] is not None:
                panels.setdefault((run.name, record["op"], record["dtype"]), []).append(record)
    if not panels:
        raise ValueError("rmsnorm bench: nothing was timed, expected a candidate at least to plot")
    columns = list(dict.fromkeys(key[1:] for key in panels))
    rows = list(dict.fromkeys(key[0] for key in panels))
    figure = Figure(figsize=(4.2 * len(columns) + 1.8, 3.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
    for row, backend in enumerate(rows):
        for column, (op, dtype) in enumerate(columns):
            axis = axes[row][column]
            _panel(axis, panels.get((backend, op, dtype), []))
            axis.set_title(f"{BACKENDS[backend].title}, {op}, {dtypes.short(dtype)}", fontsize=10)
            axis.set_xlabel("bytes of x" if row == len(rows) - 1 else "")
            axis.set_ylabel("GB/s" if column == 0 else "")
        axes[row][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}), replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def _panel(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(True, which="major", color="0.9")
    for name in dict.fromkeys(record["candidate"] for record in records):
        points = sorted(
            (record["moved_bytes"], record["gb_per_s"]) for record in records if record["candidate"] == name
        )
        times = 2 if records[0]["op"] == "fwd" else 5  # how often moved_bytes counts the bytes of x
        sizes, speeds = [moved / times for moved, _ in points], [speed for _, speed in points]
        if name in _LIMITS:
            axis.plot(sizes, speeds, _LIMITS[name], color="0.4", linewidth=2.5, label=name)
            continue
        kind, _, mode = name.partition(" ")
        style = _STYLES.get(mode, ":")
        axis.plot(sizes, speeds, style, marker="o", markersize=3, color=_COLOURS[kind], label=name)
