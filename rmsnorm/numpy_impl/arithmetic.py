"""The arithmetic of the golden: double-double numbers, block after block of rows.

The gradient uses that R = d(h / rho) / dh acts on the direction of h and on what is orthogonal to it separately:
R = (1 / rho) (I - P + w P), with P the projection on h and w the share of eps in rho (w = 0 for eps = 0). Written so,
nothing cancels but what is orthogonal; for w above 1/2 it is R = (1 / rho) (I - (1 - w) P) where nothing does.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from rmsnorm.call import Call
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble

_BLOCK = 2**15  # elements: the temporaries of a block of rows stay in cache


class Data(NamedTuple):
    """A block of rows, with h, c and the statistic multiplied by 2^-exponent, so that no square leaves the range."""

    h: DoubleDouble
    own: Array  # h as it came: beside a large element a small one may leave the range when it is scaled
    c: DoubleDouble  # what the statistic squares: h, or h less its mean; 0 where not counted
    counted: Array
    k: DoubleDouble
    root: DoubleDouble  # sqrt(q)
    rho: DoubleDouble
    s: DoubleDouble  # d rho / d h = c / (k s)
    radial: DoubleDouble  # w, the share of eps in rho
    exponent: Array
    empty: Array  # rows with nothing counted
    live: Array  # elements that take part in derivatives
    gain: DoubleDouble  # o + g
    scale: Array | None
    bias: Array | None

    def quotient(self) -> tuple[DoubleDouble, Array]:
        """x^ = h / rho without its power of two, and that, 0 in empty rows."""
        fraction, exponent = DoubleDouble(self.own).fraction()
        return (fraction / self.rho).where(~self.empty, 0.0), exponent - self.exponent

    def normalised(self) -> DoubleDouble:
        fraction, exponent = self.quotient()
        return fraction.scaled(exponent)

    def inverse_rms(self, dtype: str) -> Array:
        return (DoubleDouble(1.0) / self.rho).where(~self.empty, 0.0).round(dtype, -self.exponent)

    def directions(self) -> Iterator[tuple[DoubleDouble, DoubleDouble]]:
        """c^ and h^ of which (1 - w) P = (1 - w) c^ h^T / k, 0 where q is 0; and of which it is c^ h^T / k."""
        seen = self.root.hi != 0
        yield (self.c / self.root).where(seen, 0.0), (self.h / self.root).where(seen, 0.0)
        yield self.c / self.s, self.h / self.rho

    def less(self, vector: DoubleDouble, near: DoubleDouble, far: DoubleDouble) -> DoubleDouble:
        """The vector less (1 - w) times near, which is far: in two steps where w is small, that near may equal it.

        What 106 bits do not tell from 0 is 0. Where a term is not finite it is what the textbook's formula gives.
        """
        large = (self.radial.hi > 0.5) | ~np.isfinite(near.hi)
        rest = vector - near
        rest = rest.where(~(np.abs(rest.hi) <= 2.0**-95 * np.abs(near.hi)), 0.0)
        small = rest + self.radial * near
        return small.where(~large, 0.0) + (vector - far).where(large, 0.0)


def statistic(call: Call, h: Array, counted: Array, mask: Array, scale: Array | None, bias: Array | None) -> Data:
    k = counted.sum(axis=1, keepdims=True)
    empty = k == 0
    size = DoubleDouble(np.maximum(k, 1))
    position = call.variant.eps_position
    eps = DoubleDouble(call.eps)
    length = {"inside": eps.sqrt(), "outside": eps, "clamp": eps / size.sqrt()}[position]
    largest = np.max(np.abs(h), axis=1, keepdims=True, initial=0.0, where=counted)
    largest = np.maximum(largest, length.hi)
    exponent = np.where(np.isfinite(largest), np.frexp(largest)[1], 0)

    scaled = DoubleDouble(h).scaled(-exponent)
    c = scaled.where(counted, 0.0)
    if call.variant.statistic == "variance":
        c = (c - c.sum(axis=1) / size).where(counted, 0.0)
    q = (c * c).sum(axis=1) / size
    root = q.sqrt()
    clamped = np.zeros(k.shape, bool)
    if position == "inside":
        shift = eps.scaled(-2 * exponent)
        rho, radial = (q + _visible(shift, q)).sqrt(), shift / (q + shift)
    elif position == "outside":
        shift = eps.scaled(-exponent)
        rho, radial = root + _visible(shift, root), shift / (root + shift)
    else:
        floor = length.scaled(-exponent)
        clamped = (root.hi < floor.hi) | ((root.hi == floor.hi) & (root.lo < floor.lo))
        rho = DoubleDouble(np.where(clamped, floor.hi, root.hi), np.where(clamped, floor.lo, root.lo))
        radial = DoubleDouble(np.where(clamped, 1.0, 0.0))
    s = rho if position == "inside" else root.where((root.hi != 0) & ~clamped, np.inf)
    radial = radial.where(rho.hi != 0, np.nan)
    gain = DoubleDouble(1.0)
    if scale is not None:
        gain = DoubleDouble(call.offset) + DoubleDouble(scale)
    return Data(scaled, h, c, counted, size, root, rho, s, radial, exponent, empty, mask & ~empty, gain, scale, bias)


def _visible(eps: DoubleDouble, other: DoubleDouble) -> DoubleDouble:
    """Eps, no smaller than what other + eps can resolve: for however small an eps, a tie in y is not one."""
    least = np.where(eps.hi > 0, other.hi * 2.0**-100, 0.0)
    return DoubleDouble(np.maximum(eps.hi, least), np.where(eps.hi >= least, eps.lo, 0.0))


def forward(call: Call, data: Data, factor: DoubleDouble | None = None) -> Array:
    """y, times the factor of a gate if there is one."""
    y, exponent = data.quotient()
    if call.norm is None:
        y, exponent = _times((y, exponent), data.gain.fraction())
        if data.bias is not None:
            y, exponent = _plus((y, exponent), DoubleDouble(data.bias).fraction())
        if factor is not None:
            y, exponent = _times((y, exponent), factor.fraction())
        return y.where(~data.empty, 0.0).round(call.result, exponent)
    y = DoubleDouble(y.round(call.norm, exponent))
    if data.scale is not None:
        gain = DoubleDouble(data.gain.round(call.product))
        y, exponent = _times(y.fraction(), gain.fraction())
        y = DoubleDouble(y.round(call.product, exponent))
    if data.bias is not None:
        y = DoubleDouble((y + DoubleDouble(data.bias)).round(call.product))
    if factor is not None:
        y = y * factor
    return y.where(~data.empty, 0.0).round(call.result)


Scaled: TypeAlias = tuple[DoubleDouble, Array]  # a number times a power of two


def _times(a: Scaled, b: Scaled) -> Scaled:
    return a[0] * b[0], a[1] + b[1]


def _plus(a: Scaled, b: Scaled) -> Scaled:
    """In units of the larger one. What the smaller one then loses, the sum does not show."""
    sizes = [np.where(f.hi == 0, np.iinfo(np.int32).min // 4, np.frexp(f.hi)[1] + e) for f, e in (a, b)]
    top = np.maximum(*sizes)
    return a[0].scaled(a[1] - top) + b[0].scaled(b[1] - top), top


def backward(data: Data, v: DoubleDouble) -> DoubleDouble:
    """R^T u = (u - (1 - w) c^ <u, h^> / k) / rho for u = (o + g) v, both scaled so that no product leaves the range."""
    (gain, of_gain), (factor, of_v) = _moderate(data.gain), _moderate(v)
    u = (gain * factor).where(data.live, 0.0)
    near, far = (c * ((u * h.where(data.live, 0.0)).sum(axis=1) / data.k) for c, h in data.directions())
    rest = data.less(u, near, far)
    rest = rest.where(data.counted, 0.0) + u.where(~data.counted, -0.0)
    return (rest / data.rho).scaled(of_gain + of_v - data.exponent).where(data.live, 0.0)


def _moderate(rows: DoubleDouble) -> Scaled:
    """Rows of which the largest finite element is about 1, and the power of two of each."""
    if rows.hi.ndim == 0:
        return rows, np.zeros((), np.int64)
    largest = np.max(np.abs(rows.hi), axis=1, keepdims=True, initial=0.0, where=np.isfinite(rows.hi))
    exponent = np.frexp(largest)[1]
    return rows.scaled(-exponent), exponent


def tangent(data: Data, dh: DoubleDouble) -> DoubleDouble:
    """R dh = (dh - (1 - w) h^ <c^, dh> / k) / rho."""
    tangent = dh.where(data.live, 0.0).scaled(-data.exponent)
    near, far = (h * ((c * tangent).sum(axis=1) / data.k) for c, h in data.directions())
    return data.less(tangent, near, far) / data.rho


def derivative(terms: DoubleDouble) -> DoubleDouble:
    """With every zero as +0: which sign IEEE 754 gives a sum that is 0 depends on the order of its terms."""
    return terms + DoubleDouble(0.0)


class Rows:
    """Arrays shaped as x, seen as a matrix whose rows are normalised."""

    def __init__(self, call: Call) -> None:
        self.call = call
        rank = len(call.shape)
        self.outer = [axis for axis in range(rank) if axis not in call.axes]
        self.order = [*self.outer, *call.axes]
        self.n = call.n or 0
        self.count = int(np.prod([call.shape[axis] for axis in self.outer], dtype=np.int64))

    def of(self, array: Array) -> Array:
        spread = np.broadcast_to(array, self.call.shape).transpose(self.order)
        return spread.reshape(self.count, self.n)

    def back(self, rows: Array) -> Array:
        inner = [self.call.shape[axis] if rows.shape[1] == self.n else 1 for axis in self.call.axes]
        spread = rows.reshape([*(self.call.shape[axis] for axis in self.outer), *inner])
        return np.ascontiguousarray(spread.transpose(np.argsort(self.order)))

    def over_rows(self, terms: DoubleDouble) -> DoubleDouble:
        """Sum over the axes that share the parameters, in the shape of the parameters."""
        order = [*self.call.shared_axes, *self.call.feature_axes]
        sizes = [self.call.shape[axis] for axis in self.call.feature_axes]
        shared = int(np.prod([self.call.shape[axis] for axis in self.call.shared_axes], dtype=np.int64))
        matrix = terms.apply(lambda part: self.back(part).transpose(order).reshape(shared, *sizes))
        return derivative(matrix.sum(axis=0)[0])


def blocks(
    rows: Rows, call: Call, h: Array, scale: Array | None, bias: Array | None, mask: Array | None
) -> Iterator[tuple[slice, Data]]:
    everywhere = np.ones((), bool)
    first = np.arange(rows.n) < (call.k or 0)
    mask = rows.of(everywhere if mask is None else mask)
    parameters = [None if p is None else rows.of(p.reshape(call.feature_shape)) for p in (scale, bias)]
    matrix = rows.of(h)
    step = max(1, _BLOCK // max(1, rows.n))
    for start in range(0, rows.count if rows.n else 0, step):
        block = slice(start, start + step)
        g, b = (None if p is None else p[block].astype(np.float64) for p in parameters)
        yield block, statistic(call, matrix[block].astype(np.float64), mask[block] & first, mask[block], g, b)


def assign(target: DoubleDouble, block: slice, value: DoubleDouble) -> None:
    target.hi[block], target.lo[block] = value.hi, value.lo


def add(x: Array, residual: Array | None, dtype: str) -> Array:
    if residual is None:
        return x
    with np.errstate(all="ignore"):
        return (DoubleDouble(x) + DoubleDouble(residual)).round(dtype)
