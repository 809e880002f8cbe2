"""Numbers of 106 bits: unevaluated sums hi + lo of two float64, and their correct rounding to any format.

The golden computes in these, so that its results round correctly in float64 too and survive cancellation.
Error-free transformations: Dekker 1971, Knuth; operations: Hida, Li & Bailey 2001 (QD).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
_SPLITTER = 2.0**27 + 1.0


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _split(a: Array) -> tuple[Array, Array]:
    c = _SPLITTER * a
    high = c - (c - a)
    return high, a - high


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    p = a * b
    a1, a2 = _split(a)
    b1, b2 = _split(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


class DoubleDouble:
    """An array of hi + lo with |lo| <= ulp(hi) / 2, in which ``+ - * /`` err by at most about 2^-104.

    Where hi is not finite, or so near the end of the range that lo is not representable, lo is 0 and the value
    is what float64 arithmetic gives; so NaN and infinity propagate as IEEE 754 says.

    Example:
        >>> third = DoubleDouble(1.0) / DoubleDouble(3.0)
        >>> float((third * DoubleDouble(3.0)).round("float64"))
        1.0
    """

    __slots__ = ("hi", "lo")

    def __init__(self, hi: npt.ArrayLike, lo: npt.ArrayLike = 0.0) -> None:
        self.hi = np.asarray(hi, np.float64)
        self.lo = np.asarray(lo, np.float64)

    @staticmethod
    def _normal(hi: Array, lo: Array) -> DoubleDouble:
        s = hi + lo
        rest = lo - (s - hi)  # which is not finite where s is not
        changed = (lo != 0) & np.isfinite(rest)  # where lo is 0, hi keeps the sign of a zero
        if changed.all():
            return DoubleDouble(s, rest)
        return DoubleDouble(np.where(changed, s, hi), np.where(changed, rest, 0.0))

    def __add__(self, other: DoubleDouble) -> DoubleDouble:
        s, e = _two_sum(self.hi, other.hi)
        t, f = _two_sum(self.lo, other.lo)
        middle = DoubleDouble._normal(s, e + t)
        return DoubleDouble._normal(middle.hi, middle.lo + f)

    def __neg__(self) -> DoubleDouble:
        return DoubleDouble(-self.hi, -self.lo)

    def __sub__(self, other: DoubleDouble) -> DoubleDouble:
        return self + -other

    def __mul__(self, other: DoubleDouble) -> DoubleDouble:
        p, e = _two_product(self.hi, other.hi)
        return DoubleDouble._normal(p, e + (self.hi * other.lo + self.lo * other.hi))

    def __truediv__(self, other: DoubleDouble) -> DoubleDouble:
        quotient = DoubleDouble(self.hi / other.hi)
        for _ in range(2):
            remainder = self - other * quotient
            quotient = quotient + _finite(remainder.hi / other.hi)
        return quotient

    def sqrt(self) -> DoubleDouble:
        root = DoubleDouble(np.sqrt(self.hi))
        remainder = self - root * root
        return root + _finite(remainder.hi / (2.0 * root.hi))

    def exp(self) -> tuple[DoubleDouble, Array]:
        """f and e with f * 2 ** e the exponential, to about 2^-94 + 2^-104 |a| of it; 0 for a below -2^16.

        exp(a) = 2^k (1 + p)^512 with r = (a - k ln 2) / 512, |r| < 2^-10, and p = exp(r) - 1 by its series.
        """
        a = self.where(~(np.abs(self.hi) > 2.0**16), 0.0)
        k = np.rint(np.where(np.isnan(a.hi), 0.0, a.hi) / _LN2.hi)
        r = (a - DoubleDouble(k) * _LN2).scaled(-9)
        p = r
        for i in range(10, 1, -1):
            p = r + r * p * _INVERSES[i]
        for _ in range(9):
            p = p.scaled(1) + p * p
        return (DoubleDouble(1.0) + p).where(~(self.hi < -(2.0**16)), 0.0), k.astype(np.int64)

    def scaled(self, exponent: npt.ArrayLike) -> DoubleDouble:
        """Multiply by 2 ** exponent, exactly unless the result leaves the range."""
        hi, lo = np.ldexp(self.hi, exponent), np.ldexp(self.lo, exponent)
        return DoubleDouble(hi, np.where(np.isfinite(hi), lo, 0.0))

    def fraction(self) -> tuple[DoubleDouble, Array]:
        """f and e with f * 2 ** e the number and 1/2 <= |f| < 1, e 0 where it is 0 or not finite."""
        exponent = np.where(np.isfinite(self.hi), np.frexp(self.hi)[1], 0)
        return self.scaled(-exponent), exponent

    def where(self, condition: Array, other: float) -> DoubleDouble:
        """Keep the values where the condition holds; ``other`` elsewhere."""
        return DoubleDouble(np.where(condition, self.hi, other), np.where(condition, self.lo, 0.0))

    def sum(self, axis: int) -> DoubleDouble:
        """Sum along an axis, in pairs, keeping the axis with size 1."""
        hi, lo = (np.moveaxis(part, axis, 0) for part in np.broadcast_arrays(self.hi, self.lo))
        if not len(hi):
            nothing = np.moveaxis(np.zeros((1, *hi.shape[1:])), 0, axis)
            return DoubleDouble(nothing, nothing)
        total = DoubleDouble(hi, lo)
        while len(total.hi) > 1:
            half = len(total.hi) // 2
            pairs = total[:half] + total[half : 2 * half]
            odd = total[2 * half :]
            total = DoubleDouble(np.concatenate([pairs.hi, odd.hi]), np.concatenate([pairs.lo, odd.lo]))
        return DoubleDouble(np.moveaxis(total.hi, 0, axis), np.moveaxis(total.lo, 0, axis))

    def __getitem__(self, index: Any) -> DoubleDouble:
        return DoubleDouble(self.hi[index], self.lo[index])

    def apply(self, function: Callable[[Array], Array]) -> DoubleDouble:
        """Rearrange both parts, for instance by a reshape."""
        return DoubleDouble(*(function(part) for part in np.broadcast_arrays(self.hi, self.lo)))

    def round(self, dtype: str, exponent: npt.ArrayLike = 0) -> Array:
        """The number times 2 ** exponent, rounded to the nearest number of a format, ties to even, once.

        A cast of hi alone would round twice, and ml_dtypes casts float64 to bfloat16 through float32. So the
        value goes first to float64, and for bfloat16 to float32, *to odd*: the last bit records that something was
        cut off, which makes the following rounding to nearest correct (Boldo & Melquiond 2008).
        """
        with np.errstate(all="ignore"):  # overflow is infinity, and underflow what is nearest
            if dtype == "float64":
                return _scaled_once(self.hi, self.lo, exponent)
            scaled = self.scaled(exponent)
            return _narrow(round_to_odd(scaled.hi, scaled.lo), dtype)

    def truncate(self, dtype: str) -> Array:
        """The number, rounded to the next number of a format towards 0."""
        near = self.round(dtype)
        with np.errstate(all="ignore"):
            beyond = (DoubleDouble(near) - self).hi
        is_beyond = np.isfinite(self.hi) & (np.where(np.signbit(self.hi), -beyond, beyond) > 0)
        bits = near.view(np.dtype(f"u{near.dtype.itemsize}"))
        return (bits - is_beyond.astype(bits.dtype)).view(near.dtype)


_LN2 = DoubleDouble(float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.abc9e3b39803fp-56"))


def _narrow(odd: Array, dtype: str) -> Array:
    """To a format, of a value that was rounded to odd."""
    if dtype != "bfloat16":
        return odd.astype(dtype)
    single = odd.astype(np.float32)
    beyond = np.abs(single.astype(np.float64)) > np.abs(odd)
    cut = np.where(beyond, np.nextafter(single, np.float32(0)), single)
    inexact = cut.astype(np.float64) != odd
    bits = cut.view(np.uint32) | (inexact & ~np.isnan(odd)).astype(np.uint32)
    return bits.view(np.float32).astype(ml_dtypes.bfloat16)


def _finite(correction: Array) -> DoubleDouble:
    """A correction, or -0.0, which added to a number changes nothing, not even the sign of a zero."""
    return DoubleDouble(np.where(np.isfinite(correction) & (correction != 0), correction, -0.0))


def _scaled_once(hi: Array, lo: Array, exponent: npt.ArrayLike) -> Array:
    """(hi + lo) * 2 ** exponent, also where this is subnormal: hi alone would be rounded a second time."""
    hi, lo = np.broadcast_arrays(hi, lo)
    result = np.ldexp(hi, exponent)
    units = np.ldexp(hi, np.add(exponent, 1074))  # of the smallest subnormal number
    whole = np.rint(units)
    half = (np.abs(units - whole) == 0.5) & (lo != 0) & (np.signbit(units - whole) == np.signbit(lo))
    whole = np.where(half, whole + np.sign(lo), whole)
    return np.where(np.abs(units) < 2.0**52, np.copysign(np.ldexp(whole, -1074), hi), result)


def round_to_odd(hi: Array, lo: Array) -> Array:
    """The float64 next to hi + lo towards zero, with its last bit set where something was cut off."""
    hi, lo = (np.array(part) for part in np.broadcast_arrays(hi, lo))
    inwards = (lo != 0) & (np.signbit(lo) != np.signbit(hi))
    cut = np.where(inwards, np.nextafter(hi, 0.0), hi)
    return (cut.view(np.uint64) | (lo != 0).astype(np.uint64)).view(np.float64)


_INVERSES = {i: DoubleDouble(1.0) / DoubleDouble(float(i)) for i in range(2, 11)}
