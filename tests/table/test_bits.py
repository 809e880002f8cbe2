"""Every framework against the golden, bit by bit, on rows that no ordinary test draws; `make nightly` draws more.

A call that kernels compute has 64 rows, each of a kind (KINDS), drawn as widely as its format goes. The sign of a zero
counts; NaN equals NaN. Rows with subnormal numbers are left out for TensorFlow and JAX, which take some of these as 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import calls
import ml_dtypes
import numpy as np
import pytest
from frameworks import way as way_of
from hypothesis import settings

from rmsnorm import cpu
from rmsnorm.engines import refusal
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import PRESETS

Array = np.ndarray[Any, Any]
NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
CALLS = {"fast": 16, "torch": 16, "tf": 8, "flax": 2}
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


def draw(random: np.random.Generator) -> calls.Arguments:
    """A call that a kernel computes."""
    while True:
        data = _draw(random)
        if refusal(data.call.in_rows, "cpu", calls.formats(data)) is None:
            return data


def _draw(random: np.random.Generator) -> calls.Arguments:
    n, dtype = int(random.choice(WIDTHS)), str(random.choice(FORMATS))
    variant = PRESETS[str(random.choice(list(PRESETS)))]
    if random.random() < 0.8:
        variant = variant.replace(eps=float(random.choice(EPS)), partial=random.choice([None, None, None, 0.3]))
    names, has_residual = list(KINDS), random.random() < 0.2
    kinds = [names[i] for i in random.integers(len(names), size=ROWS)]

    def rows(kinds: list[str]) -> Array:
        with np.errstate(over="ignore"):
            return np.stack([KINDS[kind](random, n, dtype) for kind in kinds]).astype(dtype)

    def parameter(chance: float, width: str) -> Array | None:
        values = random.normal(size=n) * random.choice([1.0, 1.0, 1.0, 0.0, -0.0, 1e4], n)
        return values.astype(width) if random.random() < chance else None

    width = dtype if random.random() < 0.7 else str(random.choice(FORMATS))
    x, dy = rows(kinds), rows([names[i] for i in random.integers(len(names), size=ROWS)])
    dy[::8] = x[::8]  # along x: what the projection leaves is eps alone
    more = [rows(random.permutation(kinds).tolist()) if has_residual else None for _ in range(2)]
    made = calls.arguments(x, parameter(0.8, width), parameter(0.3, width), variant=variant, residual=more[0])
    with np.errstate(over="ignore"):
        return replace(made, dy=dy.astype(made.call.result_dtype), dh=more[1])


def is_subnormal(array: Array) -> Array:
    """Of bfloat16 and float32: every subnormal number of float16 is a normal one in float32."""
    least = 0.0 if array.dtype == np.float16 else float(ml_dtypes.finfo(array.dtype).smallest_normal)
    return (array != 0) & (np.abs(array.astype(np.float64)) < least)


def has_subnormal(data: calls.Arguments, quantity: str, golden: Array) -> Array:
    """Where an argument that enters the row, or the exact result, is subnormal."""
    names, result = ("x", "residual", "scale", "bias", "dy", "dh"), is_subnormal(golden)
    for array in (getattr(data, name) for name in names[: None if quantity.startswith("d") else 4]):
        if array is not None:
            found = is_subnormal(array)
            result = result | (found.any(axis=1, keepdims=True) if min(found.ndim, golden.ndim) == 2 else found.any())
    return result


@pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")
@pytest.mark.parametrize("way", CALLS, indirect=True)
def test_rows_that_an_ordinary_test_does_not_draw(way: Any) -> None:
    """No zero, infinity or NaN differs; a number only where it is at a tie."""
    random = np.random.default_rng(zlib.crc32(f"{way.name} {date.today() if NIGHTLY else 1}".encode()))
    count = ties = 0
    for _ in range(CALLS[way.name] * (30 if NIGHTLY else 1)):
        data = draw(random)
        with np.errstate(all="ignore"):
            found, wanted = (each.outcome(data).results for each in (way, way_of("numpy")))
        for quantity, (want,) in wanted.items():
            if quantity == "jvp" or (way.name, quantity) == ("flax", "inverse_rms"):
                continue  # which the recipe computes
            skipped = has_subnormal(data, quantity, want) if way.key in ("tf", "flax") else np.False_
            for got in found[quantity]:
                differs = (got != want) & ~(np.isnan(got) & np.isnan(want)) & ~skipped
                ordinary = np.isfinite(got) & np.isfinite(want)
                signs = (want == 0) & (got == 0) & (np.signbit(got) != np.signbit(want)) & ~skipped
                if want.ndim > 1:  # sums over rows of rare numbers may be added in another order
                    assert not (differs & ~ordinary).any(), (quantity, data.variant)
                    assert not signs.any() or quantity.startswith("d"), (quantity, data.variant)
                    ties += int((differs & ordinary).sum())
                count += want.size
    assert ties <= count * 2**-15  # those at a tie, of which the two programs see another side
