"""Compares the results of an implementation with the golden: dtype, shape, every value, and inputs left unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import LANES, QUANTITIES, USES_OF_INVERSE, Bound, arithmetic_of, bound, error_of
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.comparison import Outcome as Outcome
from rmsnorm.parity.equations import ends, lost
from rmsnorm.specification import dtypes, errors

Array = npt.NDArray[Any]


Implementation = Callable[[Data], Outcome]
GRADIENTS: Final = ("dx", "dscale", "dbias", "dresidual", "dgate")


@dataclass(frozen=True)
class Expected:
    """What is expected of a quantity: the golden's value, the unit of its parity ratio, and the bound.

    ``low`` and ``high`` are the least and the greatest right number, of y in 16 bits alone.
    """

    value: Array
    unit: Array
    bound: Bound
    low: Array | None = None
    high: Array | None = None

    def changed(self, change: Callable[[Array], Array]) -> Expected:
        """The same, with every array repeated or reshaped."""
        ends = (None if end is None else change(end) for end in (self.low, self.high))
        return Expected(change(self.value), change(self.unit), self.bound, *ends)


def judge(
    implementation: Implementation, data: Data, expected: Mapping[str, Expected] | None = None
) -> list[Comparison]:
    """Run an implementation on a case and compare every quantity that the case has.

    If the implementation raises an exception, no quantity passes. ``expected`` is ``expect(data)`` where the caller
    has it already.
    """
    expected = expect(data) if expected is None else expected
    try:
        outcome = implementation(data)
    except Exception as error:  # user code may raise anything; the report says what
        return [failed(name, f"{type(error).__name__}: {error}") for name in expected]
    return compare(outcome, expected)


def compare(outcome: Outcome, expected: Mapping[str, Expected]) -> list[Comparison]:
    """A comparison of every expected quantity: that on its worst result."""
    comparisons = []
    for name, want in expected.items():
        judged = [_compare(name, got, want) for got in outcome.results.get(name, [])]
        judged = judged or [failed(name, "not computed")]
        comparisons.append(max(judged, key=lambda entry: (not entry.passed, entry.parity_ratio, -entry.bit_identical)))
    if outcome.touched:
        names = ", ".join(outcome.touched)
        comparisons = [failed(entry.quantity, f"inputs written to: {names}") for entry in comparisons]
    return comparisons


def expect(
    data: Data,
    quantities: Sequence[str] = QUANTITIES,
    *,
    automatic: bool = False,
    values: Mapping[str, Array] | None = None,
) -> dict[str, Expected]:
    """The quantities of a case, by the golden, with the unit and the bound of their comparison.

    ``automatic`` is whether the results are those of another program, by automatic differentiation. ``values``: those
    that somebody has computed already, in place of the golden's.
    """
    if data.once is not None:
        once = expect(data.once, quantities, automatic=automatic)
        return {name: _repeated(name, want, data, automatic=automatic) for name, want in once.items()}
    sizes = term_sizes(
        data.x, data.scale, data.bias, dy=data.dy, dh=data.dh, tangents=data.tangents, automatic=automatic,
        **data.options, **data.arrays,
    )  # fmt: skip
    of_sum = further_error(data, automatic=automatic)
    expected = {}
    for name, value in (golden(data, quantities) if values is None else values).items():
        dtype, limit = value.dtype.name, _bound(name, data, value.dtype.name, automatic=automatic)
        further = (of_sum if name not in ("dscale", "dbias") else of_sum.max(initial=0.0)) * USES_OF_INVERSE[name]
        unit = sizes[name] * (dtypes.unit_roundoff(dtype) + further / limit.ratio)
        unit = np.maximum(np.broadcast_to(unit, value.shape), dtypes.smallest_subnormal(dtype) / 2)
        expected[name] = want = Expected(value, unit, limit)
        if name == "y" and {dtype, data.call.norm_dtype} & {*dtypes.HALF} and data.variant.rounding != "input_dtype":
            expected[name] = _between(want, data, error_of(name, data.call) + further, sizes[name])
    return expected


def further_error(data: Data, *, automatic: bool) -> Array:
    """The relative error of 1 / rho of each row by what a float32 sum of another program loses beside an outlier."""
    lossy = automatic and arithmetic_of(data.call) == "float32"
    return np.asarray(lost(data) / (LANES if data.is_dense else 1) / 2 if lossy else np.zeros(()))


def _between(want: Expected, data: Data, error: Array, size: Array) -> Expected:
    """y with the numbers that are right beside a tie: in 16 bits by themselves, in more bits by a larger unit."""
    if want.value.dtype.name in dtypes.HALF:
        low, high = ends(data, want.value, error, error * size)
        share = float(np.mean(low == high)) if low.size else 1.0
        return replace(want, low=low, high=high, bound=replace(want.bound, identical=share))
    low, high = (end.astype(np.float64) for end in ends(data, want.value, error, 0 * size))
    apart = np.where(np.isfinite(high - low), high - low, 0.0)
    return replace(want, unit=want.unit + apart / want.bound.ratio)


def _bound(name: str, data: Data, dtype: str, *, automatic: bool) -> Bound:
    return bound(name, data.call, dtype, residual=data.residual is not None, automatic=automatic)


def _repeated(name: str, once: Expected, data: Data, *, automatic: bool) -> Expected:
    """What is expected where the rows are repeated: repeated rows, and sums that are as many times as large.

    That many is a power of two, so that rounding the sum is the same before and after.
    """
    limit = replace(_bound(name, data, once.value.dtype.name, automatic=automatic), identical=once.bound.identical)
    if name in ("dscale", "dbias"):
        many = math.prod(data.case.repeats)
        return Expected((once.value.astype(np.float64) * many).astype(once.value.dtype), once.unit * many, limit)
    return replace(once, bound=limit).changed(lambda array: np.tile(array, data.case.repeats))


def named_gradients(data: Data, gradients: Sequence[Any]) -> dict[str, Any]:
    """What rms_norm_vjp returns for a case, by name."""
    more = [name for name in ("residual", "gate") if getattr(data, name) is not None]
    return dict(zip(("dx", "dscale", "dbias", *(f"d{name}" for name in more)), gradients, strict=True))


def golden(data: Data, quantities: Sequence[str] = QUANTITIES) -> dict[str, Array]:
    """The quantities of a case, by the golden: those that it has."""
    options = {**data.options, **data.arrays}
    results: dict[str, Any] = {}
    if {"y", "inverse_rms"} & {*quantities}:
        y, *_, inverse_rms = rms_norm(data.x, data.scale, data.bias, return_inverse_rms=True, **options)
        results |= {"y": y, "inverse_rms": inverse_rms}
    if {*GRADIENTS} & {*quantities}:
        dy = data.dy if data.dh is None else (data.dy, data.dh)
        gradients = rms_norm_vjp(dy, data.x, data.scale, data.bias, **options)
        results |= named_gradients(data, gradients)
    if "jvp" in quantities:
        results["jvp"] = rms_norm_jvp((data.x, data.scale, data.bias), data.tangents, **options)
    return {name: results[name] for name in quantities if results.get(name) is not None}


def _compare(name: str, got: Array, expected: Expected) -> Comparison:
    want, limit = expected.value, expected.bound
    if got.dtype != want.dtype or got.shape != want.shape:
        got_text, want_text = (errors.describe(a.shape, a.dtype.name) for a in (got, want))
        return failed(name, f"got {got_text}, want {want_text}")
    different = np.flatnonzero(_bits(got) != _bits(want))  # few, most often: all else is of these
    some, wanted, unit = (array.ravel()[different] for array in (got, want, np.broadcast_to(expected.unit, want.shape)))
    with np.errstate(all="ignore"):
        wide_got, wide_want = some.astype(np.float64), wanted.astype(np.float64)
        same = (wide_got == wide_want) | (np.isnan(wide_got) & np.isnan(wide_want))
        ratio = np.where(same, 0.0, np.abs(wide_got - wide_want) / unit)
        ratio = np.where(np.isfinite(ratio), ratio, np.inf)
    distances = ulps(some, wanted)
    same = distances == 0
    if name == "y":  # the sign of a zero is a bit, too: IEEE 754 says which one a product has
        same &= (wide_got != 0) | (np.signbit(wide_got) == np.signbit(wide_want))
    identical = 1.0 - float(np.sum(~same)) / want.size if want.size else 1.0
    parity_ratio = float(ratio.max(initial=0.0))
    if expected.low is not None and expected.high is not None:
        low, high = (end.ravel()[different].astype(np.float64) for end in (expected.low, expected.high))
        enough = bool(np.all((distances == 0) | ((low <= wide_got) & (wide_got <= high) & (low != high))))
    else:  # few may differ of what has one right number
        enough = bool(np.sum(distances != 0) <= 3 + (1 - limit.identical) * want.size)
    passed = bool(parity_ratio <= limit.ratio and enough)
    worst = "" if passed else _worst(got, want, int(different[np.argmax(ratio)]), distances[np.argmax(ratio)])
    count = int(np.sum(distances != 0))
    return Comparison(
        name, parity_ratio, limit.ratio, identical, limit.identical, float(distances.max(initial=0.0)), passed,
        worst if enough or passed else f"{worst}; {count} of {want.size} elements differ",
    )  # fmt: skip


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).ravel().view(f"u{array.itemsize}")


def _worst(got: Array, want: Array, place: int, distance: float) -> str:
    position = tuple(int(entry) for entry in np.unravel_index(place, got.shape))
    return f"at {position} got {float(got[position])!r}, want {float(want[position])!r}, {distance:.0f} ulp"


def failed(name: str, detail: str) -> Comparison:
    """The comparison of a quantity that has no result."""
    return Comparison(name, math.inf, 0.0, 0.0, 0.0, math.inf, False, detail)


def wrong_inverse_rms(got: Array | None, data: Data) -> dict[str, str]:
    """A sentence on 1 / rho that came with y where that is not the golden's, within its bound, in its own dtype."""
    if got is None or data.x.size == 0:
        return {}
    want = expect(data, ("inverse_rms",), automatic=True)["inverse_rms"]
    if got.size != want.value.size:
        return {}
    own = got.dtype.name
    unit = want.unit + np.abs(want.value) * (dtypes.unit_roundoff(own) if own != want.value.dtype.name else 0)
    result = _compare("1/rho", got.astype(want.value.dtype).reshape(want.value.shape), replace(want, unit=unit))
    if result.parity_ratio <= want.bound.ratio:
        return {}
    return {"inverse_rms": f"the 1 / rho that it returns: {result.detail}"}
