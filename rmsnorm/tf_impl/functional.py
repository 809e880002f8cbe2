"""RMSNorm on TensorFlow tensors, with an analytic backward that keeps x and 1 / rho.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467). The arithmetic is in arithmetic.py.
TensorFlow's own kernels take subnormal numbers as 0, and so do these functions but where rmsnorm.cpu computes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final, Never

import tensorflow as tf

from rmsnorm import errors
from rmsnorm.call import Axis, Call, Spec, filled, given, resolve
from rmsnorm.cpu.prepared import Options, Prepared, prepare
from rmsnorm.interface import forward_of, gradients_of, unknown_argument
from rmsnorm.tf_impl import eager, graph, kernels
from rmsnorm.tf_impl.arithmetic import backward, forward, statistic, wide
from rmsnorm.tf_impl.gate import factor, slope
from rmsnorm.tf_impl.private import EAGER, is_recording, record_gradient
from rmsnorm.tf_impl.rounding import add, cast
from rmsnorm.variants import Preset, Variant, derive

_IN_MEMORY: Final = set(EAGER)  # what has numbers in eager calls


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
    prepared = _prepared("rms_norm", options, x, scale, bias, mask, residual, gate)
    call = prepared.call
    x, scale, bias, mask, residual, gate = _tensors(x, scale, bias, mask, residual, gate)
    h = add(x, residual, call.x)
    if prepared.plan is not None and kernels.can_compute(prepared, h, scale, bias, mask, gate):
        y, inverse_rms = _by_kernels(prepared, h, scale, bias, mask, gate)
    elif gate is None:
        y, inverse_rms = _rms_norm(call, h, scale, bias, mask)
    else:
        y, inverse_rms = _gated(call, h, scale, bias, mask, gate)
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
    dy, dh = dy if isinstance(dy, tuple) and residual is not None else (dy, None)
    options = (variant, eps, partial, axis, feature_axis, out_dtype)
    prepared = _prepared("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy, dh)
    call = prepared.call
    x, scale, bias, mask, residual, gate, dy, dh = _tensors(x, scale, bias, mask, residual, gate, dy, dh)
    one_dtype = call.x == call.sum and all(t is None or t.dtype == x.dtype for t in (residual, dh))
    if prepared.plan is not None and one_dtype and not is_recording():
        h = add(x, residual, call.x)
        if kernels.can_compute(prepared, dy, h, scale, bias, mask, dh, gate):
            dx, dscale, dbias, dgate = kernels.backward(prepared, dy, h, scale, bias, mask, None, dh, gate)
            return dx, dscale, dbias, *(() if residual is None else (dx,)), *(() if gate is None else (dgate,))
    if gate is not None:
        return _gated_vjp(call, dy, x, scale, bias, mask, residual, gate, dh)
    return _vjp(call, dy, x, scale, bias, mask, residual, dh)


def _vjp(
    call: Call, dy: tf.Tensor, x: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None,
    mask: tf.Tensor | None = None, residual: tf.Tensor | None = None, dh: tf.Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of a checked call without a gate."""
    h = add(x, residual, call.x)
    one_dtype = call.x == call.sum and all(t is None or t.dtype == x.dtype for t in (residual, dh))
    if one_dtype and tf.executing_eagerly() and not is_recording() and dy.dtype.name == call.result:
        _, inverse_rms = eager.forward(call, h, scale, bias, mask)
        gradients = eager.backward(call, dy, h, scale, bias, mask, inverse_rms, dh)
        return tuple(gradients) if residual is None else (*gradients, gradients[0])
    h = wide(call, h)
    inverse_rms = statistic(call, h, mask).inverse_rms
    dx, dscale, dbias = backward(call, dy, h, scale, mask, inverse_rms)
    if dh is not None:
        dx = tf.cast(dx, tf.float64) + tf.cast(dh, tf.float64)
    dscale = None if scale is None else cast(dscale, _name(scale))
    dbias = None if bias is None else cast(dbias, _name(bias))
    if residual is not None:
        return cast(dx, _name(x)), dscale, dbias, cast(dx, _name(residual))
    return cast(dx, _name(x)), dscale, dbias


def _by_kernels(
    prepared: Prepared, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    """y, with its gradients, and 1 / rho. The derivatives of gradients are those of operations."""
    call = prepared.call

    def gradients(dy: tf.Tensor) -> list[tf.Tensor]:
        dy = tf.convert_to_tensor(dy)
        if not tf.executing_eagerly() or is_recording() or not kernels.can_compute(prepared, dy):
            if gate is not None:
                return given(_gated_vjp(call, dy, h, scale, bias, mask, None, gate, None))
            backward = eager.backward if tf.executing_eagerly() else graph.backward
            return given(backward(call, dy, h, scale, bias, mask, inverse_rms))
        return given(kernels.backward(prepared, dy, h, scale, bias, mask, inverse_rms, None, gate))

    y, inverse_rms = kernels.forward(prepared, h, scale, bias, mask, gate)
    return record_gradient(y, given([h, scale, bias, gate]), gradients), inverse_rms


def _gated(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None, gate: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    f = factor(call, _held(gate, mask))
    h = tf.cast(_held(h, mask), f.dtype) * f if call.is_gated_before else h
    y, inverse_rms = _rms_norm(call.without_gate, h, scale, bias, mask)
    return y if call.is_gated_before else _held(cast(y * f, call.result), mask), inverse_rms


def _gated_vjp(
    call: Call, dy: tf.Tensor, x: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    residual: tf.Tensor | None, gate: tf.Tensor, dh: tf.Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    gate = _unmasked(gate, mask)
    x, residual = _unmasked(x, mask), None if residual is None else _unmasked(residual, mask)
    f, inner, h = factor(call, gate), call.without_gate, add(x, residual, call.x)
    results: tuple[Any, ...]
    if call.is_gated_before:
        h = tf.cast(h, f.dtype)
        gradient, dscale, dbias = _vjp(inner, dy, h * f, scale, bias, mask)
        dgate, dx = gradient * h, _unmasked(gradient * f, mask)
        dx = dx if dh is None else tf.cast(dx, tf.float64) + tf.cast(dh, tf.float64)
        dresidual = () if residual is None else (cast(dx, _name(residual)),)
        results = cast(dx, _name(x)), dscale, dbias, *dresidual
    else:
        dy = tf.cast(dy, f.dtype)
        results = _vjp(inner, dy * f, x, scale, bias, mask, residual, dh)
        dgate = dy * _rms_norm(inner, h, scale, bias, mask)[0]
    return *results, cast(_unmasked(dgate * slope(call, gate), mask), _name(gate))


def _held(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """The values, of which derivatives take those under the mask as constants."""
    return values if mask is None else tf.where(mask, values, tf.stop_gradient(values))


def _unmasked(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """0 under the mask, where gate and x may be NaN."""
    return values if mask is None else tf.where(mask, values, tf.zeros_like(values))


def _rms_norm(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    variables = given([h, scale, bias])

    def gradients(backward: Any, dy: tf.Tensor, inverse_rms: tf.Tensor) -> list[tf.Tensor]:
        backward = eager.backward if tf.executing_eagerly() else backward
        return given(backward(call, tf.convert_to_tensor(dy), h, scale, bias, mask, inverse_rms))

    if tf.executing_eagerly():
        y, inverse_rms = eager.forward(call, h, scale, bias, mask)
        return record_gradient(y, variables, lambda dy: gradients(graph.backward, dy, inverse_rms)), inverse_rms
    if graph.supports(*variables):
        return graph.forward(call, h, scale, bias, mask)

    @tf.custom_gradient
    def function(*tensors: tf.Tensor) -> Any:
        y, inverse_rms = forward(call, *[*filled(tensors, [h, scale, bias]), mask])
        return (y, inverse_rms), lambda dy, _: gradients(eager.rounded_backward, dy, inverse_rms)

    y, inverse_rms = function(*variables)
    return y, inverse_rms


def _prepared(op: str, options: Options, *tensors: Any) -> Prepared:
    """The prepared call. In graphs, whose sizes may be unknown, and of other tensors it has no plan."""
    if tf.executing_eagerly() and all(t is None or type(t) in _IN_MEMORY for t in tensors):
        x, scale, bias, mask, residual, gate, *gradients = tensors
        if x is not None:
            return prepare(op, options, x, scale, bias, mask, residual, gate, *gradients)
    variant, eps, partial, axis, feature_axis, out_dtype = options
    x, scale, bias, mask, residual, gate, *gradients = tensors
    call = _resolve(
        op, x, scale, bias, mask, residual, gate, out_dtype,
        variant=derive(op, variant, eps, partial), axis=axis, feature_axis=feature_axis,
        **{name: _spec(op, name, t) for name, t in zip(("dy", "dh"), gradients, strict=False)},
    )  # fmt: skip
    return Prepared(call, None, call, None, "the tensors are not in memory as they are")


def _tensors(*values: Any) -> list[Any]:
    return [None if value is None else tf.convert_to_tensor(value) for value in values]


def _name(x: tf.Tensor) -> str:
    return str(tf.as_dtype(x.dtype).name)


def _spec(op: str, name: str, x: Any) -> Spec | None:
    if x is None:
        return None
    if not isinstance(x, (tf.Tensor, tf.Variable)) and not (tf.is_tensor(x) and hasattr(x, "__tf_tensor__")):
        # nor a keras.Variable; of what is not dense the second holds, of a KerasTensor the third
        raise errors.wrong_type(op, name, x, "a tf.Tensor", "convert it with tf.convert_to_tensor")
    if x.shape.rank is None:
        raise errors.unknown_rank(op, name)
    return Spec(tuple(x.shape.as_list()), _name(x))


def _resolve(
    op: str, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, out_dtype: Any, **options: Any
) -> Call:
    arrays = {"scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate}
    specs: dict[str, Any] = {name: _spec(op, name, value) for name, value in arrays.items()}
    x_spec = _spec(op, "x", x)
    if x_spec is None:
        raise errors.wrong_type(op, "x", x, "a tf.Tensor", "convert it with tf.convert_to_tensor")
    call = resolve(op, x_spec, out_dtype=out_dtype, **specs, **options)
    if call.n is None and Fraction(call.variant.partial or 1).denominator >= 2**31:  # k = n p is to fit in 64 bits
        raise errors.unknown_size(op, "x", next(axis for axis in call.axes if call.shape[axis] is None))
    return call
