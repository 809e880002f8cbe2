"""The benchmark as a picture: bytes per second over shapes, and the limit, a copy. Needs Matplotlib.

A copy to new memory is no limit: the system spends most of its time on providing that memory, and a layer that uses
memory again can be faster. It is in the table, and not in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rmsnorm.files import replacing
from rmsnorm.specification import dtypes
from rmsnorm.specification.version import VERSION
from timing.backends import BACKENDS
from timing.candidates import COPY, COPY_INTO
from timing.machine import environment
from timing.run import BenchRun

_LIMIT: Final = "a copy into memory in use:\nthe limit"
_STYLES: Final = {"": "-", "graph": "--"}  # dotted if compiled
_COLOURS: Final = {  # for colour-blind readers, too
    "ours": "#d55e00", "built-in": "#0072b2", "LayerNorm": "#009e73", "Liger": "#cc79a7", "quack": "#e69f00",
}  # fmt: skip


def write_plot(runs: Sequence[BenchRun], path: Path, machine: Mapping[str, Any] | None = None) -> None:
    """Draw an SVG with a panel for every backend, op and dtype, and in it a line for every candidate.

    Args:
        runs: what was measured.
        path: of the picture.
        machine: the ``environment`` of a file of results; None for this one.

    Raises:
        ValueError: nothing was timed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for record in run.records:
            if record["timing"] is not None and record["candidate"] != COPY:
                panels.setdefault((run.name, record["op"], record["dtype"]), []).append(record)
    if not panels:
        raise ValueError("compare.py: nothing was timed, expected a candidate at least to plot")
    columns = list(dict.fromkeys(key[1:] for key in panels))
    rows = list(dict.fromkeys(key[0] for key in panels))
    figure = Figure(figsize=(max(4.2 * len(columns), 6), 3.2 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
    for row, backend in enumerate(rows):
        for column, (op, dtype) in enumerate(columns):
            axis = axes[row][column]
            _panel(axis, panels.get((backend, op, dtype), []))
            axis.set_title(f"{BACKENDS[backend].title}, {op}, {dtypes.short(dtype)}", fontsize=10)
            axis.set_xlabel("shape of x" if row == len(rows) - 1 else "")
            axis.set_ylabel("GB/s (higher is better)" if column == 0 else "")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.lines}
    figure.legend(lines.values(), lines, fontsize=9, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(_title(runs, machine or environment()), fontsize=10)
    with matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}), replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def _title(runs: Sequence[BenchRun], machine: Mapping[str, Any]) -> str:
    ran = [run for run in runs if run.records]
    cores = max(run.cores for run in ran) or machine["cores"]
    devices = ", ".join(dict.fromkeys(run.device for run in ran))
    versions = ", ".join(f"{BACKENDS[run.name].title} {run.version}" for run in ran)
    return f"{devices}, {cores} threads, {machine['date'][:10]}: {versions}, rmsnorm {VERSION}"


def _panel(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    axis.set_yscale("log")
    axis.grid(True, which="major", color="0.9")
    by_size = sorted({tuple(record["shape"]) for record in records}, key=lambda shape: (math.prod(shape), shape))
    axis.set_xticks(range(len(by_size)), ["x".join(map(str, shape)) for shape in by_size], fontsize=8)
    for name in dict.fromkeys(record["candidate"] for record in records):
        own = [record for record in records if record["candidate"] == name]
        points = sorted((by_size.index(tuple(record["shape"])), record["gb_per_s"]) for record in own)
        sizes, speeds = [place for place, _ in points], [speed for _, speed in points]
        if name == COPY_INTO:
            axis.plot(sizes, speeds, "--", color="0.4", linewidth=2.5, label=_LIMIT)
            continue
        kind, _, mode = name.partition(" ")
        style = _STYLES.get(mode, ":")
        axis.plot(sizes, speeds, style, marker="o", markersize=3, color=_COLOURS[kind], label=name)
