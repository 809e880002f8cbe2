"""Compares the results of an implementation with the golden: dtype, shape, every value, and inputs left unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    with np.errstate(all="ignore"):
        wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
        same = (wide_got == wide_want) | (np.isnan(wide_got) & np.isnan(wide_want))
        ratio = np.where(same, 0.0, np.abs(wide_got - wide_want) / expected.unit)
        ratio = np.where(np.isfinite(ratio), ratio, np.inf)
    distances = ulps(got, want)
    same = distances == 0
    if name == "y":  # the sign of a zero is a bit, too: IEEE 754 says which one a product has
        same &= (wide_got != 0) | (np.signbit(wide_got) == np.signbit(wide_want))
    identical = float(np.mean(same)) if want.size else 1.0
    parity_ratio = float(ratio.max(initial=0.0))
    # The bound on the share is an expectation: three elements may differ however few there are, and their repetitions.
    enough = np.sum(distances != 0) <= 3 * expected.repeats + (1 - limit.identical) * want.size
    passed = bool(parity_ratio <= limit.ratio and enough)
    return Comparison(
        name, parity_ratio, limit.ratio, identical, limit.identical, float(distances.max(initial=0.0)), passed,
        "" if passed else _worst(got, want, ratio, distances, enough=bool(enough)),
    )  # fmt: skip


def _worst(got: Array, want: Array, ratio: Array, distances: Array, *, enough: bool) -> str:
    index = np.unravel_index(np.argmax(ratio), ratio.shape)
    position = tuple(int(entry) for entry in index)
    text = f"at {position} got {float(got[index])!r}, want {float(want[index])!r}, {distances[index]:.0f} ulp"
    return text if enough else f"{text}; {np.sum(distances != 0)} of {distances.size} elements differ"


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
