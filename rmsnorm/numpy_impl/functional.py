"""The golden: RMSNorm and its analytic gradients in 106-bit arithmetic, rounded where the variant says.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in arithmetic.py. fast.py has
rms_norm and rms_norm_vjp in compiled kernels, with the same bits in f16, bf16 and f32 except next to a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Never, TypeAlias

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm.numpy_impl.arithmetic import (
    Rows,
    Scaled,
    add,
    affine,
    apply,
    assign,
    backward,
    blocks,
    derivative,
    forward,
    part,
    product_of,
    scaled,
    sum_of,
    tangent,
)
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.numpy_impl.gate import factor, slope
from rmsnorm.specification import errors
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.interface import dy_and_dh, forward_of, gradients_of, unknown_argument
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Preset, Variant, derive

ArrayLike: TypeAlias = Any  # what np.asarray takes


@forward_of(np.ndarray)
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    out_dtype: Any = None,
    return_inverse_rms: bool = False,
    **unknown: Never,
) -> Any:
    """Root mean square layer normalization.

        y = h / rho * (o + scale) + bias,    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant.

    Args:
        x: floating-point, any shape of at least one axis: f16, bf16, f32 or f64.
        scale: gain g, of the sizes of x along the feature axes; None multiplies by 1, without the offset.
        bias: b, of the same sizes; None adds nothing.
        variant: name of a preset or a Variant.
        eps: replaces the variant's eps.
        partial: fraction of the elements, counted from the first, that the statistic uses; replaces the variant's.
        axis: normalised axis or axes.
        feature_axis: axis or axes of the parameters; None for the normalised ones.
        mask: bool, broadcasts to x: True counts in the statistic. Elsewhere y is normalised, too, but every derivative
            takes it as a constant, so values under the mask reach no gradient. A row without counted elements gives 0.
        residual: added to x first, in promote(x, residual); the sum h is returned beside y. ``residual_rounding`` of
            the variant says whether y is that of h before or after it is rounded.
        gate: z, floating-point, shaped as x: y is multiplied by f(z), or h is before it is normalised, as
            ``gate_function`` and ``gate_position`` of the variant say.
        out_dtype: dtype of y; None for the variant's rule.
        return_inverse_rms: also return 1 / rho, 0 in rows without counted elements; derivatives take it as a constant.

    Returns:
        y, shaped as x; with ``residual`` (y, h). With ``return_inverse_rms`` 1 / rho follows: its normalised axes have
        size 1, its dtype is float32, or float64 for f64.

    Raises:
        TypeError: x, a parameter, the residual or the gate is not floating-point, the mask is not bool.
        ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import numpy as np
        >>> rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), variant="paper").round(4)
        array([[0.8485, 2.2627]])
    """
    if unknown:
        raise unknown_argument("rms_norm", rms_norm, unknown)
    x, scale, bias, mask, residual, gate = arrays(
        "rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate
    )
    call = resolved(
        "rms_norm", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm", variant, eps, partial), axis=axis, feature_axis=feature_axis,
    )  # fmt: skip
    rows = Rows(call)
    y = np.empty((rows.count, rows.n), call.result)
    inverse_rms = np.zeros((rows.count, 1), call.inverse_rms)
    with np.errstate(all="ignore"):
        h, after = _gated(call, _sum(call, x, residual), gate, rows)
        for block, data in blocks(rows, call, h, scale, bias, mask):
            y[block] = forward(call, data, None if after is None else part(after, block))
            inverse_rms[block] = data.inverse_rms(call.inverse_rms)
    outputs = [rows.back(y)]
    if residual is not None:
        outputs.append(add(x, residual, call.sum))
    if return_inverse_rms:
        outputs.append(rows.back(inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


@gradients_of(np.ndarray)
def rms_norm_vjp(
    dy: Any,
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Any:
    """Gradients of rms_norm: the product of dy with its Jacobian.

        dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

    A rounding counts as the identity, as in automatic differentiation.

    Args:
        dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, dh).
        x, scale, bias and options: as for rms_norm; ``out_dtype`` has no effect.

    Returns:
        (dx, dscale, dbias), each in the dtype of its argument, None where that is None. With ``residual`` dresidual
        follows, and with ``gate`` dgate.

    Raises:
        TypeError, ValueError: as rms_norm; also when dy has another shape than x.

    Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

    Example:
        >>> import numpy as np
        >>> dx, dscale, _ = rms_norm_vjp(np.ones(2), np.array([3.0, 4.0]), np.ones(2), variant="paper")
        >>> dx.round(4), dscale.round(4)
        (array([ 0.0453, -0.0339]), array([0.8485, 1.1314]))
    """
    if unknown:
        raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
    dy, dh = dy_and_dh(dy, residual)
    x, scale, bias, mask, residual, gate, dy, dh = arrays(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    call = resolved(
        "rms_norm_vjp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_vjp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dy=_spec(dy), dh=_spec(dh),
    )  # fmt: skip
    rows = Rows(call)
    with np.errstate(all="ignore"):
        ungated = _sum(call, x, residual)
        h, after = _gated(call, ungated, gate, rows)
        v = apply(rows.of, scaled(dy))
        v = v if after is None else product_of(v, after)
        gradient, along_scale, along_bias, factored = (_empty(rows) for _ in range(4))
        has_gradient = np.empty((rows.count, rows.n), bool)
        for block, data in blocks(rows, call, h, scale, bias, mask):
            has_gradient[block] = data.has_gradient
            along, exponent = part(v, block)
            upstream = along.where(data.has_gradient, 0.0), exponent
            assign(along_bias, block, upstream)
            along, exponent = product_of(data.quotient(), upstream)
            assign(along_scale, block, (along.where(data.has_gradient, 0.0), exponent))
            assign(gradient, block, backward(data, upstream))
            if after is not None:
                assign(factored, block, affine(call, data))  # y before the gate, as the variant rounds it
        results = [
            None if scale is None else rows.over_rows(along_scale).round(scale.dtype.name),
            None if bias is None else rows.over_rows(along_bias).round(bias.dtype.name),
        ]
        dx = apply(rows.back, gradient)
        dgate: tuple[Array, ...] = ()
        if gate is None:
            dx = dx[0].scaled(dx[1]), np.zeros((), int)
        else:
            dz = product_of(dx, ungated) if after is None else product_of(scaled(dy), apply(rows.back, factored))
            dz, is_live = product_of(dz, slope(call, gate)), rows.back(has_gradient)
            dgate = (_rounded(_zero_outside(is_live, dz), gate.dtype.name),)
            dx = _zero_outside(is_live, product_of(dx, factor(call, gate))) if after is None else dx
        dx = dx if dh is None else sum_of(dx, scaled(dh))
        dresidual = () if residual is None else (_rounded(dx, residual.dtype.name),)
        return _rounded(dx, x.dtype.name), *results, *dresidual, *dgate


def rms_norm_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    out_dtype: Any = None,
    **unknown: Never,
) -> Array:
    """Directional derivative of rms_norm: the product of its Jacobian with the tangents.

        dy = (R dx) * (o + scale) + h / rho * dscale + dbias

    A rounding counts as the identity, and dy is rounded once.

    Args:
        primals: (x, scale, bias); the last ones may be None or left out.
        tangents: (dx, dscale, dbias), each shaped as its primal; None is zero.
        options: as for rms_norm; the residual and the gate are constants.

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
    if unknown:
        raise unknown_argument("rms_norm_jvp", rms_norm_jvp, unknown)
    x, scale, bias = _three_of("primals", primals)
    dx, dscale, dbias = _three_of("tangents", tangents)
    x, scale, bias, mask, residual, gate, dx, dscale, dbias = arrays(
        "rms_norm_jvp",
        x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dx=dx, dscale=dscale, dbias=dbias,
    )  # fmt: skip
    call = resolved(
        "rms_norm_jvp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_jvp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dx=_spec(dx), dscale=_spec(dscale), dbias=_spec(dbias),
    )  # fmt: skip
    rows = Rows(call)
    zero = np.zeros(())
    with np.errstate(all="ignore"):
        h, after = _gated(call, _sum(call, x, residual), gate, rows)
        dh = scaled(zero if dx is None else dx)
        dh = apply(rows.of, product_of(dh, factor(call, gate)) if call.is_gated_before else dh)
    dg = rows.of(zero if dscale is None else dscale.reshape(call.feature_shape))
    db = rows.of(zero if dbias is None else dbias.reshape(call.feature_shape))
    dy = np.empty((rows.count, rows.n), call.result)
    with np.errstate(all="ignore"):
        for block, data in blocks(rows, call, h, scale, bias, mask):
            along = product_of(tangent(data, part(dh, block)), data.gain.fraction())
            along = sum_of(along, product_of(data.quotient(), scaled(dg[block])))
            along = sum_of(along, scaled(db[block]))
            along = along if after is None else product_of(along, part(after, block))
            dy[block] = _rounded((along[0].where(data.has_gradient, 0.0), along[1]), call.result)
    return rows.back(dy)


def _sum(call: Call, x: Array, residual: Array | None) -> Scaled:
    """x + residual, rounded as the variant says; x without one."""
    if residual is not None and call.exact_sum:
        return sum_of(scaled(x), scaled(residual))
    return scaled(add(x, residual, call.sum))


def _gated(call: Call, h: Scaled, gate: Array | None, rows: Rows) -> tuple[Scaled, Scaled | None]:
    """The array that is normalised; and, in rows, the factor of a gate after the norm."""
    if gate is None:
        return h, None
    f = factor(call, gate)
    return (product_of(h, f), None) if call.is_gated_before else (h, apply(rows.of, f))


def _zero_outside(is_live: Array, terms: Scaled) -> Scaled:
    """0 where nothing has a gradient, as gate and x may be NaN there."""
    return terms[0].where(is_live, 0.0), terms[1]


def _rounded(terms: Scaled, dtype: str) -> Array:
    return derivative(terms[0]).round(dtype, terms[1])


def _empty(rows: Rows) -> Scaled:
    hi, lo = np.empty((2, rows.count, rows.n))
    return DoubleDouble(hi, lo), np.zeros((rows.count, rows.n), np.int64)


def _three_of(name: str, values: Sequence[Any]) -> list[Any]:
    """The primals or tangents of rms_norm_jvp: x, scale and bias, or their tangents; None for what is left out."""
    if not isinstance(values, Sequence) or not 1 <= len(values) <= 3:
        raise errors.wrong_type("rms_norm_jvp", name, values, "(x, scale, bias)", "leave trailing ones out or None")
    return [*values, None, None][:3]


def arrays(op: str, **values: Any) -> list[Any]:
    """The arguments as arrays of NumPy, None where there is none."""
    for name, value in values.items():
        if value is None and name == "x":
            raise errors.wrong_type(op, name, value, "an array", "convert it with np.asarray")
        if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
            fix = "pass its data, and as mask what is not masked"
            raise errors.wrong_type(op, name, type(value), "an array without a mask of its own", fix)
    return [None if value is None else np.asarray(value) for value in values.values()]


def _spec(array: Array | None) -> Spec | None:
    return None if array is None else Spec(array.shape, array.dtype.name)


def resolved(
    op: str,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    residual: Array | None,
    gate: Array | None,
    out_dtype: Any,
    **options: Any,
) -> Call:
    """The checked call of these arrays."""
    return resolve(
        op,
        Spec(x.shape, x.dtype.name),
        _spec(scale),
        _spec(bias),
        mask=_spec(mask),
        residual=_spec(residual),
        gate=_spec(gate),
        out_dtype=out_dtype,
        **options,
    )
