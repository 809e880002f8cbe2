"""Checks every argument of a call, once for all frameworks, and decides every choice. No array library."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.variants import Variant


def resolve(
    op: str,
    x: Spec,
    scale: Spec | None = None,
    bias: Spec | None = None,
    *,
    variant: Variant,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Spec | None = None,
    residual: Spec | None = None,
    gate: Spec | None = None,
    out_dtype: Any = None,
    dscale: Spec | None = None,
    dbias: Spec | None = None,
    **like_x: Spec | None,
) -> Call:
    """Checks every argument of a call named ``op`` and decides every choice.

    Args:
        out_dtype: dtype of y, or its name; None for the variant's rule.
        dscale, dbias: tangents of the parameters.
        like_x: other arrays that must have the shape of x (dy, dh, tangents of x), by name.

    Raises:
        TypeError: a dtype is not a floating-point format (mask: not bool), or an option has the wrong type.
        ValueError: a shape or an axis is wrong.

    Example:
        >>> x, scale = Spec((4, 16), "bfloat16"), Spec((16,), "float32")
        >>> resolve("rms_norm", x, scale, variant=Variant.get("llama")).result_dtype
        'float32'
    """
    _check_float(op, "x", x)
    if not x.shape:
        raise errors.wrong_rank(op, "x")
    axes = _canonical(op, "axis", axis, x)
    feature_axes = axes if feature_axis is None else _canonical(op, "feature_axis", feature_axis, x)
    for name, tangent, primal in (("dscale", dscale, scale), ("dbias", dbias, bias)):
        if tangent is not None and primal is None:
            raise errors.missing_primal(op, name)
    for name, parameter in {"scale": scale, "bias": bias, "dscale": dscale, "dbias": dbias}.items():
        if parameter is not None:
            _check_float(op, name, parameter)
            _check_parameter(op, name, parameter, x, axis if feature_axis is None else feature_axis, feature_axes)
    if like_x.get("dy", x) is None:
        raise errors.wrong_type(op, "dy", None, "an array shaped as x", "pass the gradient with respect to y")
    for name, array in {"residual": residual, "gate": gate, **like_x}.items():
        if array is not None:
            _check_float(op, name, array)
            if not _agree(array.shape, x.shape):
                raise errors.wrong_shape(op, name, array.shape, x.shape, f"x {x}")
    if mask is not None:
        if mask.dtype != "bool":
            raise errors.wrong_dtype(op, "mask", mask.dtype, ["bool"])
        if not _broadcasts(mask.shape, x.shape):
            raise errors.wrong_mask_shape(op, mask.shape, str(x))
    if out_dtype is not None:
        out_dtype = errors.dtype_named(op, "out_dtype", out_dtype)

    t = dtypes.promote(x.dtype, residual.dtype if residual else None)
    exact_sum = residual is not None and variant.residual_rounding == "after"
    narrow_gain = None
    if scale is not None and variant.scale_dtype == "x" and dtypes.promote(t, scale.dtype) != t:
        narrow_gain, scale = t, Spec(scale.shape, t)
    parameters = [parameter.dtype for parameter in (scale, bias) if parameter is not None]
    g = dtypes.promote(*parameters) if parameters else None
    norm, product, result = _roundings(variant, t, g)
    widest = dtypes.promote(t, g, None if gate is None else gate.dtype, out_dtype or result)
    return Call(
        variant=variant,
        shape=tuple(x.shape),
        axes=axes,
        feature_axes=feature_axes,
        eps=variant.eps_for(t),
        x_dtype=dtypes.arithmetic(widest) if exact_sum else t,
        sum_dtype=t,
        norm_dtype=norm,
        product_dtype=product,
        result_dtype=out_dtype or result,
        inverse_rms_dtype=dtypes.arithmetic(t),
        gate_dtype=None if gate is None else dtypes.arithmetic(dtypes.promote(t, gate.dtype, product)),
        exact_sum=exact_sum,
        masked=mask is not None,
        gain_dtype=narrow_gain,
    )


def _roundings(variant: Variant, t: str, g: str | None) -> tuple[str | None, str, str]:
    """Dtypes of h / rho (None: not rounded), of the products with the parameters, and of y."""
    promoted = dtypes.promote(t, g)
    before = variant.rounding == "before_scale"
    if variant.result_dtype == "half_scale" and g is not None:
        result = g if g in dtypes.HALF else dtypes.promote(promoted, "float32")
        return result if before and g in dtypes.HALF else None, result, result
    norm = promoted if variant.result_dtype == "promote_first" else t
    result = {"x": t, "scale": g or t, "half_scale": t}.get(variant.result_dtype, promoted)
    return norm if before else None, promoted, result


def _check_float(op: str, name: str, array: Spec) -> None:
    if array.dtype not in dtypes.FLOATS:
        raise errors.wrong_dtype(op, name, array.dtype, dtypes.FLOATS)


def check_axis(op: str, name: str, axis: Axis) -> list[int]:
    """The axes of an argument, which may be one; refuses what is no integer."""
    entries = list(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else [axis]
    if not entries:
        raise errors.no_axis(op, name)
    for entry in entries:
        if not isinstance(entry, (int, Integral)) or isinstance(entry, bool):
            raise errors.wrong_type(op, name, axis, "an integer or a sequence of integers", "pass -1 for the last axis")
    return entries


def _canonical(op: str, name: str, axis: Axis, x: Spec) -> tuple[int, ...]:
    entries = check_axis(op, name, axis)
    rank = len(x.shape)
    for entry in entries:
        if not -rank <= entry < rank:
            raise errors.axis_out_of_range(op, name, entry, str(x), rank)
    wrapped = [index(entry) % rank for entry in entries]
    axes = tuple(axis for axis in range(rank) if axis in wrapped)
    if len(axes) < len(wrapped):
        raise errors.axis_repeated(op, name, entries, str(x))
    return axes


def _check_parameter(op: str, name: str, parameter: Spec, x: Spec, axis: Axis, feature_axes: tuple[int, ...]) -> None:
    want = tuple(x.shape[entry] for entry in feature_axes)
    if not _agree(parameter.shape, want):
        raise errors.wrong_shape(op, name, parameter.shape, want, f"axis {_show(axis)} of x {x}")


def _show(axis: Axis) -> str:
    return str(tuple(axis)) if isinstance(axis, Sequence) else str(axis)


def _agree(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(g is None or w is None or g == w for g, w in zip(got, want, strict=True))


def _broadcasts(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) <= len(want) and all(
        g is None or w is None or g == 1 or g == w for g, w in zip(reversed(got), reversed(want), strict=False)
    )
