"""How exact each framework's own RMSNorm is, and ours: the page docs/accuracy.md.

python benchmarks/accuracy.py --json benchmarks/accuracy.json             # measures every layer, in 20 minutes
python benchmarks/accuracy.py --json benchmarks/accuracy.json --layer torch/ours --layer torch/own   # some of them
python benchmarks/accuracy.py --from benchmarks/accuracy.json > docs/accuracy.md                     # writes the page
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines import processor

LAYERS = {  # name: (package, target, variant, init, whether it is compiled)
    "torch/own": ("torch", "torch.nn:RMSNorm", "torch", {}, False),
    "torch/own, torch.compile": ("torch", "torch.nn:RMSNorm", "torch", {}, True),
    "torch/ours": ("torch", "rmsnorm.torch_impl:RMSNorm", "torch", {}, False),
    "torch/ours, torch.compile": ("torch", "rmsnorm.torch_impl:RMSNorm", "torch", {}, True),
    "keras/own": ("keras", "keras.layers:RMSNormalization", "keras", {}, False),
    "keras/own, tf.function": ("keras", "keras.layers:RMSNormalization", "keras", {}, True),
    "keras/ours": ("keras", "rmsnorm.tf_impl:RMSNormalization", "keras", {}, False),
    "keras/ours, tf.function": ("keras", "rmsnorm.tf_impl:RMSNormalization", "keras", {}, True),
    "flax/own": ("flax", "flax.nnx:RMSNorm", "flax", {}, False),
    "flax/own, jax.jit": ("flax", "flax.nnx:RMSNorm", "flax", {}, True),
    "flax/ours": ("flax", "rmsnorm.flax_impl:RMSNorm", "flax", {}, False),
    "flax/ours, jax.jit": ("flax", "rmsnorm.flax_impl:RMSNorm", "flax", {}, True),
}
QUANTITIES = ("y", "dx", "dscale")
DTYPES = ("float16", "bfloat16", "float32", "float64")
EVERY_NUMBER = ("float16", "bfloat16")
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
HEAD = """# Accuracy of every framework's RMSNorm

This page says how many results of each framework's own RMSNorm, and of ours, have the bits of the golden, which are
those of the correctly rounded result, and how far the others are from it at most. `python benchmarks/accuracy.py`
measures this in the cases of `rmsnorm.parity.check`: rows of very different norm with outliers, one to five axes, 1 to
66,001 columns, up to 65,792 rows, rows of zeros, of equal numbers, with NaN and infinity.

A cell has two numbers. The first is the share of results with the right bits, as a mean over the cases. The second is
the largest distance. Its unit u is the rounding error of the terms that add up to an element, so that a sum that
cancels is measured by its terms. A layer that takes no such x has a dash.
"""
EVERY = """
## Every number of 16 bits

Here the first of the six elements of a row is each of the 65,536 numbers of the dtype, with NaN and infinity. The other
elements are fixed, in three sizes. A cell has the smallest share of right bits of the three, and the largest distance.
"""
BATCHES = """
## Does a row depend on how many rows there are?

The same row was computed alone and in calls of up to 4,096 rows, of {widths} elements, in float32 and bfloat16, in y
and dx; dscale was computed in two equal calls. "from N rows" names the smallest call in which a bit differs. A model
needs "no" if its answer must not depend on the other requests of a batch.
"""


def measure(name: str) -> dict[str, Any]:
    """The records of one layer."""
    from rmsnorm.identify.batches import dependences
    from rmsnorm.identify.findings import Findings
    from rmsnorm.identify.probe import open_probe
    from rmsnorm.parity import check
    from rmsnorm.parity.beyond import Beyond
    from rmsnorm.specification.variants import PRESETS
    from rmsnorm.targets import open_target

    package, layer, variant, init, compiled = LAYERS[name]
    target = open_target(layer, init=init)
    if compiled:
        target = target.compiled
    cells: dict[str, dict[str, list[float]]] = {}
    report = check(target, variant, dtypes=DTYPES)
    for record in report.run.records:
        cells.setdefault(f"{record.dtype} {record.quantity}", []).append((record.bit_identical, record.parity_ratio))
    every = {}
    for dtype in EVERY_NUMBER:
        asked = Beyond(target, PRESETS[variant], gradients=target.differentiable)
        verdicts = asked.every_number(dtype, extremes=True)
        every |= {f"{dtype} {entry.quantity}": (entry.bit_identical, entry.parity_ratio) for entry in verdicts}
    probe = open_probe(target, 64, float("inf"), float("inf"), Findings())
    answers, (widths, _) = dependences(probe, gradients=target.differentiable)
    return {
        "layer": name, "package": package, "version": version(package), "cells": cells, "every": every,
        "dependences": [vars(entry) for entry in answers], "widths": widths,
    }  # fmt: skip


def page(data: dict[str, Any]) -> str:
    """The page of all layers."""
    lines = [HEAD, f"{data['date']}, {data['processor']}, Python {data['python']}.", ""]
    for quantity in QUANTITIES:
        lines += [f"## {quantity}", "", "| layer | " + " | ".join(SHORT.values()) + " |", "| --- " * 5 + "|"]
        for layer in data["layers"]:
            cells = [_cell(layer["cells"].get(f"{dtype} {quantity}")) for dtype in DTYPES]
            lines.append(f"| {_name(layer)} | {' | '.join(cells)} |")
        lines.append("")
    lines += [EVERY.strip(), "", "| layer | f16 y | f16 dx | bf16 y | bf16 dx |", "| --- " * 5 + "|"]
    for layer in data["layers"]:
        names = [f"{dtype} {quantity}" for dtype in ("float16", "bfloat16") for quantity in ("y", "dx")]
        cells = [_cell([layer["every"][name]] if name in layer["every"] else None) for name in names]
        lines.append(f"| {_name(layer)} | {' | '.join(cells)} |")
    widths = sorted({width for layer in data["layers"] for width in layer["widths"]})
    lines += ["", BATCHES.strip().format(widths=", ".join(map(str, widths))), "", "| layer | y | dx | dscale |",
              "| --- " * 4 + "|"]  # fmt: skip
    for layer in data["layers"]:
        first = {entry["quantity"]: entry for entry in reversed(layer["dependences"])}
        lines.append(f"| {_name(layer)} | {' | '.join(_dependence(first.get(name)) for name in QUANTITIES)} |")
    return "\n".join(lines) + "\n"


def _name(layer: dict[str, Any]) -> str:
    framework, _, which = layer["layer"].partition("/")
    return f"{framework} {layer['version']}, {which}"


def _cell(records: list[list[float]] | None) -> str:
    if not records:
        return "-"
    shares, ratios = zip(*records, strict=True)
    ratio = max(ratios)
    share = f"{100 * sum(shares) / len(shares):.2f} %"
    distance = f"{ratio:.2g}" if ratio < 99 else f"{ratio:.0f}"
    return f"{share}, {distance} u" if ratio < 1e4 else f"{share}, wrong"


def _dependence(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "no"
    if not entry["count"]:
        return "differs from call to call"
    share, distance = f"{100 * entry['share']:.2g} %", f"{entry['distance']:.0f} ulp"
    return f"from {entry['count']} rows: {share}, {distance} ({SHORT[entry['dtype']]}, {entry['width']} elements)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", choices=LAYERS, help="a layer to measure; default: all")
    parser.add_argument("--json", type=Path, help="measure, and write the numbers to this file")
    parser.add_argument("--from", dest="source", type=Path, help="write the page of these numbers to standard output")
    parser.add_argument("--one", choices=LAYERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
    elif arguments.source:
        print(page(json.loads(arguments.source.read_text(encoding="utf-8"))), end="")
    elif arguments.json:
        layers = []
        for name in arguments.layer or LAYERS:
            print(name, file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
            layers.append(json.loads(done.stdout.splitlines()[-1]))
        about = {"date": datetime.date.today().isoformat(), "processor": processor()}
        data = {**about, "python": platform.python_version(), "layers": layers}
        arguments.json.write_text(json.dumps(data), encoding="utf-8")
    else:
        parser.error("expected --json to measure, or --from to write the page; pass one of them")


if __name__ == "__main__":
    main()
