"""Compares the results of an implementation with the golden: dtype, shape, every value, and inputs left unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import LANES, QUANTITIES, USES_OF_INVERSE, arithmetic_of, bound, error_of
from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.parity.cases import Data
from rmsnorm.parity.cases import Outcome as Outcome
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.equations import added_in_sequence, ends, lost
from rmsnorm.specification import dtypes, errors

Array = npt.NDArray[Any]


Implementation = Callable[[Data], Outcome]
GRADIENTS: Final = ("dx", "dscale", "dbias", "dresidual", "dgate")
_PIECE: Final = 2**16  # elements that are compared at once: few enough for the cache of a processor


@dataclass(frozen=True)
class Expected:
    """What is expected of a quantity.

    Attributes:
        value: the golden's.
        low, high: the least and the greatest right number for each element, as float64. NaN where only NaN is right.
        unit: the unit of the parity ratio of each element: the unit roundoff of the sizes of its terms.
        bound: the largest parity ratio.
        order: where the result repeats these rows, the number of each of its rows among them.
        lead: then, the axes of the result in place of the first one of these.
    """

    value: Array
    low: Array
    high: Array
    unit: Array
    bound: float
    order: Array | None = None
    lead: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape if self.order is None else (*self.lead, *self.value.shape[1:])

    @classmethod
    def around(cls, value: Array, unit: Array, bound: float) -> Expected:
        """An interval of so many units to both sides of the golden's value."""
        with np.errstate(all="ignore"):
            wide = value.astype(np.float64)
            room = np.broadcast_to(np.where(np.isnan(unit), 0.0, unit * bound), value.shape)
            room = np.where(np.isfinite(wide), room, 0.0)
        return cls(value, wide - room, wide + room, np.broadcast_to(unit, value.shape), bound)

    def within(self, low: Array, high: Array) -> Expected:
        """The part of the interval that lies in another one, which has the golden's value, too."""
        return replace(self, low=np.fmax(self.low, low), high=np.fmin(self.high, high))

    def wider(self, error: Array) -> Expected:
        """The interval with so much more room for each element."""
        return replace(self, low=self.low - error, high=self.high + error)

    def changed(self, change: Callable[[Array], Array]) -> Expected:
        """The same, with every array broadcast or reshaped."""
        return Expected(change(self.value), change(self.low), change(self.high), change(self.unit), self.bound)

    def pieces(self) -> Iterator[tuple[slice, Array, Array, Array, Array]]:
        """Some elements of the result after the other: where they are in a row of all; value, low, high and unit."""
        arrays = [self.value, self.low, self.high, self.unit]
        if self.order is None:
            count, n, arrays = self.value.size, 1, [array.reshape(-1) for array in arrays]
        else:
            count, n = len(self.order), max(1, math.prod(self.value.shape[1:]))
        step = max(1, _PIECE // n)
        for start in range(0, count, step):
            rows = slice(start, start + step) if self.order is None else self.order[start : start + step]
            value, low, high, unit = (array[rows].ravel() for array in arrays)
            yield slice(start * n, start * n + value.size), value, low, high, unit


def judge(implementation: Implementation, data: Data) -> list[Comparison]:
    """Run an implementation on a case and compare every quantity that the case has.

    If the implementation raises an exception, no quantity passes.
    """
    expected = expect(data)
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
    in_sequence: bool = False,
    values: Mapping[str, Array] | None = None,
) -> dict[str, Expected]:
    """The quantities of a case, by the golden, with the unit and the bound of their comparison.

    ``automatic`` is whether the results are those of another program, by automatic differentiation; ``in_sequence``,
    whether that program may add one term after the other. ``values``: those that somebody has computed already, in
    place of the golden's.
    """
    sizes = term_sizes(
        data.x, data.scale, data.bias, dy=data.dy, dh=data.dh, tangents=data.tangents, automatic=automatic,
        **data.options, **data.arrays,
    )  # fmt: skip
    of_sum = further_error(data, automatic=automatic, in_sequence=in_sequence)
    expected = {}
    for name, value in (golden(data, quantities) if values is None else values).items():
        dtype = value.dtype.name
        limit = bound(name, data.call, dtype, residual=data.residual is not None, automatic=automatic)
        further = (of_sum if name not in ("dscale", "dbias") else of_sum.max(initial=0.0)) * USES_OF_INVERSE[name]
        unit = sizes[name] * (dtypes.unit_roundoff(dtype) + further / limit)
        unit = np.maximum(np.broadcast_to(unit, value.shape), dtypes.smallest_subnormal(dtype) / 2)
        if name == "y" and {dtype, data.call.norm_dtype} & {*dtypes.HALF} and data.variant.rounding != "input_dtype":
            expected[name] = _of_y(value, unit, limit, data, error_of(name, data.call) + further, sizes[name])
        else:
            expected[name] = of_terms(value, sizes[name], limit, further)
    return expected


def of_terms(value: Array, size: Array, limit: float, further: Any, lost: Any = 0.0) -> Expected:
    """A sum of terms of this size, which may err by ``further`` of it, and by ``lost``, beside what ``limit`` says.

    Of the roundings in ``limit``, one is the last one of what is compared, and one that of the golden. These are of the
    sum and not of its terms, which shows in 16 bits where the terms cancel.
    """
    dtype = value.dtype.name
    roundoff, least = dtypes.unit_roundoff(dtype), dtypes.smallest_subnormal(dtype) / 2
    unit = np.maximum(np.broadcast_to(size * (roundoff + further / limit), value.shape), least)
    want = Expected.around(value, unit, limit).wider(lost)
    if dtype not in dtypes.HALF:
        return want
    with np.errstate(all="ignore"):
        wide = value.astype(np.float64)
        away = np.maximum(np.abs(wide) * roundoff, least) + size * ((limit - 2) * roundoff + further) + lost
        return want.within(*(cast(end, dtype).astype(np.float64) for end in (wide - away, wide + away)))


def further_error(data: Data, *, automatic: bool, in_sequence: bool = False) -> Array:
    """The relative error of 1 / rho of each row by a float32 sum of another program, beyond the square root of k.

    That is what it loses beside an outlier; or ``in_sequence``, what it may lose if it adds one term after the other.
    """
    if not automatic or arithmetic_of(data.call) != "float32":
        return np.zeros(())
    if in_sequence:
        return np.asarray(added_in_sequence(data) / 2)
    return np.asarray(lost(data) / (LANES if data.is_dense else 1) / 2)


def _of_y(value: Array, unit: Array, limit: float, data: Data, error: Array, size: Array) -> Expected:
    """y with the numbers that are right beside a tie: in 16 bits by themselves, in more bits by a larger unit."""
    if value.dtype.name in dtypes.HALF:
        low, high = (end.astype(np.float64) for end in ends(data, value, error, error * size))
        return Expected.around(value, unit, limit).within(low, high)
    low, high = (end.astype(np.float64) for end in ends(data, value, error, 0 * size))
    apart = np.where(np.isfinite(high - low), high - low, 0.0)
    return Expected.around(value, unit + apart / limit, limit)


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


def outside(got: Array, value: Array, low: Array, high: Array) -> Array:
    """Which elements are outside of their intervals."""
    with np.errstate(all="ignore"):
        wide, right = got.astype(np.float64), value.astype(np.float64)
        same = (wide == right) | (np.isnan(wide) & np.isnan(right))
        return np.asarray(~same & ~((low <= wide) & (wide <= high)))


def _compare(name: str, got: Array, expected: Expected) -> Comparison:
    dtype, shape = expected.value.dtype, expected.shape
    if got.dtype != dtype or got.shape != shape:
        got_text, want_text = errors.describe(got.shape, got.dtype.name), errors.describe(shape, dtype.name)
        return failed(name, f"got {got_text}, want {want_text}")
    flat = np.ascontiguousarray(got).ravel()
    largest = furthest = 0.0
    differing = unlike = 0  # elements that are another number; and those with other bits, which a zero may have
    worst, detail = -1.0, ""
    for place, value, low, high, unit in expected.pieces():
        different = np.flatnonzero(bits_of(flat[place]) != bits_of(value))  # few, most often: all else is of these
        if not len(different):
            continue
        some, value, low, high = flat[place][different], value[different], low[different], high[different]
        with np.errstate(all="ignore"):
            apart = np.abs(some.astype(np.float64) - value.astype(np.float64))
            distances = ulps(some, value)
            ratio = np.where(distances == 0, 0.0, apart / unit[different])
        ratio = np.where(np.isfinite(ratio), ratio, np.inf)
        other = distances != 0
        differing += int(np.sum(other))
        if name == "y":  # the sign of a zero is a bit, too: IEEE 754 says which one a product has
            other |= (some == 0) & (np.signbit(some) != np.signbit(value))
        unlike += int(np.sum(other))
        largest, furthest = max(largest, float(ratio.max())), max(furthest, float(distances.max()))
        wrong = outside(some, value, low, high)
        if wrong.any() and (ratios := np.where(wrong, ratio, -1.0)).max() > worst:
            element = int(ratios.argmax())
            worst = float(ratios[element])
            position = tuple(int(i) for i in np.unravel_index(place.start + int(different[element]), shape))
            detail = (
                f"at {position} got {float(some[element])!r}, want {float(value[element])!r}, "
                f"{distances[element]:.0f} ulp"
            )
    identical = 1.0 - unlike / got.size if got.size else 1.0
    if detail and name == "y" and dtype.name in dtypes.HALF:
        detail += f"; {differing} of {got.size} elements differ"
    return Comparison(name, largest, expected.bound, identical, furthest, not detail, detail)


def bits_of(array: Array) -> Array:
    """The bits of each element in a row, as whole numbers."""
    return np.ascontiguousarray(array).ravel().view(f"u{array.itemsize}")


def failed(name: str, detail: str) -> Comparison:
    """The comparison of a quantity that has no result."""
    return Comparison(name, math.inf, 0.0, 0.0, math.inf, False, detail)


def wrong_inverse_rms(got: Array, want: Expected) -> list[Comparison]:
    """A failure where 1 / rho that came with y is not what is expected, in its own dtype."""
    own, wanted = got.dtype.name, want.value.dtype.name
    unit = want.unit + np.abs(want.value.astype(np.float64)) * (dtypes.unit_roundoff(own) if own != wanted else 0)
    (result,) = compare(
        Outcome({"inverse_rms": [got.astype(wanted).reshape(want.value.shape)]}),
        {"inverse_rms": Expected.around(want.value, unit, want.bound)},
    )
    return [] if result.passed else [failed("inverse_rms", f"the 1 / rho that it returns: {result.detail}")]
