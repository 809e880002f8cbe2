"""The thresholds of the comparison with the golden, each with its derivation.

``rmsnorm.parity.check`` adds to them what automatic differentiation of a target rounds and the formulas do not. Tests
of single functions have tolerances of their own, beside them.

Unit: the parity ratio is |got - golden| / (u * terms), with u the unit roundoff of the compared dtype and terms the sum
of the absolute values of the terms that make the element (terms.py). Results that underflow are measured against half
the spacing of the subnormal numbers.

Every bound is  roundings + w * operations:

    roundings    each rounding that the variant names errs by at most 1; got and golden both make it, so it counts 2.
    w            unit roundoff of the arithmetic over u. The arithmetic has at least float32 (float64 where x, a
                 parameter or the result is float64), so w is 1 in 32 and 64 bits, 2^-13 in f16 and 2^-16 in bf16.
                 Where a variant does all its arithmetic in the dtype of x, w is 1 in every dtype.
    operations   roundings of the arithmetic that reach the result, each at most 1 in units of w:
                 a sum of k terms errs by at most k, and by sqrt(k) with the random signs that roundings have
                 (Higham & Mary 2019); every order of summation in use stays below sqrt(k), but beside an outlier [3];
                 the square root halves what the sum contributes to rho.

| quantity    | roundings                   | operations                                                               |
|-------------|-----------------------------|--------------------------------------------------------------------------|
| inverse_rms | 2                           | sqrt(k)/2 of the sum; square, mean, eps, root, division: 5               |
| y           | 2 for each that is named    | those of 1/rho; two products, offset, bias: 4                            |
| dx          | 2; 3 with a residual [1]    | 1/rho twice; sqrt(n) of <u, x^>; offset, three products, mean, 2 sums: 8 |
| dresidual   | 3 [1]                       | as dx                                                                    |
| jvp         | 2                           | as dx, with two products and sums for the parameters: 4                  |
| dscale      | 2                           | 1/rho; sqrt(rows) of the sum; two products: 2                            |
| dbias       | 2                           | sqrt(rows) of the sum                                                    |
| dgate       | as dx, or 2 more than y [2] | as dx, or y; f' and two products: 14                                     |

[1] automatic differentiation rounds the gradient through y before it adds the one through x + residual.
[2] after the norm: dy y f'(z), of y before the gate; before it: dh x f'(z), with dh the gradient for x f(z).
[3] beside an outlier the partial sum S hardly changes, and each later square is rounded to the spacing of float32 at S.
    Squares below half of it are lost, all alike, so one sum after the other errs by sum_i (rounded s_i - s_i): at
    16,381 elements and an outlier of 127 times the RMS by 1,908 roundings, of which this sum predicts 1,907.6. Programs
    add in 8 lanes or more, of which one has the outlier: an eighth (torch.linalg.vector_norm: 249). So for another
    program 1/rho of a row errs by a sixteenth of that share more, besides the sqrt(k) of the table (``LANES``); by half
    of it where the elements of a row are apart in memory, which no vector loads (vector_norm of every second one of
    66,001: 363 roundings of y, where a sixteenth allows 139).

A gate brings operations to each. An exponential errs by 2, so s(z) = 1 / (1 + exp(-z)) by 4, z s(z) by 5, and the
product with f(z) by 6. f' = s (1 + z (1 - s)) errs by 12 of its terms s (1 + |z| (1 + s)): s twice by 4, and four
operations.

    after the norm    y is rounded to the format of the product, and multiplied: y and jvp 7. dy f(z) stands for dy: 6
                      in dx, dscale and dbias. dgate: 1 for y.
    before it         h = x f(z) errs by 6, so 1/rho by 6 and h / rho by 12: inverse_rms 6, y and dscale 12. The second
                      term of dh and of jvp has h / rho twice, and 1/rho: 30. In jvp and dx another product with f: 36.

A sum x + residual that is normalised before it is rounded errs by 1, so 1/rho by 1 and h / rho by 2: inverse_rms 1, y
and dscale 2. The second term of dx and jvp has h / rho twice, and 1/rho: 5. dgate is made of y, 2, or of dh and of the
sum itself, 6.

Automatic differentiation of another program rounds what the formulas do not. x is used twice, by the statistic and by
h / rho: each use may have a gradient in the dtype of x, rounded before the two are added: dx and dresidual in 16 bits,
1. Where h / rho is rounded to a format before the gain, that format is the one of the operations after it, and of
their derivatives. dx and dresidual, which are one number here: dy * gain is rounded, 1. dscale: h / rho, and its
product with dy, 2. A gate after the norm: dy f(z) is rounded before all of these and dbias, 1. A gate before it: dgate
is the product of f'(z) and the gradient for h f(z), which is rounded as dx is, 1. Each is at most 1 in units of the
terms, times the unit roundoff of that format over u. A product below the least normal number of the format errs by as
much as that number does, half the spacing of the subnormal ones, and 1/rho multiplies the error: dy * gain of 1e-8 is
0 in float16, beside 1/rho = 1000 an error of 1e-5 of dx. So for another program the terms are those of products which
are no smaller than that (terms.py, ``automatic``).

Bits: in 16 bits a correct implementation gives the bits of the golden's y, except where its own error carries a value
across the border between two roundings. So of each element it is known which numbers are right. An implementation
computes 1/rho times 1 + e, with |e| <= E = operations * the unit roundoff of the arithmetic, and each rounding that the
variant names is monotone: y lies between the y of 1 - E and the y of 1 + E, with all its roundings. In between are
mostly one number, and two beside a tie. What is not rounded to 16 bits errs by E of its terms before the last rounding.
The elements of a row share e: of 8,192 elements in bfloat16 dozens have the same |x|, and cross a border
together. A share of elements, as if they were independent, would not bound them, and no share is needed: the ends are
those of each element. A wrong rounding point moves a quarter of the elements, most of them by less than any bound on
the ratio: only this bound sees it. Where y is wider than the format of h / rho, as that of LLaMA with a gain in
float32, the two numbers are a unit of the narrow format apart: the distance of the ends from the golden is added to
what the ratio allows, and is 0 except beside a tie.

Intervals: the static vectors say the same of every quantity, whatever the order of a sum. Then k stands for sqrt(k) in
the table: one float32 after the other, 4,096 squares of bfloat16 numbers erred by 380, as many of these sums are ties.
dx and dscale are sums, which may cancel: they lie within operations * 2^-24 * terms of the real number, then rounded.

``identify``, ``replace`` and ``to_rms_norm`` compare formulas before anything is known of roundings. Their thresholds,
``FORMULA`` and those after it, lie between what roundings do and what the nearest other formula does.
"""

from __future__ import annotations

import math
from typing import Final

from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call

QUANTITIES = ("y", "inverse_rms", "dx", "dscale", "dbias", "dresidual", "dgate", "jvp")

# Of the largest element, of a row or of all.
FORMULA: Final = 1e-3  # one formula or another: float32 rounds by 6e-8, and n + 1 in place of n shows, 0.5 % at 192
CHANGED: Final = 0.05  # whether y changed: far above rounding, far below what a tenfold statistic does
# Shares of elements with the bits of a prediction. Float32 arithmetic moves 0.2 % of float16, a wrong rounding point
# 25 %; with a residual, whose sum is rounded too, another rounding leaves half of the bits.
SAME_BITS_OF_SUM: Final = 0.95
# Differences along a direction in float64: near the cube root of the unit roundoff truncation and rounding meet.
STEP: Final = 2.0**-17
# LayerNorm in float64: a few hundred roundings of 1e-16; in float32, and with an eps that was solved there, far less.
LAYER_NORM: Final = 1e-12
LAYER_NORM_OF_FLOAT32: Final = 1e-4
# Outputs of a model in float64, before and after its LayerNorms became RMSNorm: roundings of about 1e-16 each, and a
# factor of 1e6 for deep models and for LayerNorms that subtract a large mean. A weight that is centred wrongly changes
# outputs by far more.
CONVERSION: Final = 1e-10

LANES: Final = 8  # of a vector of float32, in which a processor adds
USES_OF_INVERSE: Final = {
    "y": 1,
    "inverse_rms": 1,
    "dx": 2,
    "dresidual": 2,
    "jvp": 2,
    "dscale": 1,
    "dbias": 0,
    "dgate": 2,
}

_GATE: Final = {
    "after": {"y": 7, "dx": 6, "dresidual": 6, "dscale": 6, "dbias": 6, "dgate": 1, "jvp": 7},
    "before": {"y": 12, "inverse_rms": 6, "dx": 36, "dresidual": 36, "dscale": 12, "dgate": 30, "jvp": 36},
}
_SUM: Final = {"y": 2, "inverse_rms": 1, "dx": 5, "dresidual": 5, "dscale": 2, "jvp": 5}
_SUM_OF_GATE: Final = {"after": 2, "before": 6}


def bound(quantity: str, call: Call, dtype: str, *, residual: bool = False, automatic: bool = False) -> float:
    """The largest parity ratio of a quantity that is compared in a dtype.

    Args:
        quantity: one of ``QUANTITIES``.
        call: what is computed.
        dtype: of the result.
        residual: whether there is one.
        automatic: whether another program computes it, by automatic differentiation of its own steps.

    Raises:
        KeyError: there is no such quantity.

    Example:
        >>> from rmsnorm.specification.call import Spec
        >>> from rmsnorm.specification.resolve import resolve
        >>> from rmsnorm.specification.variants import Variant
        >>> call = resolve("rms_norm", Spec((4, 64), "float32"), variant=Variant.get("standard"))
        >>> bound("y", call, "float32")
        15.0
    """
    operations = error_of(quantity, call) / dtypes.unit_roundoff(dtype)
    roundings: float = 2 * _named_roundings(call) if quantity == "y" else 2
    if quantity == "dgate" and not call.is_gated_before:
        roundings += 2 * _named_roundings(call)
    if residual and quantity in ("dx", "dresidual"):
        roundings += 1
    if automatic:
        roundings += quantity in ("dx", "dresidual") and dtype in dtypes.HALF
        named = {"dx": 1, "dresidual": 1, "dscale": 2}.get(quantity, 0)
        if call.gate_dtype is not None:
            named += quantity == "dgate" if call.is_gated_before else quantity in ("dx", "dresidual", "dscale", "dbias")
        if call.norm_dtype is not None:
            roundings += named * dtypes.unit_roundoff(call.norm_dtype) / dtypes.unit_roundoff(dtype)
    return roundings + operations


def error_of(quantity: str, call: Call) -> float:
    """How far the arithmetic carries a quantity, as a share of its terms: without the roundings that are named.

    >>> from rmsnorm.specification.call import Spec
    >>> from rmsnorm.specification.resolve import resolve
    >>> from rmsnorm.specification.variants import Variant
    >>> error_of("y", resolve("rms_norm", Spec((4, 64), "bfloat16"), variant=Variant.get("standard"))) * 2**24
    13.0
    """
    return operations_of(quantity, call) * dtypes.unit_roundoff(arithmetic_of(call))


def arithmetic_of(call: Call) -> str:
    """The narrowest dtype in which the operations of a call may be."""
    if call.variant.rounding == "input_dtype":
        return call.sum_dtype
    return dtypes.arithmetic(dtypes.promote(call.x_dtype, call.product_dtype, call.result_dtype, call.gate_dtype))


def operations_of(quantity: str, call: Call, *, worst: bool = False) -> float:
    """How many roundings of the arithmetic reach a quantity, in units of its terms: the last column of the table.

    ``worst`` counts k for a sum of k terms in place of sqrt(k).

    >>> from rmsnorm.specification.call import Spec
    >>> from rmsnorm.specification.resolve import resolve
    >>> from rmsnorm.specification.variants import Variant
    >>> operations_of("y", resolve("rms_norm", Spec((4, 64), "float32"), variant=Variant.get("standard")))
    13.0
    """
    n, k = call.n or 0, call.k or 0
    size = math.prod(s or 0 for s in call.shape)
    rows = size / max(1, math.prod(s for s in call.feature_shape if s))

    def of_sum(terms: float) -> float:
        return terms if worst else math.sqrt(terms)

    inverse = of_sum(k) / 2 + 5
    operations = {
        "inverse_rms": inverse,
        "y": inverse + 4,
        "dx": 2 * inverse + of_sum(n) + 8,
        "dresidual": 2 * inverse + of_sum(n) + 8,
        "jvp": 2 * inverse + of_sum(n) + 12,
        "dscale": inverse + of_sum(rows) + 2,
        "dbias": of_sum(rows),
        "dgate": (2 * inverse + of_sum(n) + 8 if call.is_gated_before else inverse + 4) + 14,
    }[quantity]
    if call.exact_sum:
        is_of_gate = quantity == "dgate"
        operations += _SUM_OF_GATE[call.variant.gate_position] if is_of_gate else _SUM.get(quantity, 0)
    if call.gate_dtype is not None:
        operations += _GATE[call.variant.gate_position].get(quantity, 0)
    return operations


def within(noise: float, least: float = 1e-6, most: float = 0.02) -> float:
    """How far a number may be from the one that was written, relative, where 1 / rho is measured with this noise.

    The noise is a root mean square over tens of rows: 20 of it is beyond every one of them.
    """
    return min(max(20 * noise, least), most)


def roundings_of_row(n: int) -> float:
    """Of y, in units of its terms: sqrt(n) for the sum of a row, as above, and 16 for all else."""
    return 16 + math.sqrt(n)


def of_row(n: int, dtype: str) -> float:
    """The error of y, relative to its terms: the roundings of a row."""
    return roundings_of_row(n) * dtypes.unit_roundoff(dtype)


def _named_roundings(call: Call) -> int:
    """Of h / rho, the gain and its product, the bias, the result."""
    if call.norm_dtype is None:
        return 1
    return (
        3 + (call.variant.scale_offset != 0) + (call.product_dtype != call.result_dtype or call.gate_dtype is not None)
    )
