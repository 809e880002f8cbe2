"""Rows whose 1 / rho is exactly 1, so that one wrong rounding, division or clamp shows without any tolerance.

mean(x^2) is 3/4 and eps 1/4: in any order of the sum y is x times the gain, and every scale and code is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl.quantised import dtype_of
from rmsnorm.parity.cases import Array
from rmsnorm.specification.dtypes import unit_roundoff
from rmsnorm.specification.quantisation import Quantisation

# The largest elements of a block: both sides of ties and of powers of two, where kernels were reported to differ.
_LARGEST: Final = (3.0625, 3.875, 3.765625, 2.03125, 300, 449, 480, 496, 511, 600, 8 - 2.0**-21, 2.0**-9 + 2.0**-31)
_STATIC: Final = (0.01, 0.013, 7 / 512, 3.0625 / 448)
_SIZES: Final = (0.0, 2.0**-10, 2.0**-12, 1e-5, 1e-11, 1e-35, 6e-38, 1e-40)  # of all elements of y
_COLUMN: Final = (math.nan, math.inf, -math.inf, -0.0, -1e-3, -1000.0)  # of the gain, beside ones
_GRID: Final = np.outer(2.0 ** -np.arange(6), 0.5 + np.arange(128) / 256).ravel()  # numbers of eight bits


class Asked(NamedTuple):
    """A call: its arrays, its scales, whether 1 / rho is exact, and the relative error of the product with 1 / s."""

    name: str
    x: Array
    gain: Any
    residual: Array | None
    scales: dict[str, float]
    eps: Any = 0.25
    is_exact: bool = True
    slack: float = 0.0


def scales_of(preset: Quantisation, static: float = 1.0, g: float = 1.0) -> dict[str, float]:
    """The scales that a call needs, as numbers of float32."""
    scales = {"static_scale": static} if preset.block == "static" else {}
    scales |= {"global_scale": g} if preset.global_scale == "given" else {}
    return {name: float(np.float32(number)) for name, number in scales.items()}


def unit_rows(preset: Quantisation, dtype: str) -> Iterator[Asked]:
    is_static, wide, few = preset.block == "static", math.lcm(preset.size, 1024), math.lcm(preset.size, 64)
    # What is not rounded after the scale is decided exactly by the golden; float32 rounds the product once.
    is_rounded = preset.round_scaled != "none" or preset.scale_format == "e8m0fnu"
    product = 0.0 if is_rounded else unit_roundoff("float32")

    def beside(top: float, values: Array) -> Array:
        """A gain of these values where x is not 0, and in each block the largest of them first."""
        fours = np.zeros((wide // 4, 4))
        fours[:, :3] = np.resize(values, (wide // 4, 3))
        gain = fours.ravel()
        gain[:: preset.size if preset.size > 1 else wide] = top
        return gain

    def asked(name: str, gain: Array, s: float = 1.0, g: float = 1.0, row: Any = (1, 1, 1, 0)) -> Asked:
        signs = np.random.default_rng(len(gain)).choice([-1.0, 1.0], len(gain))
        signs[: len(row)] = 1
        x = np.resize(np.float64(row), len(gain)) * signs
        arrays = cast(np.stack([x, -x]), dtype), cast(gain, dtype), None
        return Asked(name, *arrays, scales_of(preset, s, g), slack=product)

    for s in (1.0, 2.0**-3):
        gain = beside(preset.qmax, _near_ties(preset, dtype)) * s
        yield asked(f"ties, a scale of {s:g}", gain, s)._replace(slack=0.0)
    tops = [(s, 1.0, math.ceil(math.log2(preset.qmax * s) + 0.1)) for s in _STATIC]
    for s, top, power in tops if is_static else [(1.0, top, math.floor(math.log2(top))) for top in _LARGEST]:
        yield asked(f"y beside {top:.4g}, a scale of {s:.4g}", beside(top, _GRID * 2.0**power), s, 0.7)
    for s in (1.0, 1 / 64):
        gain = np.resize(_GRID, wide) * (448 * s if is_static else s)
        yield asked(f"a product of 11 bits, {s:g}", gain, s, 30.0, (1.75, 1.25, 0.75, 0.75, 0.5, 0, 0, 0))
    one = np.arange(few) == 1
    gains = {f"a gain of {value:g} in one column": np.where(one, value, 1.0) for value in _COLUMN}
    for size in (size for size in _SIZES if size == 0 or cast(np.asarray(size), dtype) != 0):
        gains |= {f"y of {size:.3g}": np.full(few, size), f"y of {size:.3g} once": np.where(one, size, 0.0)}
    yield from (asked(name, gain) for name, gain in gains.items())
    x = np.tile(np.resize([1.0, -1.0, 1.0, 0.0], few), (5, 1))
    x[0], x[1] = 0.0, -0.0
    x[2:, 1] = math.nan, math.inf, -math.inf
    yield asked("rows of zeros, NaN, infinity", np.full(few, 1.25))._replace(x=cast(x, dtype))


def _near_ties(preset: Quantisation, dtype: str) -> Array:
    """The middles between two numbers of the element, what is next to them, and what is beyond the last."""
    codes = np.arange(16 if preset.element == "e2m1fn" else 256).astype(np.uint8)
    numbers = codes.view(dtype_of(preset.element)).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= 0)])
    middles, away = (numbers[1:] + numbers[:-1]) / 2, 4 * unit_roundoff(dtype)
    values = np.concatenate([middles, middles * (1 - away), middles * (1 + away)])
    beyond = [1.01, 1.03, 464 / 448, 1.05, 1.25, 2, 8] if preset.block == "static" else []
    return np.append(values[values <= preset.qmax], preset.qmax * np.array(beyond))
