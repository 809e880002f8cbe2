"""The calls by which a function that quantises is compared. Two kinds of cases:

unit rows      mean(x^2) is 3/4 and eps 1/4, so that 1 / rho is 1 in any order of the sum: y is x times the gain,
               and every scale and code is known exactly. Ties, dense grids, zeros, NaN and infinities.
random rows    1 / rho errs, so that y has an interval, and so have the scales and the codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.parity.cases import Array
from rmsnorm.specification import dtypes as formats
from rmsnorm.specification.quantisation import FORMATS, Quantisation

# Largest elements of a block: both sides of ties and of powers of two, where kernels were reported to differ.
_LARGEST: Final = (3.0625, 3.875, 3.765625, 2.03125, 300, 449, 480, 496, 511, 600, 8 - 2.0**-21, 2.0**-9 + 2.0**-31)
_STATIC: Final = (0.01, 0.013, 7 / 512, 3.0625 / 448)
_SIZES: Final = (0.0, 2.0**-10, 2.0**-12, 1e-5, 1e-11, 1e-35, 6e-38, 1e-40)  # of all elements of y
_COLUMN: Final = (math.nan, math.inf, -math.inf, -0.0, -1e-3, -1000.0)  # of the gain, beside ones


class Case(NamedTuple):
    """A call: its arrays, its scales, whether 1 / rho is exact, and the relative error of the product with 1 / s."""

    name: str
    x: Array
    gain: Array
    options: dict[str, float]
    eps: float = 0.25
    residual: Array | None = None
    is_exact: bool = True
    reciprocal_slack: float = 0.0


def cases_of(preset: Quantisation, dtype: str, *, residual: bool, always: bool) -> Iterator[Case]:
    """Those of a quantisation; with a residual where the function takes one, and in each where it must have one."""
    for case in (*_unit_cases(preset, dtype), *_random_cases(preset, dtype, residual=residual)):
        yield case._replace(residual=np.zeros_like(case.x)) if always and case.residual is None else case


def scales_of(preset: Quantisation, s: float, g: float) -> dict[str, float]:
    """The scales that a call needs, as numbers of float32."""
    static = {"static_scale": float(np.float32(s))} if preset.block == "static" else {}
    return static | ({"global_scale": float(np.float32(g))} if preset.global_scale == "given" else {})


def _unit_cases(preset: Quantisation, dtype: str) -> Iterator[Case]:
    is_static, block = preset.block == "static", preset.block if isinstance(preset.block, int) else 1
    wide, narrow = math.lcm(block, 1024), math.lcm(block, 64)
    # What is not rounded after the scale is decided exactly by the golden; float32 rounds the product once.
    is_rounded = preset.round_scaled != "none" or preset.scale_format == "e8m0fnu"
    product = 0.0 if is_rounded else formats.unit_roundoff("float32")

    def unit(
        name: str, gain: Array, s: float = 1.0, g: float = 1.0, slack: float = product, row: Any = (1, 1, 1, 0)
    ) -> Case:
        signs = np.random.default_rng(len(gain)).choice([-1.0, 1.0], len(gain))
        signs[: len(row)] = 1
        x = np.resize(np.float64(row), len(gain)) * signs
        return Case(name, _as([x, -x], dtype), _as(gain, dtype), scales_of(preset, s, g), reciprocal_slack=slack)

    for step in (1.0, 2.0**-3):
        gain = _blocks(preset, wide, (preset.qmax,), _near_ties(preset, dtype)) * step
        yield unit(f"ties, a scale of {step:g}", gain, step, slack=0.0)
    grid = np.outer(2.0 ** -np.arange(6), 0.5 + np.arange(128) / 256).ravel()
    for s in _STATIC if is_static else ():
        gain = _blocks(preset, wide, (1.0,), grid * 2.0 ** math.ceil(math.log2(preset.qmax * s) + 0.1))
        yield unit(f"every y beside a scale of {s:.4g}", gain, s)
    for largest in () if is_static else [(a,) for a in _LARGEST] if block == 1 else [_LARGEST]:
        gain = _blocks(preset, wide, largest, grid, is_relative=True)
        yield unit(f"every y beside {largest[0]:.4g}", gain, g=0.7)
    for s in (1.0, 1 / 64):
        gain = np.resize(grid, wide) * (448 * s if is_static else s)
        yield unit(f"a product of 11 bits, {s:g}", gain, s, 30.0, row=(1.75, 1.25, 0.75, 0.75, 0.5, 0, 0, 0))
    for size in _SIZES:
        gain = np.full(narrow, size)
        if size == 0 or _as(gain, dtype)[0] != 0:
            yield unit(f"y of {size:.3g}", gain)
            yield unit(f"y of {size:.3g} once", gain * (np.arange(narrow) == 1))
    for value in _COLUMN:
        yield unit(f"a gain of {value:g} in one column", np.where(np.arange(narrow) == 1, value, 1.0))
    x = np.tile(np.resize([1.0, -1.0, 1.0, 0.0], narrow), (5, 1))
    x[0], x[1] = 0.0, -0.0
    x[2:, 1] = math.nan, math.inf, -math.inf
    case = unit("rows of zeros, NaN, infinity", np.full(narrow, 1.25))
    yield case._replace(x=_as(x, dtype))


def _random_cases(preset: Quantisation, dtype: str, *, residual: bool) -> Iterator[Case]:
    for rows, least in ((32, 64), (4, 1024)):
        n = math.lcm(preset.block if isinstance(preset.block, int) else 1, least)
        random = np.random.default_rng(n)
        sizes = 10.0 ** random.uniform(-3, 2, (rows, 1))
        x, r = (_as(sizes * random.standard_normal((rows, n)), dtype) for _ in range(2))
        gain = _as(1 + 0.3 * random.standard_normal(n), dtype)
        case = Case(f"rows of {n}", x, gain, scales_of(preset, 0.013, 371.3), 1e-3, is_exact=False)
        yield case
        if residual:
            yield case._replace(name=f"rows of {n}, residual", residual=r)
            # x + residual loses the residual where it is rounded: rho and y of the sum are larger than those of x.
            signs, steps = random.choice([-1.0, 1.0], x.shape), random.integers(0, 8, x.shape)
            x, r = (_as(signs * a, dtype) for a in (1 + steps / 8, 0.75 * formats.unit_roundoff(dtype)))
            yield case._replace(name=f"rows of {n}, lost residual", x=x, residual=r)


def _as(values: Any, dtype: str) -> Array:
    return cast(np.asarray(values, np.float64), dtype)


def _near_ties(preset: Quantisation, dtype: str) -> Array:
    """The middles between two numbers of the element, what is next to them, and what is beyond the last."""
    mantissa, least, largest = FORMATS[preset.element]
    if preset.element == "int8":
        numbers = np.arange(129.0)
    else:
        numbers = np.unique(np.outer(2.0 ** np.arange(least - mantissa, 16), np.arange(2 ** (mantissa + 1))))
        numbers = numbers[numbers <= largest]
    middles, away = (numbers[1:] + numbers[:-1]) / 2, 4 * formats.unit_roundoff(dtype)
    values = np.concatenate([middles, middles * (1 - away), middles * (1 + away)])
    beyond = [1.01, 1.03, 464 / 448, 1.05, 1.25, 2, 8] if preset.block == "static" else []
    return np.append(values[values <= preset.qmax], preset.qmax * np.array(beyond))


def _blocks(
    preset: Quantisation, n: int, largest: Sequence[float], values: Array, *, is_relative: bool = False
) -> Array:
    """A gain: in each block the next of the largest, then values where x is not 0, or these times its power of two."""
    size = preset.block if isinstance(preset.block, int) else n
    is_rest = np.arange(n) % 4 != 3
    is_rest[::size] = False
    tops, gain = np.resize(np.asarray(largest, np.float64), n // size), np.zeros(n)
    gain[is_rest] = np.resize(values, np.sum(is_rest))
    gain *= np.repeat(2.0 ** (np.frexp(tops)[1] - 1), size) if is_relative else 1.0
    gain[::size] = tops
    return gain
