"""RMSNorm on TensorFlow tensors, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in operations.py.
TensorFlow's own kernels take subnormal numbers as 0, and so do these functions but where rmsnorm.cpu computes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Never

import tensorflow as tf

from rmsnorm.cpu.prepared import Options, Prepared, prepare
from rmsnorm.specification import errors
from rmsnorm.specification.absent import without_none
from rmsnorm.specification.call import Axis, Spec
from rmsnorm.specification.interface import dy_and_dh, forward_of, gradients_of, unknown_argument
from rmsnorm.specification.variants import Preset, Variant
from rmsnorm.tf_impl import engines
from rmsnorm.tf_impl.private import EAGER_TENSOR
from rmsnorm.tf_impl.rounding import add, cast


@forward_of(tf.Tensor)
@tf.autograph.experimental.do_not_convert
def rms_norm(
    x: tf.Tensor,
    scale: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: tf.Tensor | None = None,
    residual: tf.Tensor | None = None,
    gate: tf.Tensor | None = None,
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
        >>> import tensorflow as tf
        >>> rms_norm(tf.constant([[3.0, 4.0]]), tf.constant([1.0, 2.0]), variant="paper").numpy().round(4)
        array([[0.8485, 2.2627]], dtype=float32)
    """
    if unknown:
        raise unknown_argument("rms_norm", rms_norm, unknown)
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    tensors = _tensors("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate)
    prepared = _prepared("rms_norm", options, tensors)
    call, (x, scale, bias, mask, residual, gate) = prepared.call, tensors
    h = add(x, residual, call.x)
    y, inverse_rms = engines.forward(prepared, h, scale, bias, mask, gate, return_inverse_rms)
    outputs = [y]
    if residual is not None:
        outputs.append(cast(h, call.sum))
    if return_inverse_rms:
        outputs.append(cast(tf.stop_gradient(inverse_rms), call.inverse_rms))
    return tuple(outputs) if len(outputs) > 1 else y


@gradients_of(tf.Tensor)
@tf.autograph.experimental.do_not_convert
def rms_norm_vjp(
    dy: Any,
    x: tf.Tensor,
    scale: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
    *,
    variant: Preset | Variant = "standard",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: tf.Tensor | None = None,
    residual: tf.Tensor | None = None,
    gate: tf.Tensor | None = None,
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
        >>> import tensorflow as tf
        >>> dx, dscale, _ = rms_norm_vjp(tf.ones(2), tf.constant([3.0, 4.0]), tf.ones(2), variant="paper")
        >>> dx.numpy().round(4), dscale.numpy().round(4)
        (array([ 0.0453, -0.0339], dtype=float32), array([0.8485, 1.1314], dtype=float32))
    """
    if unknown:
        raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
    dy, dh = dy_and_dh(dy, residual)
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    tensors = _tensors(
        "rms_norm_vjp", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, dy=dy, dh=dh
    )
    prepared = _prepared("rms_norm_vjp", options, tensors)
    call, (x, scale, bias, mask, residual, gate, dy, dh) = prepared.call, tensors
    h, terms = add(x, residual, call.x), without_none([x, residual])  # of the sum: its gradient is that of each
    is_mixed = len({call.x, call.sum, *(t.dtype.name for t in without_none([*terms, dh]))}) > 1
    dx, dscale, dbias, dgate = engines.gradients(prepared, dy, h, scale, bias, mask, gate, None, dh, is_mixed)
    dx, *dresidual = (cast(dx, t.dtype.name) for t in terms)
    return dx, dscale, dbias, *dresidual, *without_none([dgate])


def _tensors(op: str, **values: Any) -> list[Any]:
    """The arguments as tensors, None where there is none."""
    return [value if type(value) is EAGER_TENSOR else _tensor(op, name, value) for name, value in values.items()]


def _tensor(op: str, name: str, value: Any) -> tf.Tensor | None:
    if value is None and name not in ("x", "dy"):
        return None
    # a sparse or ragged tensor passes only the first of the last two tests, a KerasTensor only the second
    is_tensor = tf.is_tensor(value) and hasattr(value, "__tf_tensor__")
    if not (isinstance(value, (tf.Tensor, tf.Variable)) or is_tensor):
        raise errors.wrong_type(op, name, value, "a tf.Tensor", "convert it with tf.convert_to_tensor")
    if value.shape.rank is None:
        raise errors.unknown_rank(op, name)
    return tf.convert_to_tensor(value)


def _prepared(op: str, options: Options, tensors: list[Any]) -> Prepared:
    """The prepared call of these tensors, whose sizes may be unknown in graphs."""
    if tf.executing_eagerly():
        return prepare(op, options, *tensors)
    specs = (None if t is None else Spec(tuple(t.shape.as_list()), t.dtype.name) for t in tensors)
    prepared = prepare(op, options, *specs)
    call = prepared.call
    if call.n is None and Fraction(call.variant.partial or 1).denominator >= 2**31:  # k = n p is to fit in 64 bits
        raise errors.unknown_size(op, "x", next(axis for axis in call.axes if call.shape[axis] is None))
    return prepared
