"""The picture of docs/performance.md, from the committed run: python benchmarks/picture.py docs/images/torch.svg"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from tables import LAYERS, records

LINES = {"ours": ("rmsnorm", "#d55e00"), "built-in": ("torch.nn.RMSNorm", "#0072b2")}  # for colour-blind readers, too
OPS = {"fwd": "forward", "fwd+bwd": "with gradients"}


def main(path: Path) -> None:
    """Eager PyTorch in float32: how many times as fast as the built-in layer ours is, over the shapes."""
    speeds = {
        (record["candidate"], record["op"], record["shape"]): record["gb_per_s"]
        for record in records(LAYERS)
        if record["backend"] == "torch" and record["dtype"] == "float32" and "timing" in record
    }
    shapes = sorted({shape for _, _, shape in speeds}, key=lambda shape: (math.prod(map(int, shape.split("x"))), shape))
    ratios = [speeds["ours", op, shape] / speeds["built-in", op, shape] for op in OPS for shape in shapes]
    figure = Figure(figsize=(4, 5.6), layout="constrained")  # inches: narrow, so that a phone shows it in full size
    for axis, (op, title) in zip(figure.subplots(2, 1, sharex=True), OPS.items(), strict=True):
        for candidate, (label, colour) in LINES.items():
            values = [speeds[candidate, op, shape] for shape in shapes]
            axis.plot(range(len(shapes)), values, marker="o", color=colour, label=label)
        axis.set(title=title, xlabel="shape of x", ylabel="GB/s (higher is better)", ylim=(0, None))
        axis.set_xticks(range(len(shapes)), shapes, fontsize=8)
        axis.grid(True, color="0.9")
        axis.label_outer()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    winner = "rmsnorm" if min(ratios) > 1 else "torch.nn.RMSNorm" if max(ratios) < 1 else "Neither"
    figure.suptitle(
        f"{winner} is faster in every shape: {min(ratios):.1f} to {max(ratios):.0f} times\n"
        "PyTorch without compilation, float32, two cores of\nan AMD EPYC, 2026-11-23, with the kernels of that day",
        fontsize=10,
    )
    with matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
