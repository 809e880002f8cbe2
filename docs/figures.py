"""The figures of docs/mathematics.md and docs/porting.md: python docs/figures.py writes docs/images."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.variants import Variant

IMAGES = Path(__file__).with_name("images")


def save(figure: Figure, name: str) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "rmsnorm", "svg.fonttype": "none"}):
        figure.savefig(IMAGES / name, format="svg", metadata={"Date": None})


def eps() -> None:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    sizes = np.logspace(-9, 1, 61)
    rows = sizes[:, None] * np.ones((1, 4))
    for place, number, colour in (
        ("inside", 1e-6, "#d55e00"),
        ("outside", 1e-6, "#0072b2"),
        ("clamp", 1e-6, "#009e73"),
    ):
        variant = Variant(name="figure", eps=number, eps_position=place)
        axis.plot(sizes, rms_norm(rows, variant=variant)[:, 0], color=colour, label=f"eps = 1e-6, {place}")
    axis.set(xscale="log", xlabel="root mean square of a row of x", ylabel="root mean square of y")
    axis.grid(color="0.9")
    axis.legend(frameon=False)
    save(figure, "eps.svg")


def rounding() -> None:
    random = np.random.default_rng(0)
    x, gain = random.normal(size=(256, 1024)), random.normal(1.0, 0.3, 1024)
    arguments = (x.astype(ml_dtypes.bfloat16), gain.astype(ml_dtypes.bfloat16))
    once = rms_norm(*arguments, variant="standard")
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axis = figure.subplots()
    names = ("gemma4", "torch", "llama", "t5", "onnx", "apex")
    off = [ulps(rms_norm(*arguments, variant=name, eps=1e-6), once) for name in names]
    left = np.zeros(len(names))
    for distance, label, colour in ((0, "same bits", "#009e73"), (1, "1 ulp", "#d55e00"), (2, "2 ulps", "#0072b2")):
        share = np.array([100 * np.mean(o == distance) for o in off])
        axis.barh(names, share, left=left, color=colour, label=label)
        left += share
    axis.set(xlabel="% of the elements of a bfloat16 y, against one rounding at the end")
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, "rounding.svg")


def forms() -> None:
    """The forms of a Nematus model, from those of its trainers to those that are written and read again."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(-1, 101), ylim=(-1, 54))
    axis.axis("off")

    def box(x: float, y: float, width: float, lines: str, colour: str, height: float = 8) -> None:
        corner = (x, y - height / 2)
        axis.add_patch(FancyBboxPatch(corner, width, height, "round,pad=0,rounding_size=1", fc=colour, ec="0.4"))
        axis.text(x + width / 2, y, lines, ha="center", va="center", size=8, linespacing=1.4)

    def arrow(start: tuple[float, float], end: tuple[float, float], style: str) -> None:
        axis.annotate("", end, start, arrowprops={"arrowstyle": style, "color": "0.3", "shrinkA": 2, "shrinkB": 2})

    axis.text(0, 51, "from a trainer: read", size=8, weight="bold")
    axis.text(67, 51, "--to: written, and read again", size=8, weight="bold")
    box(39, 24, 20, "nematus.load:\narrays by name,\noptions", "#fff2cc", 14)
    trainers = {
        "Nematus, TensorFlow\nmodel.npz.index, .data-…": 36,
        "Nematus, Theano\nmodel.npz": 24,
        "zero\nmodel-<step>.index, .data-…": 12,
    }
    written = {
        "torch, numpy\nmodel.safetensors": 44,
        "keras\nmodel.keras": 34,
        "flax (Orbax)\nmodel.orbax/": 24,
        "tf\nmodel.npz.index (zero: model-0)": 14,
        "theano (RNNSearch)\nmodel.npz": 4,
    }
    for lines, y in trainers.items():
        box(0, y, 31, lines, "#dae8fc")
        arrow((31, y), (39, 24 + (y - 24) / 3), "-|>")
    for lines, y in written.items():
        box(67, y, 33, lines, "#d5e8d4")
        arrow((59, 24 + (y - 24) / 4), (67, y), "<|-|>")
    save(figure, "forms.svg")


if __name__ == "__main__":
    eps()
    rounding()
    forms()
