"""RMSNorm on TensorFlow tensors: by the kernels of rmsnorm.cpu in eager calls, and by recipe.py everywhere else.

TensorFlow's own operations take subnormal numbers as 0, and so do these functions but where a kernel computes.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import tensorflow as tf

from rmsnorm import recipe
from rmsnorm.engines import Prepared, prepare
from rmsnorm.specification import errors
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.interface import Forward, Gradients, Options, declared
from rmsnorm.tf_impl import kernels
from rmsnorm.tf_impl.private import EAGER_TENSOR, has_tangents, is_recording, may_be_exported, record_gradient
from rmsnorm.tf_impl.space import DERIVED, FOR_INTEGERS, OPS, straight_through

Tensors = list[Any]  # each a tensor or None

# A row whose size is not known counts its elements in 64 bits: n times the numerator of partial is to fit in them.
_LARGEST_DENOMINATOR: Final = 2**31


def _forward(
    options: Options, return_inverse_rms: bool, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any,
    ops: Any = OPS,
) -> Any:  # fmt: skip
    tensors = _tensors("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate)
    prepared = _prepared("rms_norm", options, tensors)
    if kernels.why_not(prepared, tensors) is None and not has_tangents(without_none(tensors)):
        y, h, inverse_rms = _by_kernel(prepared, return_inverse_rms, *tensors)
    else:
        y, h, inverse_rms = _by_recipe(ops, prepared.call, tensors)
    outputs = [y] if residual is None else [y, h]
    if return_inverse_rms:
        outputs.append(tf.cast(tf.stop_gradient(inverse_rms), prepared.call.inverse_rms_dtype))
    return tuple(outputs) if len(outputs) > 1 else y


def _gradients(
    options: Options, dy: Any, dh: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> Any:
    op, optional = "rms_norm_vjp", {"scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate}
    tensors = _tensors(op, x=x, **optional, dy=dy, dh=dh)
    prepared = _prepared(op, options, tensors)
    x, scale, bias, mask, residual, gate, dy, dh = tensors
    terms = without_none([x, residual])  # of the sum, whose gradient is that of each
    is_plain = gate is None and prepared.call.feature_axes == prepared.kernel_call.feature_axes
    one_dtype = len({t.dtype for t in without_none([x, residual, dh])}) == 1
    if is_plain and one_dtype and not is_recording() and kernels.why_not(prepared, tensors) is None:
        h = x if residual is None else x + residual
        dx, dscale, dbias = kernels.backward(prepared, dy, dh, h, scale, bias, None)
        dgate = None
    else:
        arrays = x, residual, scale, bias, mask, gate
        dx, dscale, dbias, dgate = recipe.backward(OPS, prepared.call, dy, dh, *arrays)
    dx, *dresidual = (tf.cast(dx, t.dtype) for t in terms)
    return dx, dscale, dbias, *dresidual, *without_none([dgate])


def _by_kernel(
    prepared: Prepared, with_inverse_rms: bool, x: Any, scale: Any, bias: Any, _: Any, residual: Any, gate: Any
) -> tuple[Any, Any, Any]:
    """y, x + residual and 1 / rho. The last may be None if it is not asked for."""
    inverse_rms, rows = None, prepared.kernel_call

    def norm(x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
        nonlocal inverse_rms
        keeps = with_inverse_rms or is_recording()
        y, total, inverse_rms = kernels.forward(prepared, x, residual, scale, bias, keeps)
        h = x if total is None else total

        def gradient(dy: Any, dh: Any = None) -> Tensors:
            dy, dh = (None if t is None else tf.convert_to_tensor(t) for t in (dy, dh))
            if is_recording():
                dx, *others, _ = recipe.backward(OPS, rows, dy, dh, h, None, scale, bias, None, None)
                dx = tf.cast(dx, h.dtype)
            else:
                dx, *others = kernels.backward(prepared, dy, dh, h, scale, bias, inverse_rms)
            return without_none([dx, dx if residual is not None else None, *others])

        y, *sums = record_gradient(without_none([y, total]), without_none([x, residual, scale, bias]), gradient)
        return y, sums[0] if sums else None

    y, total = recipe.around(OPS, prepared.call, norm, x, residual, scale, bias, gate)
    return y, total, inverse_rms


def _by_recipe(ops: Any, call: Call, tensors: Tensors) -> tuple[Any, Any, Any]:
    """y, x + residual and 1 / rho, with the gradient of the recipe."""
    x, scale, bias, mask, residual, gate = tensors
    primals = [x, residual, scale, bias, gate]
    if has_tangents(without_none(primals)):
        return _differentiable(call, tensors)

    @tf.custom_gradient
    def function(*given: Any) -> Any:
        # eagerly constants, as a tape would keep what is computed inside
        inner = [tf.stop_gradient(t) for t in given] if tf.executing_eagerly() else given
        x, residual, scale, bias, gate = filled(inner, primals)
        y, total, row = recipe.forward(ops, call, x, residual, scale, bias, mask, gate)

        def gradient(dy: Any, *others: Any) -> Tensors:
            dy, dh = tf.convert_to_tensor(dy), None if total is None else tf.convert_to_tensor(others[0])
            x, residual, scale, bias, gate = filled(given, primals)
            known = None if is_recording() else row
            dx, *rest = recipe.backward(ops, call, dy, dh, x, residual, scale, bias, mask, gate, known)
            dresidual = None if residual is None else tf.cast(dx, residual.dtype)
            return without_none([tf.cast(dx, x.dtype), dresidual, *rest])

        return [*without_none([y, total]), recipe.inverse_rms(ops, call, row)], gradient

    y, *sums, inverse_rms = function(*without_none(primals))
    return y, sums[0] if sums else None, inverse_rms


def _differentiable(call: Call, tensors: Tensors) -> tuple[Any, Any, Any]:
    """The same in operations for TensorFlow to derive: the derivative of y is that of a y that is nowhere rounded."""
    x, scale, bias, mask, residual, gate = tensors
    smooth, total, row = recipe.forward(DERIVED, replace(call, norm_dtype=None), x, residual, scale, bias, mask, gate)
    inverse_rms = recipe.inverse_rms(OPS, call, row)
    if call.norm_dtype is None:
        return smooth, total, inverse_rms
    y, _, _ = recipe.forward(OPS, call, x, residual, scale, bias, mask, gate)
    return straight_through(y, smooth), total, inverse_rms


def _tensors(op: str, **values: Any) -> Tensors:
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


def _prepared(op: str, options: Options, tensors: Tensors) -> Prepared:
    """The prepared call of these tensors, whose sizes may be unknown in graphs."""
    if tf.executing_eagerly():
        return prepare(op, options, *tensors)
    specs = (None if t is None else Spec(tuple(t.shape.as_list()), t.dtype.name) for t in tensors)
    prepared = prepare(op, options, *specs)
    call = prepared.call
    if call.n is None and Fraction(call.variant.partial or 1).denominator >= _LARGEST_DENOMINATOR:
        raise errors.unknown_size(op, "x", next(axis for axis in call.axes if call.shape[axis] is None))
    return prepared


def in_layer(
    x: Any, scale: Any = None, bias: Any = None, *, variant: Any, axis: Any = -1, feature_axis: Any = None,
    gate: Any = None, out_dtype: Any = None,
) -> Any:  # fmt: skip
    """rms_norm with the arguments that the layer has, whose graphs LiteRT can compute in integers."""
    options = variant, None, None, axis, feature_axis, out_dtype
    return _forward(options, False, x, scale, bias, None, None, gate, FOR_INTEGERS if may_be_exported() else OPS)


rms_norm: Forward[tf.Tensor, tf.Tensor]
rms_norm_vjp: Gradients[tf.Tensor, tf.Tensor]
rms_norm, rms_norm_vjp = (
    tf.autograph.experimental.do_not_convert(function)
    for function in declared(__name__, "tensorflow.constant", _forward, _gradients)
)
