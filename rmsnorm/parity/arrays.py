"""Judges the arrays of a call that somebody else has made: block by block, so that it needs little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Case, Data, call_on
from rmsnorm.parity.equations import Steps
from rmsnorm.parity.judge import Expected, expect, outside
from rmsnorm.parity.sums import OF_ROWS, Sums, values_of
from rmsnorm.specification import errors
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.variants import Variant

GRADIENTS: Final = ("dx", "dscale", "dbias", "dresidual", "dgate")
_OF_SUMS: Final = ("dscale", "dbias")
_LIKE_X: Final = ("x", "residual", "gate", "mask", "dy", "dh")
_BLOCK: Final = 2**16  # elements that are judged together
_SHOWN: Final = 9  # digits of a float32, which tell neighbours apart


@dataclass(frozen=True)
class Arrays:
    """The arrays of a call.

    Attributes:
        call: what is computed.
        arrays: x and what came with it, dy and dh, by their names.
        options: the axes, and the dtype of y that was asked for.
    """

    call: Call
    arrays: Mapping[str, Array]
    options: Mapping[str, Any]

    def data(self, place: tuple[slice, ...] = ()) -> Data:
        """The call of a part of the rows, or of all."""
        part = {
            name: np.broadcast_to(array, self.call.shape)[place] if name in _LIKE_X else array
            for name, array in self.arrays.items()
        }
        x, variant = part["x"], self.call.variant
        zeros = np.broadcast_to(np.zeros((), self.call.result_dtype), x.shape)
        return Data(
            Case("arrays", x.shape), variant, call_on("arrays", part, {**self.options, "variant": variant}), x,
            part.get("scale"), part.get("bias"), part.get("dy", zeros), part.get("dh"), (None, None, None),  # type: ignore[arg-type]
            part.get("mask"), part.get("residual"), part.get("gate"), **self.options,
        )  # fmt: skip

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[slice, ...]]:
        """Where parts of the rows are, along the longest axis that is neither normalised nor one of the parameters."""
        shape, call = self.call.shape, self.call
        free = [axis for axis in call.shared_axes if axis not in call.axes]
        axis = max(free, key=lambda entry: shape[entry], default=None)
        if axis is None or whole:
            yield (slice(None),) * len(shape)
            return
        step = max(1, _BLOCK * shape[axis] // max(1, math.prod(shape)))
        for start in range(0, max(1, shape[axis]), step):
            place = [slice(None)] * len(shape)
            place[axis] = slice(start, start + step)
            yield tuple(place)

    def expected(self, names: Sequence[str], *, exact: bool) -> Iterator[tuple[str, tuple[slice, ...], Expected]]:
        """What is expected of each quantity: of those of rows block by block, and then of the sums over rows.

        ``exact``: whether sums must be better than terms added one after the other.
        """
        sums = Sums(self.call, [name for name in names if name in _OF_SUMS], not exact)
        own = [name for name in names if name not in _OF_SUMS]
        is_wide = self.arrays["x"].dtype == np.float64  # then the golden computes all, and sums of all rows at once
        for place in self.blocks(whole=is_wide and bool(sums.names)):
            data = self.data(place)
            if is_wide:
                of_all = expect(data, names, automatic=True, in_sequence=not exact)
                yield from ((name, place if name in own else (), want) for name, want in of_all.items())
                continue
            with np.errstate(all="ignore"):
                steps = Steps(data, {})
                values = {"y": cast(steps.y, self.call.result_dtype)} if "y" in own else {}
                values |= values_of(steps, [name for name in own if name in OF_ROWS])
                of_rows = expect(data, values=values, automatic=True, in_sequence=not exact) if values else {}
                sums.add(steps)
            yield from ((name, place, want) for name, want in of_rows.items())
        if not is_wide:
            yield from ((name, (), sums.expected(name, data)) for name in sums.names)


@dataclass
class Verdict:
    """What is wrong with a quantity: how many elements, and the one that is furthest from its interval."""

    quantity: str
    size: int
    count: int = 0
    distance: float = -1.0
    place: tuple[int, ...] = ()
    got: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def add(self, got: Array, want: Expected, place: tuple[slice, ...]) -> None:
        """Count what is outside of its interval in a block that begins at ``place``."""
        wrong = np.flatnonzero(outside(got, want.value, want.low, want.high))
        self.count += len(wrong)
        if not len(wrong):
            return
        some, low, high = (array.ravel()[wrong] for array in (got, *inward(want)))
        far = np.minimum(ulps(some, low), ulps(some, high))
        worst = int(np.argmax(far))
        if far[worst] > self.distance:
            starts = [part.start or 0 for part in place] or [0] * got.ndim
            inside = np.unravel_index(int(wrong[worst]), got.shape)
            self.place = tuple(int(i) + start for i, start in zip(inside, starts, strict=True))
            self.distance = float(far[worst])
            self.got, self.low, self.high = (float(array[worst]) for array in (some, low, high))

    @property
    def words(self) -> str:
        """What the worst element is, and what it may be."""
        place = str(list(self.place)).replace(" ", "")
        got, low, high = (f"{value:.{_SHOWN}g}" for value in (self.got, self.low, self.high))
        wanted = low if low == high else f"{low} to {high}"
        return f"{self.quantity}{place} is {got}, expected {wanted}, {self.distance:.0f} ulp away"


def arrays_of(op: str, arrays: Mapping[str, Array], variant: Variant, axis: Axis, feature_axis: Axis | None,
              out_dtype: str | None) -> Arrays:  # fmt: skip
    """The call of these arrays.

    Raises:
        TypeError, ValueError: as of rms_norm; or there is a dh without a residual.
    """
    if "dh" in arrays and "residual" not in arrays:
        raise errors.out_of_domain(op, "residual", None, "the residual of the call that has dh", "pass it, or no dh")
    options = {"axis": axis, "feature_axis": feature_axis, "out_dtype": out_dtype}
    return Arrays(call_on(op, arrays, {**options, "variant": variant}), arrays, options)


def judged(given: Arrays, results: Mapping[str, Array], *, exact: bool) -> list[Verdict]:
    """What is wrong with the results, y and gradients, by the order of their names; empty where all hold."""
    wrong = {name: Verdict(name, got.size) for name, got in results.items()}
    for name, place, want in given.expected([name for name in results if name != "h"], exact=exact):
        wrong[name].add(results[name][place], want, place)
    if "h" in results:
        h = add(given.arrays["x"], given.arrays["residual"], given.call.sum_dtype)
        wrong["h"].add(results["h"], Expected.around(h, np.zeros(()), 0.0), ())
    return [verdict for verdict in wrong.values() if verdict.count]


def interval(given: Arrays, name: str, dtype: str, shape: tuple[int, ...], *, exact: bool) -> tuple[Array, Array]:
    """The least and the greatest right number for every element of a quantity, in its dtype."""
    low, high = np.empty(shape, dtype), np.empty(shape, dtype)
    for _, place, want in given.expected([name], exact=exact):
        low[place], high[place] = inward(want)
    return low, high


def inward(want: Expected) -> tuple[Array, Array]:
    """The ends of an interval as numbers of the quantity's dtype, that lie in it."""
    dtype = want.value.dtype
    ends = []
    for end, towards in ((want.low, np.inf), (want.high, -np.inf)):
        near = cast(end, dtype.name)
        is_outside = near.astype(np.float64) < end if towards > 0 else near.astype(np.float64) > end
        ends.append(np.where(is_outside, np.nextafter(near, np.asarray(towards, dtype)), near).astype(dtype))
    return ends[0], ends[1]


def of_few_rows(given: Arrays, results: Mapping[str, Array], verdict: Verdict) -> tuple[Data, Array] | None:
    """A block of rows with what is wrong, and the result there; of a sum all rows, None where they are many."""
    if verdict.quantity in _OF_SUMS:
        size = math.prod(given.call.shape)
        return (given.data(), results[verdict.quantity]) if size <= _BLOCK else None
    for place in given.blocks():
        inside = zip(verdict.place, place, strict=True)
        if all(part.stop is None or (part.start or 0) <= index < part.stop for index, part in inside):
            return given.data(place), results[verdict.quantity][place]
    return None


def result_dtypes(call: Call, arrays: Mapping[str, Array]) -> dict[str, Spec]:
    """The shape and the dtype of every quantity that a call has."""
    specs = {"y": Spec(call.shape, call.result_dtype)}
    if "residual" in arrays:
        specs["h"] = Spec(call.shape, call.sum_dtype)
    for name in GRADIENTS:
        if (array := arrays.get(name.removeprefix("d"))) is not None:
            specs[name] = Spec(array.shape, array.dtype.name)
    return specs
