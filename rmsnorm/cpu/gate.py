"""The factor f(z) of a gate z and its derivative, in compiled code.

    sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
    silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

exp(r) for |r| <= log(2) / 2 is a polynomial 1 + r + r^2 q(r). Its coefficients are Chebyshev's: it is within 2^-55 in
float64, and within 2^-26 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.cpu.formats import LOAD, apart, bits, inlined, shifted, widen
from rmsnorm.cpu.formats import multiply_add as fma
from rmsnorm.cpu.settings import GATES, INSIDE
from rmsnorm.cpu.statistic import is_counted

_LOG2E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.6931471803691238  # of 33 bits: its product with a small integer is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_ROUNDS: Final = 1.5 * 2.0**52  # a sum with it has no fraction
_LAST: Final = 708.0  # exp(z) is a normal number for z between its negative and it
# s(z) is below 1, and the slope of silu above it, for every z; rounded to 1, they would make a tie of what is none
_BELOW: Final = 1 - 2.0**-51
_ABOVE: Final = 1 + 2.0**-51
_END: Final = 2.0**16  # for z below its negative f(z) is 0, as in the golden

_LOG2E_32, _HIGH_32, _LOW_32 = np.float32(_LOG2E), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDS_32: Final = np.float32(1.5 * 2.0**23)
_LAST_32: Final = np.float32(80.0)
_Q32: Final = tuple(map(np.float32, (0.0013926176, 0.008363173, 0.041666556, 0.16666578)))
_load_half: Final = LOAD["float16"]
_ONE, _HALF = np.float32(1), np.float32(0.5)

# A gate before the norm, and an eps next to nothing: y is moderate however small x f(z) is. A mean square below
# ``LEAST`` has lost digits, or is 0; an eps above ``SMALL`` is so much more that these do not count.
LEAST: Final = 2.0**-960
SMALL: Final = 2.0**-400


class Gate(NamedTuple):
    """A gate: its function, its position and the format of z; all are empty if there is none."""

    function: str = ""
    position: str = ""
    z: str = ""


def gate_of(options: Sequence[str]) -> Gate:
    """The gate among the options of a kernel."""
    named = [option for option in options if option in GATES]
    return Gate(*named[0].split("-")) if named else Gate()


@inlined
def _exponential(size: float) -> Any:
    """exp(size) to an ulp: a number near 1, and the exponent of two in the last bits of a sum."""
    sum_ = fma(size, _LOG2E, _ROUNDS)
    whole = sum_ - _ROUNDS
    r = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, size))
    q = fma(
        fma(fma(2.5100375832561234e-08, r, 2.7620075879983367e-07), r, 2.7557268480310024e-06), r, 2.480152132236869e-05
    )
    q = fma(fma(fma(q, r, 0.00019841269863040545), r, 0.0013888888917196719), r, 0.008333333333330065)
    q = fma(fma(fma(q, r, 0.041666666666624164), r, 0.16666666666666669), r, 0.5000000000000001)
    return fma(fma(q, r, 1.0), r, 1.0), sum_


@inlined
def _power(size: float) -> Any:
    """exp(size), between exp(-708) and exp(708)."""
    size = _LAST if size > _LAST else size  # NaN stays
    size = -_LAST if size < -_LAST else size
    p, sum_ = _exponential(size)
    return p * bits((bits(sum_) + 1023) << 52)


def factor_of(gate: Gate) -> Callable[..., Any]:
    """f(z) in float64."""
    is_silu = gate.function == "silu"

    @inlined
    def factor(z: float) -> Any:
        share = 1 / (1 + _power(-z))
        share = _BELOW if share > _BELOW else (0.0 if z <= -_LAST else share)
        return z * share if is_silu else share

    return factor


def factor_and_slope_of(gate: Gate) -> Callable[..., Any]:
    """f(z) and f'(z) in float64."""
    is_silu = gate.function == "silu"

    @inlined
    def factor_and_slope(z: float) -> Any:
        power = _power(-z)
        share = 1 / (1 + power)
        rest = power * share
        is_one = share > _BELOW
        share = 0.0 if z <= -_LAST else share
        rest = 0.0 if z >= _LAST else rest
        slope = share * (1 + z * rest) if is_silu else share * rest
        slope = _ABOVE if is_silu and is_one and slope < _ABOVE else slope
        share = _BELOW if is_one else share
        return (z * share if is_silu else share), slope

    return factor_and_slope


def single_of(gate: Gate) -> Callable[..., Any]:
    """f(z) of a z in float32, in float32: within 5 units of 2^-24 for \\|z\\| < 80, and between 0 and exp(-80) below.

    These are 3 for the exponential (1 for its argument, 1.5 for the last two steps of the polynomial), one each for the
    sum, the quotient and the product, of which the exponential's errors count where it is not much less than 1.
    """
    is_silu = gate.function == "silu"
    q3, q2, q1, q0 = _Q32

    @inlined
    def single(z: Any) -> Any:
        size = -z
        size = _LAST_32 if size > _LAST_32 else size
        size = -_LAST_32 if size < -_LAST_32 else size
        sum_ = fma(size, _LOG2E_32, _ROUNDS_32)
        whole = sum_ - _ROUNDS_32
        r = fma(whole, -_LOW_32, fma(whole, -_HIGH_32, size))
        q = fma(fma(fma(fma(q3, r, q2), r, q1), r, q0), r, _HALF)
        d = _ONE + fma(fma(q, r, _ONE), r, _ONE) * shifted(sum_)
        return z / d if is_silu else _ONE / d

    return single


def load_single(z: str) -> Callable[..., Any]:
    """A stored gate of 16 or 32 bits as float32, exactly."""
    if z == "bfloat16":
        return _single_of_bfloat
    return np.float32 if z == "float32" else _single_of_half


@inlined
def _single_of_bfloat(number: Any) -> Any:
    return bits(widen(number))


@inlined
def _single_of_half(number: Any) -> Any:
    return np.float32(_load_half(number))


def lift_of(gate: Gate, x: str) -> Callable[..., Any]:
    """A factor for f(z) and f'(z) of a row, with which the squares of x f(z) stay in the range of float64."""
    load_x, load_z, is_silu = LOAD[x], LOAD[gate.z or x], gate.function == "silu"

    def lift(s: Any, x: Any, z: Any, mask: Any, stride: int, f: Any, derivative: Any) -> Any:
        """f(z) and f'(z) times a power of two, which is returned. It cancels in every result but 1 / rho.

        x f(z) of what is in the statistic is then at most about 1, unless eps would leave the range.
        """
        top = -(2**30)
        for j in range(s.k):
            number = load_z(z[j])
            if load_x(x[j]) != 0 and abs(number) <= _END and is_counted(mask, stride, j):
                _, sum_ = _exponential(-abs(number))
                exponent = (bits(abs(load_x(x[j]))) >> 52) - 1023
                exponent += np.int64(sum_ - _ROUNDS) if number < 0 else 0
                top = exponent if exponent > top else top
        most = 2**30 if s.eps == 0 else (500 if s.position == INSIDE else 1000)
        shift = 0 if top == -(2**30) else (-top if -top < most else most)
        for j in range(f.size):
            number = load_z(z[j])
            p, sum_ = _exponential(-abs(number) if abs(number) <= _END else 0.0)
            power = p * bits((bits(sum_) + 1023) << 52) if abs(number) < _LAST else 0.0
            large = 1 / (1 + power)
            share, rest, exponent = large, power * large, shift
            if number < 0:
                share, rest = p * large if number >= -_END else 0.0, large
                exponent += np.int64(sum_ - _ROUNDS)
            exponent = -1023 if exponent < -1023 else (1000 if exponent > 1000 else exponent)
            share *= bits((exponent + 1023) << 52)
            derivative[j] = share * (1 + number * rest) if is_silu else share * rest
            f[j] = number * share if is_silu else share
        # beyond 1000 the power multiplies an eps of 0 alone, and a 1 / rho that no result can hold
        return bits(((1000 if shift > 1000 else shift) + 1023) << 52)

    return apart(lift)


@inlined
def scaled_eps(s: Any, power: float) -> Any:
    """eps of a row that was multiplied by a power of two."""
    return s.eps * power * power if s.position == INSIDE else s.eps * power
