"""The tables of docs/performance.md and benchmarks/README.md, in Markdown, from the committed runs; tested.

python benchmarks/tables.py readme    # the layers in two sentences; short: in a few cells; all-layers: in every mode
python benchmarks/tables.py kernels   # each kernel for CPUs on every processor that was measured
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LAYERS = RESULTS / "cpu-2core-epyc-zen4-2026-11-28-layers.jsonl"
ROWS = {
    ("torch", ""): "PyTorch",
    ("torch", "compiled"): "PyTorch, `torch.compile`",
    ("tf", ""): "Keras on TensorFlow, eager",
    ("tf", "graph"): "Keras on TensorFlow, `tf.function`",
    ("tf", "jit"): "Keras on TensorFlow, `jit_compile`",
    ("flax", ""): "Flax, eager",
    ("flax", "jit"): "Flax, `jax.jit`",
    ("keras-torch", ""): "Keras on PyTorch",
    ("keras-torch", "compiled"): "Keras on PyTorch, `torch.compile`",
    ("keras-jax", ""): "Keras on JAX, eager",
    ("keras-jax", "jit"): "Keras on JAX, `jax.jit`",
    ("numpy", ""): "NumPy (three lines of it)",
}
DTYPES = {"float32": "f32", "bfloat16": "bf16"}
SHAPES = ("4096x4096", "8192x1024", "512x768", "32x768", "1x4096")
SHORT = (("4096x4096", "float32"), ("4096x4096", "bfloat16"), ("32x768", "float32"), ("1x4096", "float32"))
SHORT_ROWS = (("torch", ""), ("torch", "compiled"), ("tf", ""), ("flax", "jit"), ("numpy", ""))
OPS = (("fwd", "forward"), ("fwd+bwd", "with gradients"))
OTHERS = (("speedup", "RMSNorm"), ("layer_norm_speedup", "LayerNorm"))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of all runs in a file, with the mode of a layer; eager is the empty one."""
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "candidate" in line:
            mode = line.get("mode", line["candidate"].removeprefix("ours").strip())
            yield {**line, "mode": mode.removeprefix("eager"), "shape": "x".join(map(str, line["shape"]))}


def numbers(values: Iterable[float]) -> str:
    """Two digits of the least and the largest of several runs."""
    texts = list(dict.fromkeys(f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}" for value in sorted(values)))
    return "-".join([texts[0], texts[-1]][: len(texts)]) if texts else ""


def readme(path: Path) -> str:
    """A line for each of two shapes in PyTorch, whose arrays are too small for large pages to count."""
    ours = {
        (r["mode"], r["shape"]): r
        for r in records(path)
        if r.get("ours") and (r["backend"], r["op"], r["dtype"]) == ("torch", "fwd+bwd", "float32")
    }
    lines = []
    for shape in ("512x768", "32x768"):
        eager, compiled = ([numbers([ours[mode, shape][name]]) for name, _ in OTHERS] for mode in ("", "compiled"))
        lines.append(
            f"- PyTorch, {shape}, with gradients: ours has {eager[0]} times the speed of `torch.nn.RMSNorm` and "
            f"{eager[1]} of LayerNorm; compiled by `torch.compile`, {compiled[0]} of the compiled RMSNorm and "
            f"{compiled[1]} of LayerNorm.\n"
        )
    return "".join(lines)


def short(path: Path) -> str:
    """A line for each framework and op: ours beside its own RMSNorm and LayerNorm. What is slower is bold."""
    ours = [record for record in records(path) if record.get("ours")]
    lines = [["", *(f"{shape} {DTYPES[dtype]}" for shape, dtype in SHORT)], ["---"] * (len(SHORT) + 1)]
    for (backend, mode), (op, way) in itertools.product(SHORT_ROWS, OPS):
        cells = []
        for column in SHORT:
            (own,) = (
                r
                for r in ours
                if (r["backend"], r["mode"], r["op"], r["shape"], r["dtype"]) == (backend, mode, op, *column)
            )
            texts = [f"{numbers([own[name]])} x {other}" for name, other in OTHERS]
            cells.append(", ".join(f"**{text}**" if float(text.split()[0]) < 1 else text for text in texts))
        lines.append([f"{ROWS[backend, mode]}, {way}", *cells])
    ratios = [record[name] for record in ours for name, _ in OTHERS if name in record]
    shown = [float(numbers([ratio])) for ratio in ratios]
    faster, slower = sum(ratio > 1 for ratio in shown), sum(ratio < 1 for ratio in shown)
    return (
        f"{markdown(lines)}\n"
        f"In all {len(shown)} comparisons that were run, with {len(SHAPES)} shapes and {len(DTYPES)} dtypes, ours is "
        f"faster in {faster}, slower in {slower} and equal in the rest: from {numbers([min(ratios)])} to "
        f"{numbers([max(ratios)])} times as fast.\n"
    )


def layers(columns: Iterable[tuple[str, str]], path: Path, shown: Iterable[tuple[str, str]]) -> str:
    """A line for each framework and comparison, a column for each shape."""
    ours = [record for record in records(path) if record.get("ours")]
    columns = list(columns)
    lines = [["", "against", *(f"{shape} {DTYPES[dtype]}" for shape, dtype in columns)], ["---"] * (len(columns) + 2)]
    for backend, mode in shown:
        for (name, other), (op, way) in itertools.product(OTHERS, OPS):
            own = [r for r in ours if (r["backend"], r["mode"], r["op"]) == (backend, mode, op)]
            cells = [numbers(r[name] for r in own if (r["shape"], r["dtype"]) == column) for column in columns]
            if any(cells):
                lines.append([ROWS[backend, mode], f"{other}, {way}", *cells])
    return markdown(lines)


def kernels() -> str:
    """A line for each kernel and dtype, a column for each processor and level: ours and LayerNorm, in L2 and memory."""
    columns: dict[str, dict[tuple[str, str, str], dict[str, float]]] = {}
    for path in sorted(RESULTS.glob("kernels-*.jsonl")):
        machine, *results = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        name = path.stem.removeprefix("kernels-").removesuffix(f"-{machine['date'][:10]}")
        for r in results:
            column = columns.setdefault(f"{name}, {r['level']}, {machine['date'][:10]}", {})
            column[r["kernel"], r["dtype"], r["place"]] = r["ns"]
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for kernel, dtype in dict.fromkeys(key[:2] for column in columns.values() for key in column):
        texts = []
        for column in columns.values():
            both = [column[kernel, dtype, place] for place in ("L2", "memory")]
            texts.append(
                "; ".join(" / ".join(numbers([ns[n]]) for n in ("ours", "LayerNorm") if n in ns) for ns in both)
            )
        lines.append([f"{kernel}, {dtype}", *texts])
    return markdown(lines)


def markdown(lines: Iterable[Iterable[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("|  |", "| |")


def table(name: str) -> str:
    if name == "short":
        return short(LAYERS)
    if name == "kernels":
        return kernels()
    if name == "readme":
        return readme(LAYERS)
    return layers([(shape, dtype) for dtype in DTYPES for shape in SHAPES], LAYERS, ROWS)


if __name__ == "__main__":
    sys.stdout.write(table(sys.argv[1]))
