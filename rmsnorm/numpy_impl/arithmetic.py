"""The arithmetic of the golden: double-double numbers, block after block of rows.

The gradient uses that R = d(h / rho) / dh acts on the direction of h and on what is orthogonal to it separately:
R = (1 / rho) (I - P + w P), with P the projection on h and w the share of eps in rho (w = 0 for eps = 0). Written so,
nothing cancels but what is orthogonal; for w above 1/2 it is R = (1 / rho) (I - (1 - w) P) where nothing does.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import CLAMPED

_BLOCK = 2**15  # elements: the temporaries of a block of rows stay in cache
_LEAST = -(2**20)  # below every exponent


Scaled: TypeAlias = tuple[DoubleDouble, Array]  # a number times a power of two


class Data(NamedTuple):
    """A block of rows. No square leaves the range: root is multiplied by 2^-size, rho by 2^-exponent."""

    h: Scaled  # each element for itself: beside a large one a small one may leave the range
    counted: Array
    k: DoubleDouble
    root: DoubleDouble  # sqrt(q)
    rho: DoubleDouble
    s: Scaled  # d rho / d h = c / (k s), c is h where it is counted
    radial: DoubleDouble  # w, the share of eps in rho
    size: Array
    exponent: Array
    empty: Array  # rows with nothing counted
    has_gradient: Array  # elements that take part in derivatives
    gain: DoubleDouble  # o + g
    scale: Array | None
    bias: Array | None

    def quotient(self) -> Scaled:
        """x^ = h / rho, 0 in empty rows."""
        fraction, exponent = self.h
        return (fraction / self.rho).where(~self.empty, 0.0), exponent - self.exponent

    def elements(self) -> tuple[Scaled, Scaled]:
        """c and h, 0 where they take no part in derivatives."""
        h = self.h[0].where(self.has_gradient, 0.0), self.h[1]
        return (h[0].where(self.counted, 0.0), h[1]), h

    def inverse_rms(self, dtype: str) -> Array:
        return (DoubleDouble(1.0) / self.rho).where(~self.empty, 0.0).round(dtype, -self.exponent)

    def without_projection(self, vector: Scaled, along: Scaled, inner: Scaled) -> Scaled:
        """The vector less (1 - w) a <b, v> / (k q), in which a and b are c and h, given the inner product over k.

        Where w is small, the whole term is subtracted first and w times it is added then, because the whole term may
        equal the vector. A difference below the accuracy of 106 bits is set to 0.
        Where a term is not finite it is what the textbook's formula gives: a <b, v> / (k s rho).
        """
        seen = self.root.hi != 0
        by_root = (along[0] / self.root).where(seen, 0.0) * (inner[0] / self.root).where(seen, 0.0)
        by_rho = (along[0] / self.s[0]) * (inner[0] / self.rho)
        exponent = along[1] + inner[1]
        of_root, of_rho = exponent - 2 * self.size, exponent - self.s[1] - self.exponent
        large = (self.radial.hi > 0.5) | ~np.isfinite(by_root.hi)
        top = np.maximum(_top(*vector), np.where(large, _top(by_rho, of_rho), _top(by_root, of_root)))
        minuend, by_root, by_rho = (
            vector[0].scaled(vector[1] - top),
            by_root.scaled(of_root - top),
            by_rho.scaled(of_rho - top),
        )
        rest = minuend - by_root
        rest = rest.where(~(np.abs(rest.hi) <= 2.0**-95 * np.abs(by_root.hi)), 0.0)
        small = rest + self.radial * by_root
        return small.where(~large, 0.0) + (minuend - by_rho).where(large, 0.0), top


def statistic(call: Call, h: Scaled, counted: Array, mask: Array, scale: Array | None, bias: Array | None) -> Data:
    k = counted.sum(axis=1, keepdims=True)
    empty = k == 0
    count = DoubleDouble(np.maximum(k, 1))
    position = call.variant.eps_position
    eps = DoubleDouble(call.eps)
    length = {"inside": eps.sqrt(), "outside": eps, "clamp": eps / count.sqrt()}[position]
    size = np.max(_top(*h), axis=1, keepdims=True, initial=_LEAST, where=counted)
    is_finite = np.all(np.isfinite(h[0].hi), axis=1, keepdims=True, where=counted)
    size = np.where(is_finite & (size > _LEAST), size, 0)
    c = h[0].scaled(h[1] - size).where(counted, 0.0)
    size = np.where(c.hi.any(axis=1, keepdims=True), size, _LEAST)
    exponent = np.maximum(size, np.where(length.hi > 0, np.frexp(length.hi)[1], _LEAST))

    own_q = (c * c).sum(axis=1) / count
    own = own_q.sqrt()
    q, root = own_q.scaled(2 * (size - exponent)), own.scaled(size - exponent)
    clamped = np.zeros(k.shape, bool)
    if position == "inside":
        shift = eps.scaled(-2 * exponent)
        rho, radial = (q + _visible(shift, q)).sqrt(), shift / (q + shift)
    elif position == "outside":
        shift = eps.scaled(-exponent)
        rho, radial = root + _visible(shift, root), shift / (root + shift)
    else:
        floor = length.scaled(-exponent)
        below = (root.hi < floor.hi) | ((root.hi == floor.hi) & (root.lo < floor.lo))
        rho = DoubleDouble(np.where(below, floor.hi, root.hi), np.where(below, floor.lo, root.lo))
        clamped = root.hi < floor.hi * CLAMPED
        radial = DoubleDouble(np.where(clamped, 1.0, 0.0))
    s = (rho, exponent) if position == "inside" else (own.where((own.hi != 0) & ~clamped, np.inf), size)
    radial = radial.where(rho.hi != 0, np.nan)
    gain = DoubleDouble(1.0)
    if scale is not None:
        gain = DoubleDouble(call.offset) + DoubleDouble(scale)
    has_gradient = mask & ~empty
    return Data(h, counted, count, own, rho, s, radial, size, exponent, empty, has_gradient, gain, scale, bias)


def _visible(eps: DoubleDouble, other: DoubleDouble) -> DoubleDouble:
    """Eps, no smaller than what other + eps can resolve: for however small an eps, a tie in y is not one."""
    least = np.where(eps.hi > 0, other.hi * 2.0**-100, 0.0)
    return DoubleDouble(np.maximum(eps.hi, least), np.where(eps.hi >= least, eps.lo, 0.0))


def affine(call: Call, data: Data) -> Scaled:
    """h / rho * (o + g) + b with the roundings of the variant, but that of y itself."""
    y, exponent = data.quotient()
    if call.norm_dtype is None:
        y, exponent = product_of((y, exponent), data.gain.fraction())
        if data.bias is not None:
            y, exponent = sum_of((y, exponent), scaled(data.bias))
        return y.where(~data.empty, 0.0), exponent
    y = DoubleDouble(y.round(call.norm_dtype, exponent))
    if data.scale is not None:
        gain = DoubleDouble(data.gain.round(call.product_dtype))
        y, exponent = product_of(y.fraction(), gain.fraction())
        y = DoubleDouble(y.round(call.product_dtype, exponent))
    if data.bias is not None:
        y = DoubleDouble((y + DoubleDouble(data.bias)).round(call.product_dtype))
    return y.where(~data.empty, 0.0), np.zeros((), int)


def forward(call: Call, data: Data, factor: Scaled | None = None) -> Array:
    """y, times the factor of a gate if there is one."""
    y, exponent = affine(call, data) if factor is None else product_of(affine(call, data), factor)
    return y.where(~data.empty, 0.0).round(call.result_dtype, exponent)  # 0 also times a gate of NaN


def scaled(array: Array) -> Scaled:
    return DoubleDouble(array).fraction()


def apply(function: Callable[[Array], Array], number: Scaled) -> Scaled:
    """Rearrange all parts."""
    return number[0].apply(function), function(np.broadcast_to(number[1], np.shape(number[0].hi)))


def product_of(a: Scaled, b: Scaled) -> Scaled:
    return a[0] * b[0], a[1] + b[1]


def sum_of(a: Scaled, b: Scaled) -> Scaled:
    """In units of the larger one. What the smaller one then loses, the sum does not show."""
    top = np.maximum(_top(*a), _top(*b))
    return a[0].scaled(a[1] - top) + b[0].scaled(b[1] - top), top


def _top(number: DoubleDouble, exponent: Array) -> Array:
    """e with 2^e the next power of two above a number."""
    return np.where(number.hi == 0, _LEAST, np.frexp(number.hi)[1] + exponent)


def _sum_along(terms: Scaled, axis: int) -> Scaled:
    """Their sum, in units of the largest."""
    top = np.max(_top(*terms), axis=axis, keepdims=True, initial=_LEAST)
    return terms[0].scaled(terms[1] - top).sum(axis), top


def backward(data: Data, v: Scaled) -> Scaled:
    """R^T u = (u - (1 - w) c <u, h> / (k q)) / rho for u = (o + g) v."""
    c, h = data.elements()
    u = product_of(data.gain.fraction(), v)
    u = u[0].where(data.has_gradient, 0.0), u[1]
    inner, exponent = _sum_along(product_of(u, h), 1)
    rest, top = data.without_projection(u, c, (inner / data.k, exponent))
    rest = rest.where(data.counted, 0.0) + u[0].where(~data.counted, -0.0)
    top = np.where(data.counted, top, u[1])
    return (rest / data.rho).where(data.has_gradient, 0.0), top - data.exponent


def tangent(data: Data, dh: Scaled) -> Scaled:
    """R dh = (dh - (1 - w) h <c, dh> / (k q)) / rho."""
    c, h = data.elements()
    along = dh[0].where(data.has_gradient, 0.0), dh[1]
    inner, exponent = _sum_along(product_of(c, along), 1)
    rest, top = data.without_projection(along, h, (inner / data.k, exponent))
    return rest / data.rho, top - data.exponent


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

    def over_rows(self, terms: Scaled) -> DoubleDouble:
        """Sum over the axes that share the parameters, in the shape of the parameters."""
        order = [*self.call.shared_axes, *self.call.feature_axes]
        sizes = [self.call.shape[axis] for axis in self.call.feature_axes]
        shared = int(np.prod([self.call.shape[axis] for axis in self.call.shared_axes], dtype=np.int64))
        matrix = apply(lambda part: self.back(part).transpose(order).reshape(shared, *sizes), terms)
        total, exponent = _sum_along(matrix, 0)
        return derivative(total[0].scaled(exponent[0]))


def blocks(
    rows: Rows, call: Call, h: Scaled, scale: Array | None, bias: Array | None, mask: Array | None
) -> Iterator[tuple[slice, Data]]:
    everywhere = np.ones((), bool)
    first = np.arange(rows.n) < (call.k or 0)
    mask = rows.of(everywhere if mask is None else mask)
    parameters = [None if p is None else rows.of(p.reshape(call.feature_shape)) for p in (scale, bias)]
    matrix = apply(rows.of, h)
    step = max(1, _BLOCK // max(1, rows.n))
    for start in range(0, rows.count if rows.n else 0, step):
        block = slice(start, start + step)
        g, b = (None if p is None else p[block].astype(np.float64) for p in parameters)
        yield block, statistic(call, part(matrix, block), mask[block] & first, mask[block], g, b)


def part(number: Scaled, block: slice) -> Scaled:
    return number[0][block], number[1][block]


def assign(target: Scaled, block: slice, value: Scaled) -> None:
    target[0].hi[block], target[0].lo[block], target[1][block] = value[0].hi, value[0].lo, value[1]


def add(x: Array, residual: Array | None, dtype: str) -> Array:
    if residual is None:
        return x
    with np.errstate(all="ignore"):
        return (DoubleDouble(x) + DoubleDouble(residual)).round(dtype)
