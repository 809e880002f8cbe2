"""The figures of docs/mathematics.md: python docs/figures.py writes docs/images."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

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


if __name__ == "__main__":
    eps()
    rounding()
