"""The figures of docs/mathematics.md, porting.md and architecture.md: python docs/figures.py writes docs/images."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib
import ml_dtypes
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.specification.variants import Variant

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


def canvas(height: float, top: float) -> tuple[Figure, Axes]:
    """A figure for boxes and arrows, 100 units wide."""
    figure = Figure(figsize=(7, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(-1, 101), ylim=(-1, top))
    axis.axis("off")
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, lines: str, colour: str, height: float = 8) -> None:
    corner = (x, y - height / 2)
    axis.add_patch(FancyBboxPatch(corner, width, height, "round,pad=0,rounding_size=1", fc=colour, ec="0.4"))
    axis.text(x + width / 2, y, lines, ha="center", va="center", size=8, linespacing=1.4)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "-|>") -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": style, "color": "0.3", "shrinkA": 2, "shrinkB": 2})


def forms() -> None:
    """The forms of a Nematus model, from those of its trainers to those that are written and read again."""
    figure, axis = canvas(3.8, 54)
    axis.text(0, 51, "from a trainer: read", size=8, weight="bold")
    axis.text(67, 51, "--to: written, and read again", size=8, weight="bold")
    box(axis, 39, 24, 20, "nematus.load:\narrays by name,\noptions", "#fff2cc", 14)
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
        box(axis, 0, y, 31, lines, "#dae8fc")
        arrow(axis, (31, y), (39, 24 + (y - 24) / 3))
    for lines, y in written.items():
        box(axis, 67, y, 33, lines, "#d5e8d4")
        arrow(axis, (59, 24 + (y - 24) / 4), (67, y), "<|-|>")
    save(figure, "forms.svg")


# Parts from the top to the bottom, each with what it is for. A test holds the order to the table in CONTRIBUTING.md.
LEVELS: Final = (
    {"cli": "a file for each command"},
    {"conversion": "replace", "explaining": "which code runs"},
    {"parity": "check, vectors"},
    {"identify": "which variant is it?", "nematus": "models of Nematus and zero"},
    {"accuracy": "how far apart, and how far it may be", "targets": "anybody's callable, called with arrays"},
    {"tf_impl": "TensorFlow, Keras"},
    {"numpy_impl": "the golden", "torch_impl": "PyTorch", "flax_impl": "JAX, Flax"},
    {"cpu": "kernels, in C++", "files": "read and written safely", "rmsnorm": "what import gives"},
    {"gpu": "kernels, in Triton"},
    {"specification": "what a call means"},
)
COLOURS: Final = (
    "#f8cecc",
    "#e1d5e7",
    "#e1d5e7",
    "#e1d5e7",
    "#fff2cc",
    "#d5e8d4",
    "#d5e8d4",
    "#dae8fc",
    "#dae8fc",
    "#dae8fc",
)


def architecture() -> None:
    """The parts of the package: each one imports only from lower levels."""
    figure, axis = canvas(5.1, 98)
    for level, (parts, colour) in enumerate(zip(LEVELS, COLOURS, strict=True)):
        width = 96 / len(parts)
        for place, (part, purpose) in enumerate(parts.items()):
            y = 93 - 9.8 * level
            box(axis, 4 + place * width, y, width - 1.5, "", colour, 9)
            middle = 4 + place * width + (width - 1.5) / 2
            axis.text(middle, y + 2, part, ha="center", va="center", size=8, weight="bold")
            axis.text(middle, y - 2.2, purpose, ha="center", va="center", size=7)
    arrow(axis, (1, 97), (1, 0))
    save(figure, "architecture.svg")


def call() -> None:
    """The way of one call of rms_norm in PyTorch."""
    figure, axis = canvas(5.2, 108)
    box(axis, 18, 102, 64, "rms_norm(x, gain, variant=..., mask=..., ...)\ntorch_impl/functional.py", "#d5e8d4", 10)
    box(axis, 18, 86, 64, "derive: the variant, with its eps and partial\nspecification/variants.py", "#dae8fc", 10)
    checked = "resolve: axes, sizes, dtypes, roundings; or an error\nspecification/resolve.py"
    box(axis, 18, 70, 64, checked, "#dae8fc", 10)
    axis.text(100, 78, "kept for the next call\nof these shapes\nand options", ha="right", va="center", size=7)
    box(axis, 18, 54, 64, "which code computes it?\nengine_of in engines.py", "#fff2cc", 10)
    for start, end in ((97, 91), (81, 75), (65, 59)):
        arrow(axis, (50, start), (50, end))
    ways = (
        "a compiler or a transform\nfollows: the operators of\noperators.py, or plain\noperations of operations.py",
        "rows in memory, and\na kernel for them:\ncpu/launch.py runs\nthe kernels of cpu/native",
        "anything else:\nplain operations\nof operations.py",
    )
    for place, lines in enumerate(ways):
        box(axis, place * 34, 32, 32, lines, "#e1d5e7", 18)
        arrow(axis, (50 + 12 * (place - 1), 49), (16 + 34 * place, 41))
        arrow(axis, (16 + 34 * place, 23), (50 + 12 * (place - 1), 13))
    result = "y, and h = x + residual; x, gain, mask, gate and 1 / rho are kept for the gradients"
    box(axis, 4, 7, 92, f"{result}\nautograd.py: backward takes one of the same ways", "#d5e8d4", 11)
    save(figure, "call.svg")


if __name__ == "__main__":
    eps()
    rounding()
    forms()
    architecture()
    call()
