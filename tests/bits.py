"""Every framework against the golden, bit by bit, on rows that an ordinary test does not draw.

    python tests/bits.py --calls 2000 --backend torch

A call has 64 rows, each of a kind (KINDS), drawn as widely as its format goes; eps from 0 to 1e30; partial statistics,
residuals and mixed formats. Only calls that kernels compute are drawn: the recipe has no bits to keep, and bounds that
the parity kit knows. What differs is counted by kind of row, quantity and format. The sign of a zero counts; NaN equals
NaN. One class is counted by itself: rows with subnormal numbers in TensorFlow and JAX.
"""

from __future__ import annotations

import argparse
import collections
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rmsnorm import numpy_impl
from rmsnorm.engines import prepare, refusal
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import PRESETS
from rmsnorm.targets.bridges import bridge

Array = np.ndarray[Any, Any]
WIDTHS = (1, 2, 3, 8, 33, 64, 257)
ROWS = 64
EPS = (0.0, 1e-12, 1e-6, 1e-5, 0.3, 1e30)
FORMATS = tuple(name for name in dtypes.FLOATS if name != "float64")


def _spread(random: np.random.Generator, n: int, dtype: str, low: float, high: float) -> Array:
    """Numbers whose logarithms are uniform."""
    return np.exp(random.uniform(np.log(low), np.log(high), n)) * random.choice([-1.0, 1.0], n)


def _one_hot(random: np.random.Generator, n: int, dtype: str) -> Array:
    row = np.where(random.random(n) < 0.5, 0.0, -0.0)
    row[random.integers(n)] = random.normal()
    return row


def _heavy(random: np.random.Generator, n: int, dtype: str) -> Array:
    row = random.normal(size=n)
    row[random.integers(n)] *= 1e3
    return row


def _special(number: float) -> Callable[..., Array]:
    def row(random: np.random.Generator, n: int, dtype: str) -> Array:
        values = random.normal(size=n)
        values[random.random(n) < 0.2] = number
        return values

    return row


KINDS: dict[str, Callable[[np.random.Generator, int, str], Array]] = {
    "ordinary": lambda random, n, dtype: random.normal(size=n),
    "ReLU": lambda random, n, dtype: np.maximum(random.normal(size=n), 0.0),
    "signed zeros": lambda random, n, dtype: random.normal(size=n) * random.choice([0.0, -0.0, 1.0], n),
    "all zero": lambda random, n, dtype: random.choice([0.0, -0.0], n),
    "constant": lambda random, n, dtype: np.full(n, random.normal()),
    "one-hot": _one_hot,
    "heavy tail": _heavy,
    "large": lambda random, n, dtype: (
        random.uniform(0.1, 0.9, n) * float(ml_dtypes.finfo(dtype).max) * random.choice([-1.0, 1.0], n)
    ),
    "small": lambda random, n, dtype: _spread(
        random, n, dtype, dtypes.smallest_subnormal(dtype), dtypes.smallest_subnormal(dtype) * 1e4
    ),
    "any size": lambda random, n, dtype: _spread(
        random, n, dtype, dtypes.smallest_subnormal(dtype), float(ml_dtypes.finfo(dtype).max) / 2
    ),
    "infinite": _special(np.inf),
    "NaN": _special(np.nan),
}


@dataclass(frozen=True)
class Problem:
    """Arrays of one call and its options."""

    options: dict[str, Any]
    arrays: dict[str, Array | None]  # x, scale, bias, residual, dy, dh
    kinds: list[str]  # of the rows of x
    kinds_dy: list[str]


def draw(random: np.random.Generator) -> Problem:
    """A call that a kernel computes."""
    while True:
        problem = _draw(random)
        arrays, options = problem.arrays, (problem.options["variant"], None, None, -1, None, None)
        prepared = prepare("draw", options, *(arrays[name] for name in ("x", "scale", "bias")))
        if refusal(prepared.kernel_call, "cpu", prepared.formats) is None:
            return problem


def _draw(random: np.random.Generator) -> Problem:
    n, dtype = int(random.choice(WIDTHS)), str(random.choice(FORMATS))
    preset = PRESETS[str(random.choice(list(PRESETS)))]
    eps, partial = float(random.choice(EPS)), random.choice([None, None, None, 0.3])
    variant = preset.replace(eps=eps, partial=partial) if random.random() < 0.8 else preset
    names = list(KINDS)

    def rows(kinds: list[str]) -> Array:
        with np.errstate(over="ignore"):
            return np.stack([KINDS[kind](random, n, dtype) for kind in kinds]).astype(dtype)

    def parameter(chance: float, width: str) -> Array | None:
        if random.random() > chance:
            return None
        values = random.normal(size=n) * random.choice([1.0, 1.0, 1.0, 0.0, -0.0, 1e4], n)
        return values.astype(width)

    width = dtype if random.random() < 0.7 else str(random.choice(FORMATS))
    kinds = [names[i] for i in random.integers(len(names), size=ROWS)]
    kinds_dy = [names[i] for i in random.integers(len(names), size=ROWS)]
    x, dy = rows(kinds), rows(kinds_dy)
    for i in range(0, ROWS, 8):  # along x: what the projection leaves is eps alone
        dy[i], kinds_dy[i] = x[i], "as x"
    has_residual = random.random() < 0.2
    residual = rows(random.permutation(kinds).tolist()) if has_residual else None
    arrays = {
        "x": x, "scale": parameter(0.8, width), "bias": parameter(0.3, width), "residual": residual,
        "dy": dy, "dh": rows(random.permutation(kinds).tolist()) if has_residual else None,
    }  # fmt: skip
    result = numpy_impl.rms_norm(*(arrays[name] for name in ("x", "scale", "bias")), variant=variant)
    with np.errstate(over="ignore"):
        arrays["dy"] = dy.astype(result.dtype)
    return Problem({"variant": variant}, arrays, kinds, kinds_dy)


def run(
    framework: Any, problem: Problem, send: Callable[[Any], Any], fetch: Callable[[Any], Array]
) -> dict[str, Array]:
    """The results of a framework."""
    arrays = {name: send(array) for name, array in problem.arrays.items()}
    dy, dh = arrays.pop("dy"), arrays.pop("dh")
    positional = [arrays.pop(name) for name in ("x", "scale", "bias")]
    options = {**problem.options, **arrays}
    outputs = framework.rms_norm(*positional, return_inverse_rms=True, **options)
    gradients = framework.rms_norm_vjp(dy if dh is None else (dy, dh), *positional, **options)
    names = ["y", "inverse_rms"] if len(outputs) == 2 else ["y", "h", "inverse_rms"]
    results = dict(zip([*names, "dx", "dscale", "dbias", "dresidual"], [*outputs, *gradients], strict=False))
    return {name: fetch(value) for name, value in results.items() if value is not None}


def frameworks(names: list[str]) -> Iterator[tuple[str, Any, Callable[[Any], Any], Callable[[Any], Array]]]:
    """Name, module, and how an array goes in and comes out."""
    if "numpy" in names:
        yield "numpy", fast, lambda array: array, lambda array: array
    for name in ("torch", "tf", "flax"):
        if name in names:
            between = bridge(name)
            send = lambda array, between=between: None if array is None else between.send(array)  # noqa: E731
            yield name, importlib.import_module(f"rmsnorm.{name}_impl"), send, between.fetch


def compare(got: Array, want: Array) -> dict[str, Array]:
    """Where they differ, by the sort of difference."""
    zero = (want == 0) & (got == 0)
    nan = np.isnan(got) | np.isnan(want)
    value = (got != want) & ~(np.isnan(got) & np.isnan(want))
    return {
        "sign of zero": zero & (np.signbit(got) != np.signbit(want)),
        "NaN in one": value & nan,
        "infinity in one": value & ~nan & (np.isinf(got) | np.isinf(want)),
        "value": value & ~nan & ~np.isinf(got) & ~np.isinf(want),
    }


def has_subnormal(problem: Problem, quantity: str, want: dict[str, Array]) -> Array:
    """Where an argument that enters the row, or the exact result, is subnormal; not in float16."""
    names = ["x", "residual", "scale", "bias", *(["dy", "dh"] if quantity.startswith("d") else [])]
    golden, result = want[quantity], is_subnormal(want[quantity])
    for array in (problem.arrays[name] for name in names):
        if array is not None:
            found = is_subnormal(array)
            result = result | (found.any(axis=1, keepdims=True) if min(found.ndim, golden.ndim) == 2 else found.any())
    return result


def is_subnormal(array: Array) -> Array:
    least = (
        0.0 if array.dtype == np.float16 else float(ml_dtypes.finfo(array.dtype).smallest_normal)
    )  # exact in float32
    return (array != 0) & (np.abs(array.astype(np.float64)) < least)


@dataclass
class Totals:
    """By sort of difference, framework, quantity, format, and kind of row."""

    elements: collections.Counter[tuple[str, ...]] = field(default_factory=collections.Counter)
    differing: collections.Counter[tuple[str, ...]] = field(default_factory=collections.Counter)
    compared: int = 0
    calls: int = 0


def count(
    calls: int,
    seed: int,
    backends: list[str],
    examples: int = 0,
) -> Totals:
    """Compares so many calls; prints so many examples of each sort of difference."""
    totals = Totals()
    shown = collections.Counter[tuple[str, ...]]()
    opened, random = list(frameworks(backends)), np.random.default_rng(seed)
    for _ in track(range(calls), "calls", disable=calls < 10):
        problem = draw(random)
        want = run(numpy_impl, problem, lambda a: a, lambda a: a)
        totals.calls += 1
        for name, framework, send, fetch in opened:
            with np.errstate(all="ignore"):
                results = run(framework, problem, send, fetch)
            for quantity, golden in want.items():
                if (name, quantity) == ("flax", "inverse_rms"):
                    continue  # which the recipe computes
                got = results[quantity]
                totals.compared += golden.size
                sorts = compare(got, golden)
                is_special = name in ("tf", "flax") and has_subnormal(problem, quantity, want)
                special = np.logical_or.reduce([differs & is_special for differs in sorts.values()])
                sorts = {sort: differs & ~special for sort, differs in sorts.items()} | {"subnormal": special}
                for sort, differs in sorts.items():
                    for i, kind in _rows(problem, quantity, golden):
                        key = (sort, name, quantity, dtypes.short(golden.dtype.name), kind)
                        totals.elements[key] += differs[i].size
                        totals.differing[key] += int(differs[i].sum())
                        if differs[i].any() and shown[key[:4]] < examples:
                            shown[key[:4]] += 1
                            j = int(np.argmax(differs[i]))
                            print(*key, f"got {got[i][j]!r}, want {golden[i][j]!r}", problem.options["variant"])
    return totals


def _rows(problem: Problem, quantity: str, golden: Array) -> Iterator[tuple[Any, str]]:
    """The index and the kind of each row; of a parameter's gradient all are one."""
    if golden.ndim == 1:
        yield slice(None), "sum over rows"
        return
    for i, kind in enumerate(problem.kinds):
        yield i, f"{kind}, dy {problem.kinds_dy[i]}" if quantity.startswith("d") else kind


def table(totals: Totals) -> Table:
    """Of what differs, by sort, framework, quantity and format."""
    result = Table("what differs", "framework", "quantity", "dtype", "elements", "of", "in rows", box=box.MARKDOWN)
    groups: dict[tuple[str, ...], list[tuple[int, int, str]]] = collections.defaultdict(list)
    for key, differing in totals.differing.items():
        if differing:
            groups[key[:4]].append((differing, totals.elements[key], key[4]))
    for key in sorted(groups):
        rows = sorted(groups[key], reverse=True)
        kinds = ", ".join(f"{kind} ({n})" for n, _, kind in rows[:3]) + (", …" if len(rows) > 3 else "")
        of = sum(size for other, size in totals.elements.items() if other[:4] == key)
        result.add_row(*key, f"{sum(n for n, _, _ in rows):,}", f"{of:,}", kinds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="how many calls (each on 64 rows)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", action="append", help="numpy, torch, tf or flax; may be repeated")
    parser.add_argument("--examples", type=int, default=0, help="print so many differences of each sort")
    arguments = parser.parse_args()
    backends = arguments.backend or ["numpy", "torch", "tf", "flax"]
    totals = count(arguments.calls, arguments.seed, backends, arguments.examples)
    Console(width=200).print(table(totals))
    differing = sum(totals.differing.values())
    print(f"{differing:,} of {totals.compared:,} elements differ, in {totals.calls:,} calls, seed {arguments.seed}")


if __name__ == "__main__":
    main()
