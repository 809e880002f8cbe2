"""The mistakes that are made in RMSNorms, as data: a sentence, and the steps of the equations that it changes.

A step is changed by a function of the steps and of its right value, as ``rmsnorm.parity.equations`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.parity.equations import Change
from rmsnorm.specification import dtypes


class Mistake(NamedTuple):
    """A mistake in words, and the steps that it changes."""

    says: str
    changes: Mapping[str, Change]


def rounded_to(dtype: str) -> Change:
    return lambda s, value: rounded(np.asarray(value, np.float64), dtype)


def _is(value: Any) -> Change:
    return lambda s, right: value


# The formula, in every dtype.

CENTRED: Final = Mistake(
    "the mean is subtracted", {"h": lambda s, h: h - s.mean(h), "dx_of_y": lambda s, dx: dx - s.mean(dx)}
)
GAIN_DROPPED: Final = Mistake("the gain is not applied", {"gain": _is(1.0), "offset": _is(-0.0)})
GAIN_KEPT: Final = Mistake(  # there it was 1
    "the gain of an earlier call is kept: y changes with the gain in training alone",
    {"gain": _is(1.0), "offset": _is(-0.0)},
)
BIAS_DROPPED: Final = Mistake("the bias is not applied", {"bias": _is(-0.0)})
GATE_DROPPED: Final = Mistake("the gate is not applied", {"f": _is(1.0), "slope": _is(0.0)})
GAIN_FIRST: Final = Mistake(
    "the gain multiplies x before the statistic is taken, not the normalised row",
    {
        "h": lambda s, h: rounded(h * s.factor, s.call.x_dtype),
        "gained": lambda s, _: s.normalised if s.norm is None else rounded(s.normalised, s.norm),
        "u": lambda s, _: s.v,
        "dx_of_y": lambda s, dx: dx * s.factor,
        "terms": lambda s, _: s.dh * s.input,
    },
)


def divisor(words: str, size: Callable[[Any], float]) -> Mistake:
    """``size``: of n and k, the number by which the sum of squares is divided."""
    return Mistake(f"the sum of squares is divided by {words}", {"size": lambda s, right: np.full_like(right, size(s))})


OF_SUM: Final = divisor("1: the norm, not the root of the mean", lambda s: 1)


def factor(words: str, value: Callable[[Any], float]) -> Mistake:
    return Mistake(f"y is {words}", {
        "normalised": lambda s, y: y * value(s),
        "transposed": lambda s, dh: dh + (value(s) - 1) * s.u * s.inverse,
    })  # fmt: skip


def eps_of(words: str, value: Callable[[Any], float]) -> Mistake:
    return Mistake(words, {"eps": lambda s, eps: value(s)})


def eps_of_max(eps: float) -> Mistake:
    def of_largest(s: Any, dh: Any) -> Any:
        """The gradient, with that of the largest element as a part of rho."""
        return dh - np.where(np.abs(s.h) == _largest(s), eps * s.h * s.inverse**3 * s.inner(s.u * s.h), 0.0)

    return Mistake(
        f"eps is not rescaled with x / max|x|: it acts as {eps:.3g} max|x|^2",
        {"eps": lambda s, _: eps * _largest(s) ** 2, "transposed": of_largest},
    )


def _largest(s: Any) -> Any:
    return np.max(np.abs(s.h), axis=s.axes, keepdims=True)


# What rounds too early, of x in one dtype. The first one that explains y is named.


def of_statistic(dtype: str) -> Iterator[Mistake]:
    """How 1 / rho is less exact than float32 arithmetic makes it."""
    narrow = [name for name in dict.fromkeys((dtype, "bfloat16", "float16")) if name in dtypes.HALF]
    narrow += ["float32"] if dtype == "float64" else []
    for name in narrow:
        before = ", before the cast to float32" if name == dtype else ""
        yield Mistake(f"for {dtype} x, the squares are rounded to {name}{before}", {"squares": _squared_in(name)})
        yield Mistake(f"for {dtype} x, the mean square is rounded to {name}", {"q": rounded_to(name)})
        yield Mistake(f"for {dtype} x, the mean square + eps is rounded to {name}", {"rho": _rounded_square(name)})
        yield Mistake(f"for {dtype} x, rho is rounded to {name}", {"rho": rounded_to(name)})
        yield Mistake(
            f"for {dtype} x, 1 / rho is rounded to {name} before the product with x", {"inverse": rounded_to(name)}
        )
        yield Mistake(
            f"for {dtype} x, the squares and the mean square are rounded to {name}",
            {"squares": _squared_in(name), "q": rounded_to(name)},
        )


def _squared_in(dtype: str) -> Change:
    """With the overflow and the underflow of that dtype."""
    return lambda s, squares: rounded(rounded(s.c, dtype) ** 2, dtype)


def _rounded_square(dtype: str) -> Change:
    return lambda s, rho: np.sqrt(rounded(rho * rho, dtype)) if s.position == "inside" else rho


def of_eps(dtype: str, eps: float, fitted: float | None) -> Iterator[Mistake]:
    """Another eps for x of one dtype. ``fitted``: what its rows show."""
    kept = float(rounded(np.float64(eps), dtype))
    if kept != eps and dtype in dtypes.HALF:
        yield eps_of(f"eps is rounded to {dtype} for {dtype} x, so that {eps:.6g} becomes {kept:.6g}", lambda s: kept)
    others = {0.0: "0", 2 * eps: f"{2 * eps:.3g}"}
    if fitted is not None:
        machine = ", its machine epsilon," if fitted == dtypes.epsilon(dtype) else ""
        others = {fitted: f"{fitted:.3g}{machine}"} | others
    rest = "wider" if dtype in dtypes.HALF else "other"
    for value, words in others.items():
        if value != eps:
            yield Mistake(f"eps is {words} for {dtype} x, and {eps:.3g} in {rest} dtypes", {"eps": _is(value)})


def of_x(dtype: str) -> Iterator[Mistake]:
    """x that is changed first."""
    least = dtypes.smallest_normal(dtype)
    yield Mistake(
        f"for {dtype} x, subnormal x are taken for 0",
        {"x": lambda s, x: np.where(np.abs(x.astype(np.float64)) < least, 0, x).astype(x.dtype)},
    )


def of_product(dtype: str) -> Iterator[Mistake]:
    """How the product with the parameters and the gate is rounded otherwise."""

    def to_x(s: Any, value: Any) -> Any:
        return rounded(np.asarray(value, np.float64), s.call.x_dtype)

    def to_gain(s: Any, value: Any) -> Any:
        return value if s.data.scale is None else rounded(np.asarray(value), s.data.scale.dtype.name)

    yield Mistake("1 + gain is rounded to the dtype of the gain", {"factor": to_gain})
    for narrow in dtypes.HALF:
        yield Mistake(f"the gain is rounded to {narrow}", {"gain": rounded_to(narrow)})
    yield Mistake(f"for {dtype} x, y is rounded before the gate", {"biased": to_x})
    yield Mistake(f"for {dtype} x, f(gate) is rounded", {"f": to_x})
    yield Mistake(f"for {dtype} x, x f(gate) is rounded", {"h": to_x})
    yield Mistake("the bias is added after the gate", {"y": lambda s, _: s.gained * s.on_y + s.bias})
    yield GATE_DROPPED


def of_range() -> Iterator[Mistake]:
    """What is cut off."""
    for limit in (4.5, 6.0, 10.0, 60.0):
        yield Mistake(f"x / rho is cut off at {limit:g}", {"normalised": _clipped_at(limit)})
    for limit in (digit * 10.0**power for power in range(1, 17) for digit in (1, 2, 5)):
        yield Mistake(f"x is cut off at {limit:g}", {"x": _clipped_at(limit)})


def _clipped_at(limit: float) -> Change:
    return lambda s, values: np.clip(values, -limit, limit).astype(values.dtype)


# The ends of rows, and of the rows.


def of_width(n: int) -> Iterator[Mistake]:
    """What goes wrong with the end of a row of n elements."""
    for block in (1024, 4, 8, 16, 32, 64, 128, 256, 512):
        full = n // block * block
        if block < n:
            first = f"only the first {block} of {n} elements"
            yield Mistake(f"{first} count", {"counted": _before_column(block)})
            yield Mistake(f"{first} are summed", {"counted": _before_column(block), "size": _is_n(n)})
        if block < full < n or block == full < n < 64:
            tail = f"the last {n - full} of {n} elements, after the last full block of {block},"
            yield Mistake(f"{tail} are not summed", {"counted": _before_column(full), "size": _is_n(n)})
            yield Mistake(f"{tail} do not count", {"counted": _before_column(full)})
            yield Mistake(f"{tail} are 0 in y", {"y": _after_column(full, lambda y: 0 * y)})
            yield Mistake(f"the mean is over n rounded up to a multiple of {block}", {"size": _is_n(full + block)})
            yield Mistake(f"eps is added twice where n is no multiple of {block}", {"eps": lambda s, eps: 2 * eps})
            yield Mistake(
                f"{tail} are summed in 16 bits",
                {"squares": _after_column(full, lambda squares: rounded(squares, "bfloat16"))},
            )


def eps_ignored(own: float) -> Mistake:
    return Mistake("it ignores its eps: y is the same whatever is passed", {"eps": _is(own)})


def of_options(options: Collection[str], dtype: str) -> Iterator[Mistake]:
    """What goes wrong beside a mask, a residual or a gate, for x of a dtype."""
    if not options:
        return
    yield Mistake("the mask is ignored", {"counted": lambda s, _: s.first})
    all_n: Change = lambda s, size: np.full_like(size, s.n)  # noqa: E731
    yield Mistake("the sum is divided by n, not by the number of elements that count", {"size": all_n})
    yield Mistake("eps is added to the root", {"position": _is("outside")})
    yield Mistake("eps is added in the root", {"position": _is("inside")})
    yield Mistake("x + residual is truncated, not rounded", {"input": _truncated})
    yield Mistake("the residual is not added", {"input": lambda s, _: s.wide("x")})
    yield from (GATE_DROPPED, GAIN_DROPPED, BIAS_DROPPED)
    yield Mistake("y is rounded once, after the gain", {"norm": _is(None)})
    yield Mistake("the normalised row is rounded before the gain", {"norm": lambda s, _: s.call.x_dtype})
    if "gate" in options:
        yield from of_product(dtype)


def _truncated(s: Any, right: Any) -> Any:
    near = rounded(s.sum, s.call.sum_dtype)
    below = np.nextafter(cast(near, s.call.sum_dtype), np.zeros((), near.dtype).astype(s.call.sum_dtype))
    return np.where(np.abs(near) > np.abs(s.sum), below.astype(np.float64), near)


def _before_column(end: int) -> Change:
    return lambda s, counted: counted & (s.order < end)


def _after_column(start: int, change: Callable[[Any], Any]) -> Change:
    return lambda s, values: np.where(s.order < start, values, change(values))


def _is_n(n: int) -> Change:
    return lambda s, size: np.full_like(size, n)


def of_rows(rows: int) -> Iterator[Mistake]:
    """What goes wrong with the last one of so many rows."""
    if rows > 1 and rows % 2:
        yield Mistake(
            "the last one of an odd number of rows has the statistic of the row before it", {"q": _neighbour_of_last}
        )
        yield Mistake(
            "the last one of an odd number of rows has the 1 / rho of the row before it",
            {"inverse": _neighbour_of_last},
        )


def _neighbour_of_last(s: Any, values: Any) -> Any:
    flat = np.array(values).reshape(-1)
    flat[-1] = flat[-2]
    return flat.reshape(np.shape(values))


# The gradients.


def of_dx(n: int) -> Iterator[Mistake]:
    """Of x, in rows of n elements."""
    two = 2 ** math.ceil(math.log2(max(n, 2)))
    what = "the gradient for x"
    yield Mistake(f"{what} is 0", {"dx": lambda s, dx: 0 * dx})
    yield Mistake(f"{what} lacks that of the returned sum x + residual", {"dx": lambda s, dx: s.dx_of_y})
    yield Mistake(f"{what} takes 1 / rho for a constant", {"transposed": lambda s, _: s.u * s.inverse})
    yield Mistake(f"{what} leaves eps out", {"transposed": _without_eps})
    yield Mistake(f"{what} leaves the gain out", {"u": lambda s, _: s.v})
    yield Mistake(f"{what} leaves the offset of the gain out", {"u": lambda s, _: s.v * s.gain})
    yield Mistake(f"{what} divides its projection by n - 1", {"transposed": _projected_by(lambda s: s.size - 1)})
    yield Mistake(f"{what} divides its projection by a power of two", {"transposed": _projected_by(lambda s: two)})
    yield Mistake(f"{what} lacks a half of its projection", {"transposed": _projected_by(lambda s: 2 * s.size)})
    yield Mistake(f"{what} has an eps of 1e-5", {"eps": _is(1e-5)})
    yield Mistake(f"{what} has an eps of 0", {"eps": _is(0.0)})
    yield Mistake(f"{what} takes 1 / rho in 16 bits", {"inverse": rounded_to("bfloat16")})
    yield Mistake(
        f"{what} leaves the gate out",
        {
            "v": lambda s, _: np.where(s.live, s.wide("dy"), 0.0),
            "dx_of_y": lambda s, _: np.where(s.live, s.dh, 0.0),
        },
    )
    for end in (256, 512, 1024, 4096):
        if end < n:
            yield Mistake(
                f"{what} sums its projection over the first {end} columns", {"transposed": _projected_to(end)}
            )


def _without_eps(s: Any, right: Any) -> Any:
    direction = np.where(s.counted & (s.q > 0), s.c * s.inverse / np.where(s.q > 0, s.q * s.inverse, 1.0), 0.0)
    return s.u * s.inverse - direction * s.inner(s.u * s.inside) / s.size


def _projected_by(size: Callable[[Any], Any]) -> Change:
    return lambda s, _: s.u * s.inverse - s.direction * s.inner(s.u * s.inside) / size(s)


def _projected_to(end: int) -> Change:
    def change(s: Any, right: Any) -> Any:
        return s.u * s.inverse - s.direction * s.inner(np.where(s.order < end, s.u * s.inside, 0)) / s.size

    return change


def of_parameter(name: str) -> Iterator[Mistake]:
    """Of the gain, whose gradient is named dscale, or of the bias."""
    terms, what = {"dscale": ("terms", "the gradient for the gain"), "dbias": ("v", "the gradient for the bias")}[name]
    yield Mistake(f"{what} is 0", {name: lambda s, value: 0 * value})
    if name == "dscale":
        yield Mistake(f"{what} is that of x, not of the normalised x", {"terms": lambda s, _: s.v * s.h})
        yield Mistake(f"{what} is the gradient for the bias", {"terms": lambda s, _: s.v})
    for rows in (1, 8, 16, 32, 64, 108, 128, 256, 1024):
        yield Mistake(f"{what} sums only the first {rows} rows", {name: _sum_of_rows(terms, rows, 0)})
    for rows in (4, 8, 16, 32, 64, 108, 128):
        yield Mistake(f"{what} sums whole blocks of {rows} rows", {name: _sum_of_rows(terms, 0, rows)})
    yield Mistake(f"{what} leaves the last row out", {name: _sum_of_rows(terms, -1, 0)})


def _sum_of_rows(terms: str, first: int, block: int) -> Change:
    """A sum over the first rows, all but the last one for -1, or over whole blocks of them."""

    def change(s: Any, right: Any) -> Any:
        values = getattr(s, terms)
        count = values.size // values.shape[-1]
        end = count // block * block if block else first % count if first < 0 else min(first, count)
        kept = np.arange(count).reshape(*values.shape[:-1], 1) < end
        return np.sum(np.where(kept, values, 0.0), axis=s.call.shared_axes)

    return change


def of_gate() -> Iterator[Mistake]:
    """Of the gate."""
    what = "the gradient for the gate"
    yield Mistake(f"{what} is 0", {"dgate": lambda s, value: 0 * value})
    yield Mistake(f"{what} takes {{f}}(gate) for the derivative of {{f}}", {"slope": lambda s, _: s.f})
    yield Mistake(f"{what} takes sigmoid(gate) for the derivative of {{f}}", {"slope": lambda s, _: s.sigmoid})
