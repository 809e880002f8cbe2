"""Numbers as unevaluated sums of two, a + a_error, in Triton: of float32 they have 48 bits, of float64 106.

The errors are exact only if no product of two numbers leaves the range, which the kernels check (``is_outside``), and
if the compiler neither contracts nor reorders anything: kernels are compiled without contraction (plan.py), and
every fused multiplication is written as one.

1 / rho of a row: the sum of squares is float64. A square of 16 bits is exact in float32; what float32 loses of
smaller squares is below 2^-109 of the sum, because q is at least 2^-40. q + eps is a pair of float64. A = 1 / rho
comes from a rough root of 20 bits and two steps of Newton's; the sign of 1 - A^2 (q + eps), which fused
multiplications compute to 2^-104, says on which side A is, so A is rounded to odd, the same on every card. This
matters in rows of zeros, of which padding is full: with eps = 1e-6, A is 1000.0000000000000226, and 1000.0 would make
ties of gradients that are none. In pairs of float32, A is right to 2^-47, a row within 2^-43 of a short rho or A is
computed again, and sums for the gain are right to 2^-46 of their terms. Source: Dekker 1971; Boldo & Melquiond 2008
for rounding to odd.
"""

# Triton compiles this source: its annotations are objects, so that `from __future__ import annotations` is left out.
import os
from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

STEP: Final = tl.constexpr(256)  # elements of a tile that are computed in float64 at once, where that is needed

# Where pairs of float32 are as exact as they should be: products, results of a product with 1 / rho, and rho. What an
# error loses below 2^-149, times 1 / LEAST_RHO, is less than 2^-48 of LEAST_RESULT.
LEAST: Final = tl.constexpr(2.0**-90)
LEAST_RESULT: Final = tl.constexpr(2.0**-76)
MOST: Final = tl.constexpr(2.0**90)
LEAST_RHO: Final = tl.constexpr(2.0**-20)
MOST_RHO: Final = tl.constexpr(2.0**20)
NEAR: Final = tl.constexpr(2.0**-43)  # of a number of 24 bits: beyond the error of a pair


@triton.jit
def group_of_program(groups):
    """The number of a program in its group, the group, and how many there are. None is one group.

    Where a group begins in a row may be more than 32 bits can count.
    """
    if groups is None:
        return tl.program_id(0), 0, 1
    else:
        return tl.program_id(0) // groups, (tl.program_id(0) % groups).to(tl.int64), groups


@triton.jit
def sum_of_parts(parts, index, CHUNKS, BLOCK: tl.constexpr):
    """Of a row that is split, the sum of what ``sum_parts`` has written, of at most BLOCK chunks.

    It is a sum over a tile as that of a row is, so that the compiler lays out what follows as there.
    """
    chunks = tl.arange(0, BLOCK)[None, :]
    return tl.sum(tl.load(parts + index * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0), 1)[:, None]


@triton.jit
def two_sum(a, b):
    """a + b, and what that rounds off."""
    total = a + b
    t = total - a
    return total, (a - (total - t)) + (b - t)


@triton.jit
def add_pairs(a, a_error, b, b_error):
    total, error = two_sum(a, b)
    error += a_error + b_error
    result = total + error
    return result, error - (result - total)


@triton.jit
def multiply_pairs(a, a_error, b, b_error):
    product = a * b
    error = tl.fma(a, b, -product) + (a * b_error + a_error * b)
    result = product + error
    return result, error - (result - product)


@triton.jit
def divide_pairs(a, a_error, b, b_error):
    if b.dtype == tl.float32:  # else the compiler approximates
        quotient = tl.div_rn(a + tl.zeros(b.shape, tl.float32), b)
        return quotient, tl.div_rn(tl.fma(-quotient, b, a) + (a_error - quotient * b_error), b)
    else:
        quotient = a / b
        rest = tl.fma(-quotient, b, a) + (a_error - quotient * b_error)
        return quotient, rest / b


@triton.jit
def split_off(number):
    """A float64 as a pair of float32, both cut off towards 0: so the pair is not beyond a short number beside it."""
    if INTERPRETED:
        high = cut(number, 0.0)
        return high, cut(number - high.to(tl.float64), 0.0)
    else:
        text: tl.constexpr = "cvt.rz.f32.f64 $0, $1;"
        high = tl.inline_asm_elementwise(text, "=r,d", [number], tl.float32, True, 1)
        rest = number - high.to(tl.float64)
        return high, tl.inline_asm_elementwise(text, "=r,d", [rest], tl.float32, True, 1)


@triton.jit
def _add_loosely(a, a_error, b, b_error):
    total, error = two_sum(a, b)
    return total, error + (a_error + b_error)


@triton.jit
def sum_of_pairs(product, error, AXIS: tl.constexpr):
    """The sum of pairs of float32 as a pair. error: None if there is none, or it is too small to count."""
    if error is None:
        error = tl.full(product.shape, -0.0, tl.float32)  # which costs nothing to add
    if INTERPRETED:  # where ``reduce`` goes from element to element
        while product.shape[AXIS] > 1:
            shape = (*product.shape[:AXIS], product.shape[AXIS] // 2, 2)
            first, second = tl.split(tl.reshape(product, shape))
            first_error, second_error = tl.split(tl.reshape(error, shape))
            product, error = _add_loosely(first, first_error, second, second_error)
        return tl.sum(product, AXIS), tl.sum(error, AXIS)
    else:
        return tl.reduce((product, error), AXIS, _add_loosely)


@triton.jit
def multiply_off(a, b):
    """a b of float64, cut off towards 0: for the interpreter."""
    product = a * b
    error = tl.fma(a, b, -product)
    is_beyond = ((error < 0) != (product < 0)) & (error != 0)
    return (product.to(tl.int64, bitcast=True) - is_beyond.to(tl.int64)).to(tl.float64, bitcast=True)


@triton.jit
def lowered(number):
    """2^-896 times a finite number of at most 32 bits, in float64: its bits in other places."""
    bits = single(number).to(tl.int32, bitcast=True)
    upper = ((bits >> 3) & -0x70000001).to(tl.int64) << 32
    if number.dtype == tl.float32:
        upper = upper | ((bits & 7).to(tl.int64) << 29)
    return upper.to(tl.float64, bitcast=True)


@triton.jit
def split(number):
    """A float64 as a pair of float32."""
    high = number.to(tl.float32)
    return high, (number - high.to(tl.float64)).to(tl.float32)


@triton.jit
def split_argument(number):
    """An argument of a kernel, which is a number of Python in the interpreter."""
    return split(tl.full((1, 1), number, tl.float64))


@triton.jit
def is_outside(product, a, b):
    """Whether the error of the product a b may be inexact, or it is not finite."""
    size = tl.abs(product)
    return ((size <= MOST) == 0) | ((size < LEAST) & (a != 0) & (b != 0))


@triton.jit
def single(number):
    """A number of at most 32 bits as a float32."""
    if INTERPRETED and number.dtype == tl.bfloat16:  # the interpreter takes subnormal numbers for other ones
        return (number.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(tl.float32)


@triton.jit
def to_format(number, FORMAT: tl.constexpr):
    """A float32 rounded once to a format."""
    if FORMAT == "bfloat16":
        if INTERPRETED:  # where the conversion cuts off
            bits = number.to(tl.uint32, bitcast=True)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
            nearest = tl.where(number != number, 0x7FC0, nearest).to(tl.uint16)
            return nearest.to(tl.bfloat16, bitcast=True)
        else:
            return number.to(tl.bfloat16)
    elif FORMAT == "float16":
        return number.to(tl.float16)
    else:
        return number


@triton.jit
def _to_odd(bits, is_inexact, back):
    """The bits of a float32, or of the odd one of the two around a number that it is not.

    So the next rounding is that of the number. ``back``: -1 if the number is nearer to 0 than the float32, else 0.
    """
    odd = (bits + back) | 1
    return tl.where(is_inexact, odd, bits).to(tl.float32, bitcast=True)


@triton.jit
def rounded(a, a_error, FORMAT: tl.constexpr):
    """A pair of float32 rounded once to a format."""
    total, error = two_sum(a, a_error)
    total = tl.where(a_error == 0, a, total)  # a sum would make +0 of -0
    if FORMAT == "float32":
        return total
    else:
        bits = total.to(tl.int32, bitcast=True)
        back = (error.to(tl.int32, bitcast=True) ^ bits) >> 31
        is_inexact = (error != 0) & (tl.abs(total) < float("inf"))
        return to_format(_to_odd(bits, is_inexact, back), FORMAT)


@triton.jit
def rounded_near(a, excess, FORMAT: tl.constexpr):
    """a - excess rounded once to a format, in half as many steps as ``rounded`` takes.

    a is finite, and |excess| <= 3/4 |a|. If a is +0 or -0, excess is +0, so that the sign of a stays.
    """
    total = a - excess
    if FORMAT == "float32":
        return total
    else:
        error = (a - total) - excess  # exact: Dekker 1971
        bits = total.to(tl.int32, bitcast=True)
        back = (error.to(tl.int32, bitcast=True) ^ bits) >> 31
        return to_format(_to_odd(bits, error != 0, back), FORMAT)


@triton.jit
def rounded_wide(number, FORMAT: tl.constexpr):
    """A float64 rounded once to a format."""
    nearest = number.to(tl.float32)
    if FORMAT == "float32":
        return nearest
    else:
        wide = nearest.to(tl.float64)
        is_inexact = (wide != number) & (tl.abs(wide) < float("inf"))
        back = -(tl.abs(number) < tl.abs(wide)).to(tl.int32)
        return to_format(_to_odd(nearest.to(tl.int32, bitcast=True), is_inexact, back), FORMAT)


@triton.jit
def cut(number, rest):
    """The float32 towards 0 from number + rest, of float64, |rest| at most half a last bit: for the interpreter."""
    nearest = number.to(tl.float32)
    wide = nearest.to(tl.float64)
    is_beyond = (tl.abs(wide) > tl.abs(number)) | ((wide == number) & (rest * number < 0))
    return (nearest.to(tl.int32, bitcast=True) - is_beyond.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _rough_inverse_root(number):
    """1 / sqrt(number), of float64, with 20 bits or more."""
    if INTERPRETED:
        return (1 / tl.sqrt(number)).to(tl.float32).to(tl.float64)
    else:
        return tl.inline_asm_elementwise("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [number], tl.float64, True, 1)


@triton.jit
def _error_of(y, number, rest):
    """1 - (number + rest) y^2, to 2^-104."""
    square = y * y
    return tl.fma(-rest, square, tl.fma(-number, tl.fma(y, y, -square), tl.fma(-number, square, 1.0)))


@triton.jit
def inverse_rho(total, share, size, eps, POSITION: tl.constexpr):
    """1 / rho rounded to odd in float64, and whether 1 / rho or rho is a number of at most 24 bits.

    ``total``: the sum of ``size`` squares; share = 1 / size. Rounding to odd keeps a rational 1 / rho that float64
    does not have from making a tie: 1 / sqrt(1e-6) is 1000.0000000000000226. The result is right for rho within
    2^-500 to 2^500, and NaN for others.
    """
    q = total * share
    q = tl.fma(tl.fma(-size, q, total), share, q)  # as exact as a division
    if POSITION == "inside":
        number, rest = two_sum(q, tl.zeros(q.shape, tl.float64) + eps)
        y = _rough_inverse_root(number)
        y = tl.fma(0.5 * y, tl.fma(-number * y, y, 1.0), y)
        y = tl.fma(0.5 * y, _error_of(y, number, rest), y)
        error = _error_of(y, number, rest)
        root = (number * y).to(tl.float32).to(tl.float64)
        is_short = (root * root == number) & (rest == 0)
    else:
        rho = rho_of(q, size, eps, POSITION)
        y = 1 / rho
        error = tl.fma(-rho, y, 1.0)
        is_short = rho.to(tl.float32).to(tl.float64) == rho
    odd = (y.to(tl.int64, bitcast=True) - (error < 0).to(tl.int64)) | 1
    y = tl.where(error == 0, y, odd.to(tl.float64, bitcast=True))
    return y, is_short | (y.to(tl.float32).to(tl.float64) == y)


@triton.jit
def inverse_rho_in_pairs(total, total_error, share, share_error, eps, size, POSITION: tl.constexpr):
    """1 / rho as a pair of float32, cut off, to 2^-45; and whether 1 / rho or rho may be a number of at most 24 bits.

    It is right for rho from LEAST_RHO to MOST_RHO; else 1 / rho is out of this range, or NaN, or may be such a number.
    """
    q, q_error = multiply_pairs(total, total_error, share, share_error)
    added, added_error = split_argument(eps)
    if POSITION == "inside":
        q, q_error = add_pairs(q, q_error, added, added_error)
    if INTERPRETED:
        y = (1 / tl.sqrt(q.to(tl.float64))).to(tl.float32)
    else:
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [q], tl.float32, True, 1)
    square = y * y
    near = q * square
    rest = (1 - near) - tl.fma(q, square, -near)
    rest = tl.fma(-q_error, square, tl.fma(-q, tl.fma(y, y, -square), rest))
    y, y_error = add_pairs(y, 0.0, y * rest * tl.fma(rest, 0.375, 0.5), 0.0)
    if POSITION == "inside":
        root = q * y
        is_short = tl.abs(tl.fma(root, root, -q) - q_error) <= 2 * NEAR * q
    else:
        rho, rho_error = multiply_pairs(q, q_error, y, y_error)
        if POSITION == "outside":
            rho, rho_error = add_pairs(rho, rho_error, added, added_error)
        y, y_error = divide_pairs(1.0, 0.0, rho, rho_error)
        y, y_error = add_pairs(y, 0.0, y_error, 0.0)
        is_short = tl.abs(rho_error) <= NEAR * rho
        if POSITION == "clamp":
            is_short = is_short | (rho * tl.sqrt_rn(size.to(tl.float32)) * (1 - 2.0**-20) <= added)
    high = (y.to(tl.int32, bitcast=True) - (y_error < 0).to(tl.int32)).to(tl.float32, bitcast=True)
    return high, (y - high) + y_error, is_short | (tl.abs(y_error) <= NEAR * y)


@triton.jit
def rho_of(q, size, eps, POSITION: tl.constexpr):
    """rho in float64 of the mean square of so many elements."""
    if POSITION == "inside":
        rho = tl.sqrt(q + eps)
    elif POSITION == "outside":
        rho = tl.sqrt(q) + eps
    else:
        rho = tl.sqrt(q)
        floor = eps / tl.sqrt(size)
        rho = tl.where(rho < floor, floor, rho)
    return rho


@triton.jit
def over_rho(number, inverse, rho, is_short):
    """number / rho, of float64: the quotient if rho is short, else the product with 1 / rho rounded to odd."""
    if rho is None:
        return number * inverse
    else:
        product = number * inverse
        error = tl.fma(number, inverse, -product)
        odd = (product.to(tl.int64, bitcast=True) - ((error < 0) != (product < 0)).to(tl.int64)) | 1
        is_inexact = (error != 0) & (tl.abs(error) < float("inf"))
        product = tl.where(is_inexact, odd.to(tl.float64, bitcast=True), product)
        return tl.where(is_short, number / rho, product)


@triton.jit
def gains(scale, columns, inside, OFFSET: tl.constexpr):
    """o + scale as a pair of float32."""
    gain = single(tl.load(scale + columns, mask=inside, other=0.0))
    if OFFSET != 0:
        return two_sum(gain, tl.full(gain.shape, OFFSET, tl.float32))
    else:
        return gain, tl.zeros(gain.shape, tl.float32)


@triton.jit
def wide_gains(scale, columns, inside, OFFSET: tl.constexpr):
    """o + scale in float64."""
    gain = single(tl.load(scale + columns, mask=inside, other=0.0)).to(tl.float64)
    if OFFSET != 0:
        gain += OFFSET
    return gain
