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
from rmsnorm.specification.interface import Forward, Gradients, Options, declared, unknown_argument
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Preset, Variant, derive

ArrayLike: TypeAlias = Any  # what np.asarray takes


def compute(
    options: Options, return_inverse_rms: bool, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> Any:
    variant, eps, partial, axis, feature_axis, out_dtype = options
    x, scale, bias, mask, residual, gate = arrays(
        "rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate
    )
    call = resolved(
        "rms_norm", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm", variant, eps, partial), axis=axis, feature_axis=feature_axis,
    )  # fmt: skip
    rows, scale = Rows(call), narrowed(call, scale)
    y = np.empty((rows.count, rows.n), call.result_dtype)
    inverse_rms = np.zeros((rows.count, 1), call.inverse_rms_dtype)
    with np.errstate(all="ignore"):
        h, after = _gated(call, _sum(call, x, residual), gate, rows)
        for block, data in blocks(rows, call, h, scale, bias, mask):
            y[block] = forward(call, data, None if after is None else part(after, block))
            inverse_rms[block] = data.inverse_rms(call.inverse_rms_dtype)
    outputs = [rows.back(y)]
    if residual is not None:
        outputs.append(add(x, residual, call.sum_dtype))
    if return_inverse_rms:
        outputs.append(rows.back(inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def differentiate(
    options: Options, dy: Any, dh: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> tuple[Any, ...]:
    variant, eps, partial, axis, feature_axis, out_dtype = options
    x, scale, bias, mask, residual, gate, dy, dh = arrays(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    call = resolved(
        "rms_norm_vjp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_vjp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        dy=_spec(dy), dh=_spec(dh),
    )  # fmt: skip
    rows, scale = Rows(call), narrowed(call, scale)
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


rms_norm: Forward[ArrayLike, Array]
rms_norm_vjp: Gradients[ArrayLike, Array]
rms_norm, rms_norm_vjp = declared(__name__, "numpy.array", compute, differentiate)


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
        tangents: (dx, dscale, dbias, dresidual, dgate), each shaped as its array; None or left out is zero.
        options: as for rms_norm.

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
    x, scale, bias = _filled("primals", primals, ("x", "scale", "bias"))
    names = ("dx", "dscale", "dbias", "dresidual", "dgate")
    along = dict(zip(names, _filled("tangents", tangents, names), strict=True))
    x, scale, bias, mask, residual, gate, *values = arrays(
        "rms_norm_jvp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, **along
    )
    dx, dscale, dbias, dresidual, dgate = values
    for name, tangent_of_it, primal in (("dresidual", dresidual, residual), ("dgate", dgate, gate)):
        if tangent_of_it is not None and primal is None:
            raise errors.missing_primal("rms_norm_jvp", name)
    call = resolved(
        "rms_norm_jvp", x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive("rms_norm_jvp", variant, eps, partial), axis=axis, feature_axis=feature_axis,
        **{name: _spec(value) for name, value in zip(names, values, strict=True)},
    )  # fmt: skip
    rows, scale = Rows(call), narrowed(call, scale)
    zero = np.zeros(())
    with np.errstate(all="ignore"):
        total = _sum(call, x, residual)
        h, after = _gated(call, total, gate, rows)
        dh = sum_of(*(scaled(zero if d is None else d) for d in (dx, dresidual)))
        df = None if dgate is None else product_of(scaled(dgate), slope(call, gate))
        if call.is_gated_before:
            dh = product_of(dh, factor(call, gate))
            dh = dh if df is None else sum_of(dh, product_of(total, df))
        dh = apply(rows.of, dh)
        df = None if df is None or call.is_gated_before else apply(rows.of, df)
    dg = rows.of(zero if dscale is None else dscale.reshape(call.feature_shape))
    db = rows.of(zero if dbias is None else dbias.reshape(call.feature_shape))
    dy = np.empty((rows.count, rows.n), call.result_dtype)
    with np.errstate(all="ignore"):
        for block, data in blocks(rows, call, h, scale, bias, mask):
            moved = product_of(tangent(data, part(dh, block)), data.gain.fraction())
            moved = sum_of(moved, product_of(data.quotient(), scaled(dg[block])))
            moved = sum_of(moved, scaled(db[block]))
            moved = moved if after is None else product_of(moved, part(after, block))
            moved = moved if df is None else sum_of(moved, product_of(affine(call, data), part(df, block)))
            dy[block] = _rounded((moved[0].where(data.has_gradient, 0.0), moved[1]), call.result_dtype)
    return rows.back(dy)


def _sum(call: Call, x: Array, residual: Array | None) -> Scaled:
    """x + residual, rounded as the variant says; x without one."""
    if residual is not None and call.exact_sum:
        return sum_of(scaled(x), scaled(residual))
    return scaled(add(x, residual, call.sum_dtype))


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


def _filled(name: str, values: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
    """The primals or tangents of rms_norm_jvp, None for what is left out at the end."""
    if not isinstance(values, Sequence) or not 1 <= len(values) <= len(names):
        want, fix = f"({', '.join(names)})", "leave trailing ones out or None"
        raise errors.wrong_type("rms_norm_jvp", name, values, want, fix)
    return [*values, *[None] * (len(names) - len(values))]


def arrays(op: str, **values: Any) -> list[Any]:
    """The arguments as arrays of NumPy, None where there is none."""
    for name, value in values.items():
        if value is None and name == "x":
            raise errors.wrong_type(op, name, value, "an array", "convert it with np.asarray")
        if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
            fix = "pass its data, and as mask what is not masked"
            raise errors.wrong_type(op, name, type(value), "an array without a mask of its own", fix)
    return [None if value is None else np.asarray(value) for value in values.values()]


def narrowed(call: Call, scale: Array | None) -> Array | None:
    """The gain, in its dtype, rounded to that of x where the variant says so."""
    if scale is None or call.gain_dtype is None:
        return scale
    return DoubleDouble(scale).round(call.gain_dtype).astype(scale.dtype)


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
