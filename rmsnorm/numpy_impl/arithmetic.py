"""The arithmetic of the golden: double-double numbers, block after block of rows.

The gradient uses that R = d(h / rho) / dh acts on the direction of h and on what is orthogonal to it separately:
R = (1 / rho) (I - P + w P), with P the projection on h and w the share of eps in rho (w = 0 for eps = 0). Written so,
nothing cancels but what is orthogonal; for w above 1/2 it is R = (1 / rho) (I - (1 - w) P) where nothing does.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rmsnorm.call import Call
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble

_BLOCK = 2**15  # elements: the temporaries of a block of rows stay in cache


class Data(NamedTuple):
    """A block of rows, with h, c and the statistic multiplied by 2^-exponent, so that no square leaves the range."""

    h: DoubleDouble
    c: DoubleDouble  # what the statistic squares: h, or h less its mean; 0 where not counted
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

    def normalised(self) -> DoubleDouble:
        """x^ = h / rho, 0 in empty rows."""
        return (self.h / self.rho).where(~self.empty, 0.0)

    def inverse_rms(self) -> DoubleDouble:
        return (DoubleDouble(1.0) / self.rho).scaled(-self.exponent).where(~self.empty, 0.0)

    def directions(self) -> Iterator[tuple[DoubleDouble, DoubleDouble]]:
        """c^ and h^ of which (1 - w) P = (1 - w) c^ h^T / k, 0 where q is 0; and of which it is c^ h^T / k."""
        seen = self.root.hi != 0
        yield (self.c / self.root).where(seen, 0.0), (self.h / self.root).where(seen, 0.0)
        yield self.c / self.s, self.h / self.rho

    def less(self, vector: DoubleDouble, near: DoubleDouble, far: DoubleDouble) -> DoubleDouble:
        """The vector less (1 - w) times near, which is far: in two steps where w is small, that near may equal it."""
        large = self.radial.hi > 0.5
        small = vector - near + self.radial * near
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
        gain = DoubleDouble(call.variant.scale_offset) + DoubleDouble(scale)
    return Data(scaled, c, size, root, rho, s, radial, exponent, empty, mask & ~empty, gain, scale, bias)


def _visible(eps: DoubleDouble, other: DoubleDouble) -> DoubleDouble:
    """Eps, no smaller than what other + eps can resolve: for however small an eps, a tie in y is not one."""
    least = np.where(eps.hi > 0, other.hi * 2.0**-100, 0.0)
    return DoubleDouble(np.maximum(eps.hi, least), np.where(eps.hi >= least, eps.lo, 0.0))


def forward(call: Call, data: Data) -> Array:
    normalised = data.normalised()
    if call.norm is None:
        y = normalised * data.gain
        if data.bias is not None:
            y = y + DoubleDouble(data.bias)
        return y.where(~data.empty, 0.0).round(call.result)
    y = DoubleDouble(normalised.round(call.norm))
    if data.scale is not None:
        y = DoubleDouble((y * DoubleDouble(data.gain.round(call.product))).round(call.product))
    if data.bias is not None:
        y = DoubleDouble((y + DoubleDouble(data.bias)).round(call.product))
    return y.where(~data.empty, 0.0).round(call.result)


def backward(data: Data, u: DoubleDouble) -> DoubleDouble:
    """R^T u = (u - (1 - w) c^ <u, h^> / k) / rho."""
    u = u.where(data.live, 0.0)
    near, far = (c * ((u * h.where(data.live, 0.0)).sum(axis=1) / data.k) for c, h in data.directions())
    return (data.less(u, near, far) / data.rho).scaled(-data.exponent).where(data.live, 0.0)


def tangent(data: Data, dh: Array) -> DoubleDouble:
    """R dh = (dh - (1 - w) h^ <c^, dh> / k) / rho."""
    tangent = DoubleDouble(dh).where(data.live, 0.0).scaled(-data.exponent)
    near, far = (h * ((c * tangent).sum(axis=1) / data.k) for c, h in data.directions())
    return data.less(tangent, near, far) / data.rho


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
        return matrix.sum(axis=0)[0]


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
