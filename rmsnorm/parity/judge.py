"""Compares the results of an implementation with the golden: dtype, shape, every value, and inputs left unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import QUANTITIES, Bound, bound
from rmsnorm.accuracy.signed import SignedErrors
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Comparison, Run, labelled
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import Variant

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """The results of an implementation: of every way to compute each quantity; and the inputs that it changed."""

    results: Mapping[str, list[Array]]
    touched: tuple[str, ...] = ()


Implementation = Callable[[Data], Outcome]
GRADIENTS: Final = ("dx", "dscale", "dbias", "dresidual", "dgate")


@dataclass(frozen=True)
class Expected:
    """What is expected of a quantity: the golden's value, the unit of its parity ratio, and the bound.

    ``repeats``: how often each element of the value is there.
    """

    value: Array
    unit: Array
    bound: Bound
    repeats: int = 1


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


def expect(data: Data, quantities: Sequence[str] = QUANTITIES, *, automatic: bool = False) -> dict[str, Expected]:
    """The quantities of a case, by the golden, with the unit and the bound of their comparison.

    ``automatic`` is whether the results are those of another program, by automatic differentiation.
    """
    about = {"residual": data.residual is not None, "automatic": automatic, "alike": data.case.data == "constant"}
    if data.once is not None:
        once = expect(data.once, quantities, automatic=automatic)
        return {name: _repeated(name, want, data, **about) for name, want in once.items()}
    sizes = term_sizes(
        data.x, data.scale, data.bias, dy=data.dy, dh=data.dh, tangents=data.tangents, **data.options, **data.arrays
    )
    expected = {}
    for name, value in golden(data, quantities).items():
        dtype = value.dtype.name
        unit = np.broadcast_to(sizes[name], value.shape) * dtypes.unit_roundoff(dtype)
        unit = np.maximum(unit, dtypes.smallest_subnormal(dtype) / 2)
        expected[name] = Expected(value, unit, bound(name, data.call, dtype, **about))
    return expected


def _repeated(name: str, once: Expected, data: Data, **about: bool) -> Expected:
    """What is expected where the rows are repeated: repeated rows, and sums that are as many times as large.

    That many is a power of two, so that rounding the sum is the same before and after.
    """
    if name in ("dscale", "dbias"):
        many = math.prod(data.case.repeats)
        value, unit = (once.value.astype(np.float64) * many).astype(once.value.dtype), once.unit * many
    else:
        value, unit = (np.tile(array, data.case.repeats) for array in (once.value, once.unit))
    limit = bound(name, data.call, value.dtype.name, **about)
    return Expected(value, unit, limit, value.size // max(1, once.value.size))


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
    # The bound on the share is an expectation: three elements may differ however few there are, and their repetitions.
    count = int(np.sum(distances != 0))
    enough = count <= 3 * expected.repeats + (1 - limit.identical) * want.size
    passed = bool(parity_ratio <= limit.ratio and enough)
    worst = "" if passed else _worst(got, want, int(different[np.argmax(ratio)]), distances[np.argmax(ratio)])
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


def biased(run: Run, signed: SignedErrors, variant: Variant) -> None:
    """Puts the mean signed errors into a run, and a failure for each that is no chance.

    Not where an element errs by more than one ulp, as then something else is wrong, and not for a y whose arithmetic is
    no wider than itself: the roundings of what has the gain or the gate are the same in all rows, and so no chance.
    """
    for (name, dtype), found in signed.summary().items():
        run.signed.append(f"signed error of {name} in {dtypes.short(dtype)}: {found.text}")
        is_judged = name != "y" or (dtype in dtypes.HALF and variant.rounding != "input_dtype")
        if found.bias and is_judged and found.largest <= 1:
            run.records += labelled([failed(name, found.bias)], variant.name, dtype, "all rows")
