"""The calls by which a function that quantises is compared. Two kinds of cases:

unit rows      mean(x^2) is 3/4 and eps 1/4, so that 1 / rho is 1 in any order of the sum: y is x times the gain,
               and every scale and code is known exactly. Ties, dense grids, zeros, NaN and infinities.
random rows    1 / rho errs by ``slack``: where two codes are allowed then, the one that the golden has not is a
               tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.parity.cases import Array
from rmsnorm.specification import dtypes as formats
from rmsnorm.specification.quantisation import FORMATS, Quantisation

_F32: Final = 2.0**-24  # unit roundoff
_EPS: Final = 0.25  # of unit rows
# Largest elements of a block: both sides of ties and of powers of two, where kernels were reported to differ.
_LARGEST: Final = (3.0625, 3.875, 3.765625, 2.03125, 300, 449, 480, 496, 511, 600, 8 - 2.0**-21, 2.0**-9 + 2.0**-31)
_STATIC: Final = (0.01, 0.013, 7 / 512, 3.0625 / 448)
_SIZES: Final = (0.0, 2.0**-10, 2.0**-12, 1e-5, 1e-11, 1e-35, 6e-38, 1e-40)  # of all elements of y


class Case(NamedTuple):
    """A call: its arrays, the options that the quantisation needs, and how far the kernel may be from exact."""

    name: str
    x: Array
    gain: Array
    residual: Array | None
    eps: float
    options: dict[str, float]
    slack: float = 0.0
    reciprocal_slack: float = 0.0


def cases_of(preset: Quantisation, dtype: str, *, residual: bool, always: bool) -> Iterator[Case]:
    """Those of a quantisation; with a residual where the function takes one, and in each where it must have one."""
    for case in itertools.chain(_unit_cases(preset, dtype), _random_cases(preset, dtype, residual=residual)):
        zeros = np.zeros_like(case.x) if always and case.residual is None else case.residual
        yield case._replace(residual=zeros)


def _scales(preset: Quantisation, s: float, g: float) -> dict[str, float]:
    """The options of a call; both are numbers of float32."""
    static = {"static_scale": float(np.float32(s))} if preset.block == "static" else {}
    return static | ({"global_scale": float(np.float32(g))} if preset.global_scale == "given" else {})


def _unit_cases(preset: Quantisation, dtype: str) -> Iterator[Case]:
    block = preset.block if isinstance(preset.block, int) else 1
    wide, narrow = math.lcm(block, 1024), math.lcm(block, 64)
    # What is not rounded after the scale is decided exactly by the golden; float32 rounds the product once.
    product = 0.0 if preset.round_scaled != "none" or preset.scale_format == "e8m0fnu" else _F32

    def unit(name: str, gain: Any, options: dict[str, float], row: Any = (1, 1, 1, 0), slack: float = 0.0) -> Case:
        signs = np.random.default_rng(len(gain)).choice([-1.0, 1.0], len(gain))
        signs[: len(row)] = 1
        x = np.resize(np.float64(row), len(gain)) * signs
        return Case(name, _as([x, -x], dtype), _as(gain, dtype), None, _EPS, options, 0.0, slack)

    for step in (1.0, 2.0**-3):
        gain = _blocks(preset, wide, (preset.qmax * step,), _near_ties(preset, dtype) * step)
        yield unit(f"ties, a scale of {step:g}", gain, _scales(preset, step, 1.0))
    grid = np.outer(2.0 ** -np.arange(6), 0.5 + np.arange(128) / 256).ravel()
    if preset.block == "static":
        for s in _STATIC:
            gain = _blocks(preset, wide, (1.0,), grid * 2.0 ** math.ceil(math.log2(preset.qmax * s) + 0.1))
            yield unit(f"every y beside a scale of {s:.4g}", gain, _scales(preset, s, 1.0), slack=product)
    for largest in () if preset.block == "static" else [(a,) for a in _LARGEST] if block == 1 else [_LARGEST]:
        gain = _blocks(preset, wide, largest, grid, relative=True)
        name = f"every y beside {largest[0]:.4g}" if len(largest) == 1 else "every y"
        yield unit(name, gain, _scales(preset, 1.0, 0.7), slack=product)
    row = (1.75, 1.25, 0.75, 0.75, 0.5, 0, 0, 0)
    for s in (1.0, 1 / 64):
        gain = np.resize(grid, wide) * (448 * s if preset.block == "static" else s)
        yield unit(f"a product of 11 bits, {s:g}", gain, _scales(preset, s, 30.0), row, product)
    for size in _SIZES:
        gain = np.full(narrow, size)
        if size == 0 or _as(gain, dtype)[0] != 0:
            for name, values in (("", gain), (" once", gain * (np.arange(narrow) == 1))):
                yield unit(f"y of {size:.3g}{name}", values, _scales(preset, 1.0, 1.0), slack=product)
    for value in (math.nan, math.inf, -math.inf, -0.0, -1e-3, -1000.0):
        gain = np.where(np.arange(narrow) == 1, value, 1.0)
        yield unit(f"a gain of {value:g} in one column", gain, _scales(preset, 1.0, 1.0), slack=product)
    x = np.tile(np.resize([1.0, -1.0, 1.0, 0.0], narrow), (5, 1))
    x[0], x[1] = 0.0, -0.0
    x[2:, 1] = math.nan, math.inf, -math.inf
    gain = _as(np.full(narrow, 1.25), dtype)
    yield Case("rows of zeros, NaN, infinity", _as(x, dtype), gain, None, _EPS, _scales(preset, 1.0, 1.0), 0.0, product)


def _random_cases(preset: Quantisation, dtype: str, *, residual: bool) -> Iterator[Case]:
    block = preset.block if isinstance(preset.block, int) else 1
    for rows, least in ((32, 64), (4, 1024)):
        n = math.lcm(block, least)
        random = np.random.default_rng(n)
        sizes = 10.0 ** random.uniform(-3, 2, (rows, 1))
        x, r = (_as(sizes * random.standard_normal((rows, n)), dtype) for _ in range(2))
        gain = _as(1 + 0.3 * random.standard_normal(n), dtype)
        # Roundings of float32: n for the sum of squares, 3 for square, mean and eps, of which the root leaves half; the
        # root and the reciprocal, 2 each, as they may be approximate; 1 for h, and 3 for the products of y and 1 / s.
        slack = ((n + 3) / 2 + 8) * _F32
        options = _scales(preset, 0.013, 371.3)
        yield Case(f"rows of {n}", x, gain, None, 1e-3, options, slack)
        if residual:
            yield Case(f"rows of {n}, residual", x, gain, r, 1e-3, options, slack)
            # x + residual loses the residual where it is rounded: rho and y of the sum are larger than those of x.
            signs, steps = random.choice([-1.0, 1.0], x.shape), random.integers(0, 8, x.shape)
            x, r = signs * (1 + steps / 8), signs * 0.75 * formats.unit_roundoff(dtype)
            yield Case(f"rows of {n}, lost residual", _as(x, dtype), gain, _as(r, dtype), 1e-3, options, slack)


def _as(values: Any, dtype: str) -> Array:
    return cast(np.asarray(values, np.float64), dtype)


def _near_ties(preset: Quantisation, dtype: str) -> Array:
    """The middles between two numbers of the element, what is next to them, and what is beyond the last."""
    if preset.element == "int8":
        numbers = np.arange(129.0)
    else:
        mantissa, least, largest = FORMATS[preset.element]
        powers = 2.0 ** np.arange(least, math.frexp(largest)[1])
        steps = np.outer(powers, 1 + np.arange(2**mantissa) / 2**mantissa).ravel()
        numbers = np.append(np.arange(2**mantissa) * 2.0 ** (least - mantissa), steps)
        numbers = numbers[numbers <= largest]
    middles, away = (numbers[1:] + numbers[:-1]) / 2, 4 * formats.unit_roundoff(dtype)
    values = np.concatenate([middles, middles * (1 - away), middles * (1 + away)])
    beyond = [1.01, 1.03, 464 / 448, 1.05, 1.25, 2, 8] if preset.block == "static" else []
    return np.append(values[values <= preset.qmax], preset.qmax * np.array(beyond))


def _blocks(preset: Quantisation, n: int, largest: Sequence[float], values: Array, *, relative: bool = False) -> Array:
    """A gain: in each block the largest, then the next of the values; every fourth, where x is 0, has a 1 at most.

    relative: the values are below 1, and times the power of two that the largest is at least.
    """
    size = preset.block if isinstance(preset.block, int) else n
    gain, rest = np.zeros(n), itertools.cycle(values)
    for start, a in zip(range(0, n, size), itertools.cycle(largest), strict=False):
        factor = 2.0 ** (math.frexp(a)[1] - 1) if relative else 1.0
        places = [i for i in range(start, start + size) if i % 4 != 3]
        gain[places] = [a, *(factor * next(rest) for _ in places[1:])][: len(places)]
    return gain
