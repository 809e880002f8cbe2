"""The golden: RMSNorm and its analytic gradients in 106-bit arithmetic, rounded where the variant says.

    y = a / rho * (o + g) + b        rho = sqrt(mean(a_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The gradient uses that R = d(a / rho) / da acts on the direction of
a and on what is orthogonal to it separately: R = (1 / rho) (I - P + w P), with P the projection on a and w the
share of eps in rho (w = 0 for eps = 0). Written so, nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm import dtypes, errors
from rmsnorm.call import Axis, Call, Spec, resolve
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.variants import Variant, derive

ArrayLike: TypeAlias = Any  # what np.asarray takes
_BLOCK = 2**15  # elements: the temporaries of a block of rows stay in cache


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    out_dtype: Any = None,
    return_inverse_rms: bool = False,
) -> Any:
    """Root mean square layer normalization.

        y = a / rho * (o + scale) + bias,    a = x + residual,    rho = sqrt(mean(a_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant.

    Args:
        x: floating-point, any shape of at least one axis: f16, bf16, f32 or f64.
        scale: gain g, of the sizes of x along the feature axes; None multiplies by 1, without the offset.
        bias: b, likewise.
        variant: name of a preset or a Variant.
        eps: in place of the variant's.
        partial: fraction of the elements, from the first, that enter the statistic; in place of the variant's.
        axis: normalised axis or axes.
        feature_axis: axis or axes of the parameters; None for the normalised ones.
        mask: bool, broadcasting to x: True counts in the statistic. Elsewhere y is normalised likewise but constant to
            every derivative, so values under the mask reach no gradient. A row with nothing counted gives 0.
        residual: added to x first, in promote(x, residual), and a returned beside y.
        out_dtype: of y; None for the variant's rule.
        return_inverse_rms: also return 1 / rho, 0 in rows with nothing counted; constant to every derivative.

    Returns:
        y, shaped as x; with ``residual`` (y, a); with ``return_inverse_rms`` followed by 1 / rho, whose normalised
        axes have size 1, in float32, for f64 in float64.

    Raises:
        TypeError: x, a parameter or the residual is not floating-point, the mask is not bool.
        ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import numpy as np
        >>> rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), variant="paper").round(4)
        array([[0.8485, 2.2627]])
    """
    x, scale, bias, mask, residual = _arrays(x, scale, bias, mask, residual)
    call = _resolve(
        "rms_norm", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm", variant, eps, partial), axis=axis, feature_axis=feature_axis,
    )  # fmt: skip
    rows = _Rows(call)
    a = _add(x, residual, call.x)
    y = np.empty((rows.count, rows.n), call.result)
    inverse_rms = np.zeros((rows.count, 1), call.inverse_rms)
    with np.errstate(all="ignore"):
        for block, data in _blocks(rows, call, a, scale, bias, mask):
            y[block] = _forward(call, data)
            inverse_rms[block] = data.inverse_rms().round(call.inverse_rms)
    outputs = [rows.back(y)]
    if residual is not None:
        outputs.append(a)
    if return_inverse_rms:
        outputs.append(rows.back(inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def rms_norm_vjp(
    dy: Any,
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    out_dtype: Any = None,
) -> Any:
    """Gradients of rms_norm: the product of dy with its Jacobian.

        dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * a / rho,    dbias = sum over rows of dy

    A rounding counts as the identity, as in automatic differentiation.

    Args:
        dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, da).
        x, scale, bias and options: as for rms_norm; ``out_dtype`` does not enter.

    Returns:
        (dx, dscale, dbias), each in the dtype of its argument, None where that is None; with ``residual``
        (dx, dscale, dbias, dresidual).

    Raises:
        TypeError, ValueError: as rms_norm; also when dy has another shape than x.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import numpy as np
        >>> dx, dscale, _ = rms_norm_vjp(np.ones(2), np.array([3.0, 4.0]), np.ones(2), variant="paper")
        >>> dx.round(4), dscale.round(4)
        (array([ 0.0453, -0.0339]), array([0.8485, 1.1314]))
    """
    dy, da = dy if isinstance(dy, tuple) and residual is not None else (dy, None)
    x, scale, bias, mask, residual, dy, da = _arrays(x, scale, bias, mask, residual, dy, da)
    call = _resolve(
        "rms_norm_vjp", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm_vjp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dy=_spec(dy), da=_spec(da),
    )  # fmt: skip
    rows = _Rows(call)
    v = rows.of(dy)
    gradient = DoubleDouble(np.empty((rows.count, rows.n)), np.empty((rows.count, rows.n)))
    along_scale = DoubleDouble(np.empty_like(gradient.hi), np.empty_like(gradient.hi))
    along_bias = np.empty_like(gradient.hi)
    with np.errstate(all="ignore"):
        for block, data in _blocks(rows, call, _add(x, residual, call.x), scale, bias, mask):
            along_bias[block] = np.where(data.live, v[block], 0.0)
            upstream = DoubleDouble(along_bias[block])
            _assign(gradient, block, _pull_back(data, data.gain * upstream))
            _assign(along_scale, block, (data.normalised() * upstream).where(data.live, 0.0))
        if da is not None:
            gradient = gradient + DoubleDouble(rows.of(da))
        dx = rows.back(gradient.round(x.dtype.name))
        dscale = None if scale is None else rows.over_rows(along_scale).round(scale.dtype.name)
        dbias = None if bias is None else rows.over_rows(DoubleDouble(along_bias)).round(bias.dtype.name)
        if residual is not None:
            return dx, dscale, dbias, rows.back(gradient.round(residual.dtype.name))
    return dx, dscale, dbias


def rms_norm_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    variant: str | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    out_dtype: Any = None,
) -> Array:
    """Directional derivative of rms_norm: the product of its Jacobian with the tangents.

        dy = (R dx) * (o + scale) + a / rho * dscale + dbias

    A rounding counts as the identity, and dy is rounded once.

    Args:
        primals: (x, scale, bias); trailing ones may be left out, and be None.
        tangents: (dx, dscale, dbias), each shaped as its primal; None is zero.
        options: as for rms_norm; the residual is a constant.

    Returns:
        dy, shaped as x, in the dtype of y.

    Raises:
        TypeError, ValueError: as rms_norm; also when a tangent has another shape than its primal.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import numpy as np
        >>> rms_norm_jvp((np.array([3.0, 4.0]),), (np.array([3.0, 4.0]),), variant="paper").round(30)
        array([0., 0.])
    """
    x, scale, bias, dx, dscale, dbias, mask, residual = _arrays(
        *_three("primals", primals), *_three("tangents", tangents), mask, residual
    )
    call = _resolve(
        "rms_norm_jvp", x, scale, bias, mask, residual, out_dtype,
        variant=derive("rms_norm_jvp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dx=_spec(dx), dscale=_spec(dscale), dbias=_spec(dbias),
    )  # fmt: skip
    rows = _Rows(call)
    zero = np.zeros(())
    da = rows.of(zero if dx is None else dx)
    dg = rows.of(zero if dscale is None else dscale.reshape(call.feature_shape))
    db = rows.of(zero if dbias is None else dbias.reshape(call.feature_shape))
    dy = np.empty((rows.count, rows.n), call.result)
    with np.errstate(all="ignore"):
        for block, data in _blocks(rows, call, _add(x, residual, call.x), scale, bias, mask):
            tangent = _push_forward(data, da[block]) * data.gain
            tangent = tangent + data.normalised() * DoubleDouble(dg[block]) + DoubleDouble(db[block])
            dy[block] = tangent.where(data.live, 0.0).round(call.result)
    return rows.back(dy)


class _Data(NamedTuple):
    """A block of rows, with a, c and the statistic multiplied by 2^-exponent, so that no square leaves the range."""

    a: DoubleDouble
    c: DoubleDouble  # what the statistic squares: a, or a less its mean; 0 where not counted
    k: DoubleDouble
    root: DoubleDouble  # sqrt(q)
    rho: DoubleDouble
    radial: DoubleDouble  # w, the share of eps in rho
    exponent: Array
    empty: Array  # rows with nothing counted
    live: Array  # elements that take part in derivatives
    gain: DoubleDouble  # o + g
    scale: Array | None
    bias: Array | None

    def normalised(self) -> DoubleDouble:
        """x^ = a / rho, 0 in empty rows."""
        return (self.a / self.rho).where(~self.empty, 0.0)

    def inverse_rms(self) -> DoubleDouble:
        return (DoubleDouble(1.0) / self.rho).scaled(-self.exponent).where(~self.empty, 0.0)

    def direction(self, vector: DoubleDouble) -> DoubleDouble:
        """Divide by sqrt(q); 0 where q is 0."""
        return (vector / self.root).where(self.root.hi != 0, 0.0)


def _statistic(call: Call, a: Array, counted: Array, live: Array, scale: Array | None, bias: Array | None) -> _Data:
    k = counted.sum(axis=1, keepdims=True)
    empty = k == 0
    size = DoubleDouble(np.maximum(k, 1))
    position = call.variant.eps_position
    eps = DoubleDouble(call.eps)
    length = {"inside": eps.sqrt(), "outside": eps, "clamp": eps / size.sqrt()}[position]
    largest = np.max(np.abs(a), axis=1, keepdims=True, initial=0.0, where=counted)
    largest = np.maximum(largest, length.hi)
    exponent = np.where(np.isfinite(largest), np.frexp(largest)[1], 0)

    scaled = DoubleDouble(a).scaled(-exponent)
    c = scaled.where(counted, 0.0)
    if call.variant.statistic == "variance":
        c = (c - c.sum(axis=1) / size).where(counted, 0.0)
    q = (c * c).sum(axis=1) / size
    root = q.sqrt()
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
    radial = radial.where(rho.hi != 0, np.nan)
    gain = DoubleDouble(1.0)
    if scale is not None:
        gain = DoubleDouble(call.variant.scale_offset) + DoubleDouble(scale)
    return _Data(scaled, c, size, root, rho, radial, exponent, empty, live & ~empty, gain, scale, bias)


def _visible(eps: DoubleDouble, other: DoubleDouble) -> DoubleDouble:
    """Eps, no smaller than what other + eps can resolve: for however small an eps, a tie in y is not one."""
    least = np.where(eps.hi > 0, other.hi * 2.0**-100, 0.0)
    return DoubleDouble(np.maximum(eps.hi, least), np.where(eps.hi >= least, eps.lo, 0.0))


def _forward(call: Call, data: _Data) -> Array:
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


def _pull_back(data: _Data, u: DoubleDouble) -> DoubleDouble:
    """R^T u = (u - c^ <u, a^> / k (1 - w)) / rho, with a^ = a / sqrt(q) and c^ likewise."""
    u = u.where(data.live, 0.0)
    inner = (u * data.direction(data.a).where(data.live, 0.0)).sum(axis=1) / data.k
    along = data.direction(data.c) * inner
    return ((u - along + data.radial * along) / data.rho).scaled(-data.exponent).where(data.live, 0.0)


def _push_forward(data: _Data, da: Array) -> DoubleDouble:
    """R da = (da - a^ <c^, da> / k (1 - w)) / rho."""
    tangent = DoubleDouble(da).where(data.live, 0.0).scaled(-data.exponent)
    inner = (data.direction(data.c) * tangent).sum(axis=1) / data.k
    along = data.direction(data.a) * inner
    return (tangent - along + data.radial * along) / data.rho


class _Rows:
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


def _blocks(
    rows: _Rows, call: Call, a: Array, scale: Array | None, bias: Array | None, mask: Array | None
) -> Iterator[tuple[slice, _Data]]:
    everywhere = np.ones((), bool)
    first = np.arange(rows.n) < (call.k or 0)
    live = rows.of(everywhere if mask is None else mask)
    parameters = [None if p is None else rows.of(p.reshape(call.feature_shape)) for p in (scale, bias)]
    matrix = rows.of(a)
    step = max(1, _BLOCK // max(1, rows.n))
    for start in range(0, rows.count if rows.n else 0, step):
        block = slice(start, start + step)
        g, b = (None if p is None else p[block].astype(np.float64) for p in parameters)
        yield block, _statistic(call, matrix[block].astype(np.float64), live[block] & first, live[block], g, b)


def _assign(target: DoubleDouble, block: slice, value: DoubleDouble) -> None:
    target.hi[block], target.lo[block] = value.hi, value.lo


def _add(x: Array, residual: Array | None, dtype: str) -> Array:
    if residual is None:
        return x
    with np.errstate(all="ignore"):
        return (DoubleDouble(x) + DoubleDouble(residual)).round(dtype)


def _arrays(*values: Any) -> list[Any]:
    return [None if value is None else np.asarray(value) for value in values]


def _three(name: str, values: Sequence[Any]) -> list[Any]:
    if not isinstance(values, Sequence) or not 1 <= len(values) <= 3:
        raise errors.wrong_type("rms_norm_jvp", name, values, "(x, scale, bias)", "leave trailing ones out or None")
    return [*values, None, None][:3]


def _spec(array: Array | None) -> Spec | None:
    return None if array is None else Spec(array.shape, array.dtype.name)


def _dtype_name(op: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise errors.not_a_choice(op, "out_dtype", dtype, dtypes.FLOATS) from None


def _resolve(
    op: str,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    residual: Array | None,
    out_dtype: Any,
    **options: Any,
) -> Call:
    return resolve(
        op,
        Spec(x.shape, x.dtype.name),
        _spec(scale),
        _spec(bias),
        mask=_spec(mask),
        residual=_spec(residual),
        out_dtype=_dtype_name(op, out_dtype),
        **options,
    )
