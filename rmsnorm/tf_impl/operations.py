"""The arithmetic of RMSNorm in TensorFlow's own operations.

The statistic is float64, so that no square of a number in 16 or 32 bits leaves the range. Everything else is float64,
too, so that results in 32 bits are correctly rounded; but if x and y both have 16 bits it is float32, which XLA makes
twice as fast. Where x or y is float64 itself, a row is multiplied by a power of two first, as its squares might leave
the range of float64. Sizes may be unknown while a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import tensorflow as tf

from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import CLAMPED
from rmsnorm.tf_impl.gate import factor, slope
from rmsnorm.tf_impl.rounding import (
    cast,
    excess,
    exponent_of,
    power_of_two,
    straight_through,
    two_to,
    uncontracted,
    zero_outside,
)

# Before two tensors are compared, they go through tf.stop_gradient, so that they have no tangents. In a graph, a
# ForwardAccumulator inside another one fails on a comparison of tensors that have some.

# On a CPU XLA stores all terms of a sum in memory before it adds them, if there are more than this number.
_FUSED_SUM = 32
# So the terms of a longer sum are divided into this number of slabs, which are added element by element first.
_SLABS = 8


class Statistic(NamedTuple):
    """What is computed of every row; the normalised axes have size 1.

    ``rho`` is that of h * inverse_power, a power of two that is 1 unless x or y is float64: 1 / rho of h is
    ``inverse_rms`` = inverse_power / rho.
    """

    empty: tf.Tensor | None
    inverse_power: tf.Tensor | float
    rho: tf.Tensor
    inverse_rms: tf.Tensor


def statistic(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> Statistic:
    call, h = leading_part(call, h, mask)
    h = _double(h)
    counted, k, empty = count(call, h, mask)
    c = zero_outside(counted, h)
    inverse_power: Any = 1.0
    if _may_leave_range(call):
        inverse_power = _inverse_power(call, c, k)
        c = c * inverse_power
    q = _sum(tf.square(c), call.axes, keepdims=True) / k
    inside, outside, floor = _eps(call, k, inverse_power)
    radicand = q + inside
    # not the operator, which in graphs of TensorFlow 1 compares identities
    positive = tf.not_equal(tf.stop_gradient(radicand), 0)
    root = tf.where(positive, tf.sqrt(tf.where(positive, radicand, 1.0)), 0.0)  # a finite slope at 0
    rho = root + outside
    if call.variant.eps_position == "clamp":  # at the floor, up to rounding, it has the derivative of the root
        floor = tf.convert_to_tensor(floor, tf.float64)
        still = tf.stop_gradient(root)
        rise = tf.where(still < floor, floor - still, 0.0)
        rho = tf.where(still < floor * CLAMPED, floor, root + rise)
    if empty is not None:
        rho = tf.where(~empty, rho, 1.0)  # for eps = 0: no 0 / 0 for a derivative to meet
    inverse_rms = inverse_power / rho
    return Statistic(empty, inverse_power, rho, inverse_rms if empty is None else zero_outside(~empty, inverse_rms))


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    """y, and 1 / rho in float64."""
    return _norm(call, h, scale, bias, mask) if gate is None else gated(call, _norm, h, scale, bias, mask, gate)


def gated(
    call: Call, norm: Callable[..., tuple[tf.Tensor, tf.Tensor]], h: tf.Tensor, scale: tf.Tensor | None,
    bias: tf.Tensor | None, mask: tf.Tensor | None, gate: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    """y and 1 / rho of a call with a gate, if ``norm`` computes those of the call without it."""
    shown = None if mask is None else ~count(call, h, mask)[2]
    h, gate = zero_outside(shown, h), zero_outside(shown, gate)  # which may be NaN in a row without counted elements
    f = factor(call, _constant_under(mask, gate))
    if call.is_gated_before:
        return norm(call.without_gate, tf.cast(_constant_under(mask, h), f.dtype) * f, scale, bias, mask)
    y, inverse_rms = norm(call.without_gate, h, scale, bias, mask)
    return _constant_under(mask, cast(y * f, call.result)), inverse_rms


def _constant_under(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    """The values, of which derivatives take those under the mask as constants."""
    return values if mask is None else tf.where(mask, values, tf.stop_gradient(values))


def _norm(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    h = wide(call, h)  # once: the gradients of its uses then add up there
    row = statistic(call, h, mask)
    y = _scaled(call, h, row, scale, bias)
    if mask is not None and not tf.executing_eagerly():  # in graphs, forward mode derives what is inside the function
        smooth = _scaled(call, zero_outside(mask, h), row, scale, bias)
        y = tf.where(mask, smooth, tf.stop_gradient(y))
    return y if row.empty is None else zero_outside(~row.empty, y), row.inverse_rms


def _scaled(call: Call, h: tf.Tensor, row: Statistic, scale: tf.Tensor | None, bias: tf.Tensor | None) -> tf.Tensor:
    """h / rho, the gain and the bias, rounded as the variant says."""
    y = h * row.inverse_power / row.rho if _may_leave_range(call) else _over_rho(h, row.inverse_rms)
    rounded = None if call.norm is None else _before_scale(call, y, scale, bias)
    if scale is not None:
        y = y * _gain(call, scale, y)
    if bias is not None:
        y = y + features(call, bias, y)
    return cast(y if rounded is None else straight_through(rounded, y), call.result)


def _before_scale(call: Call, y: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None) -> tf.Tensor:
    y = wide(call, cast(y, call.norm or call.x))
    if scale is not None:
        gain = wide(call, cast(_gain(call, scale, y), call.product))
        y = uncontracted(wide(call, cast(y * gain, call.product)))
    if bias is not None:
        y = wide(call, cast(y + features(call, bias, y), call.product))
    return y


def _over_rho(x: tf.Tensor, inverse_rms: tf.Tensor) -> tf.Tensor:
    """x / rho; in float32 by two factors, as 1 / rho alone may leave its range."""
    if x.dtype == tf.float64:
        return x * inverse_rms
    power = tf.where(tf.stop_gradient(inverse_rms) < 2.0**-100, 2.0**-32 * tf.ones_like(inverse_rms), 1.0)
    return (x * tf.cast(power, x.dtype)) * tf.cast(inverse_rms / power, x.dtype)


def gradients(
    call: Call, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None, inverse_rms: tf.Tensor | None, dh: tf.Tensor | None = None, is_mixed: bool = False,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, each in the dtype of its tensor; the first is not rounded if it ``is_mixed``.

    Derivatives of these gradients go through 1 / rho, too: ``inverse_rms`` has its derivative then (see ``recalled``).
    If it is None, 1 / rho is computed here, and has one.
    """

    def without_gate(norm: Call, dy: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        h = wide(norm, h)
        kept = statistic(norm, h, mask).inverse_rms if inverse_rms is None else inverse_rms
        return backward(norm, dy, h, scale, mask, kept)

    dgate, primals = None, (h, scale, bias, gate)
    if gate is None:
        dx, dscale, dbias = without_gate(call, dy, h)
    else:
        live = None if mask is None else mask & ~count(call, h, mask)[2]  # y has no derivatives elsewhere
        dy, h, gate = (zero_outside(live, t) for t in (dy, h, gate))  # NaN there would be NaN in products with 0, too
        f, norm = factor(call, gate), call.without_gate
        if call.is_gated_before:
            h = tf.cast(h, f.dtype)
            dx, dscale, dbias = without_gate(norm, dy, h * f)
            dx = tf.cast(dx, f.dtype)
            dgate, dx = dx * h, zero_outside(live, dx * f)
        else:
            dy = tf.cast(dy, f.dtype)
            dx, dscale, dbias = without_gate(norm, dy * f, h)
            dgate = dy * _norm(norm, h, scale, bias, mask)[0]
        dgate = zero_outside(live, dgate * slope(call, gate))
    if dh is not None:
        dx = tf.cast(dx, tf.float64) + tf.cast(dh, tf.float64)
    pairs = zip((dx, dscale, dbias, dgate), primals, strict=True)
    results = [None if primal is None else cast(result, primal.dtype.name) for result, primal in pairs]
    return [dx, *results[1:]] if is_mixed else results


def backward(
    call: Call, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, mask: tf.Tensor | None, inverse_rms: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """dx, dscale and dbias, not yet rounded, from x and 1 / rho alone."""
    counted, k, empty = count(call, h, mask)
    live = None if mask is None else mask & ~empty  # y has no derivatives elsewhere
    v, h = zero_outside(live, tf.cast(dy, h.dtype)), zero_outside(live, h)
    normalised = _over_rho(h, inverse_rms)
    gain, exponents = None if scale is None else _gain(call, scale, v), []
    u = v
    if _may_leave_range(call):  # within it while they are multiplied
        exponents = [
            exponent_of(inverse_rms),
            excess(exponent_of(tf.reduce_max(tf.abs(v), call.axes, keepdims=True)), 850),
        ]
        u = v * two_to(-exponents[-1])
        if gain is not None:
            exponents.append(excess(exponent_of(tf.reduce_max(tf.abs(gain))), 100))
            gain = gain * two_to(-exponents[-1])
    u = u if gain is None else u * gain
    projection = _slope(call, h, counted, k, inverse_rms) * _sum(u * normalised, call.axes, keepdims=True) / k
    along = zero_outside(counted, normalised) * tf.cast(projection, h.dtype)
    along = zero_outside(counted, along)  # not 0 times infinity
    if not exponents:
        dx = _over_rho(u - along, inverse_rms)
    else:
        power: Any = sum(exponents)
        half = power // 2
        dx = (u - along) * (inverse_rms * two_to(-exponents[0])) * two_to(half) * two_to(power - half)
    dx, along_scale = (
        zero_outside(live, dx),
        zero_outside(live, v * normalised),
    )  # once more, as 1 / rho may be infinite
    return dx, _over_rows(call, along_scale), _over_rows(call, v)


def recalled(call: Call, h: tf.Tensor, mask: tf.Tensor | None, inverse_rms: tf.Tensor) -> tf.Tensor:
    """1 / rho as the forward pass left it, with the derivative that it has: faster than to compute it again."""
    counted, k, _ = count(call, h, mask)
    h = zero_outside(counted, _double(h))

    @tf.custom_gradient
    def function(h: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            saved = function(h)
            along = zero_outside(counted, h * saved) * _slope(call, h, counted, k, saved)
            return -upstream * saved * (saved * along / k)

        return tf.identity(inverse_rms), gradient

    return function(h)


def count(
    call: Call, h: tf.Tensor, mask: tf.Tensor | None, dtype: tf.DType = tf.float64
) -> tuple[tf.Tensor | None, Any, Any]:
    """Elements that enter the statistic (None for all), how many, and rows without any (None where there are none)."""
    if mask is None and call.k == call.n and call.n:
        return None, call.k, None
    shape = tf.shape(h, tf.int64)
    sizes = [shape[axis] if size is None else size for axis, size in enumerate(call.shape)]
    n = tf.reduce_prod([sizes[axis] for axis in call.axes]) if call.n is None else call.n
    if mask is None and call.n is None and call.variant.partial is None:
        return None, tf.cast(tf.maximum(n, 1), dtype), tf.equal(n, 0)
    first = tf.range(n, dtype=tf.int64) < (_first(call, n) if call.k is None else call.k)
    counted = tf.reshape(first, [size if axis in call.axes else 1 for axis, size in enumerate(sizes)])
    if mask is None and call.n:
        return counted, call.k, None
    counted = tf.broadcast_to(counted if mask is None else counted & mask, shape)
    k = tf.reduce_sum(tf.cast(counted, dtype), call.axes, keepdims=True)
    return counted, tf.maximum(k, 1.0), tf.equal(k, 0)


def _first(call: Call, n: tf.Tensor) -> tf.Tensor:
    """Variant.counted, for a size that is known only when the graph runs."""
    if call.variant.partial is None:
        return n
    p = Fraction(call.variant.partial)
    up = p.denominator - 1 if call.variant.partial_rounding == "ceil" else 0
    return tf.minimum(n, tf.maximum((n * p.numerator + up) // p.denominator, 1))


def leading_part(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> tuple[Call, tf.Tensor]:
    """What the statistic is computed of, and the call on that. If there is no mask, ``partial`` counts the first
    elements: for partial=0.25 and 16 elements it is x[..., :4]."""
    if mask is not None or (leading := call.leading) is None:
        return call, h
    (axis,) = call.axes
    return leading, h[(slice(None),) * axis + (slice(leading.n),)]


def _eps(call: Call, k: Any, inverse_power: Any = 1.0) -> tuple[Any, Any, Any]:
    """Eps under the root, eps beside it, and the floor under rho, in units of the scaled statistic."""
    position, eps = call.variant.eps_position, call.eps
    return (
        eps * inverse_power * inverse_power if position == "inside" else 0.0,
        eps * inverse_power if position == "outside" else 0.0,
        eps * inverse_power / tf.sqrt(tf.convert_to_tensor(k, tf.float64)) if position == "clamp" else 0.0,
    )


def _slope(call: Call, h: tf.Tensor, counted: tf.Tensor | None, k: Any, inverse_rms: tf.Tensor) -> Any:
    """rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp."""
    if call.variant.eps_position == "outside":
        root_share = 1 - call.eps * inverse_rms  # of rho = s + eps
        positive = tf.stop_gradient(root_share) > 0
        return tf.where(positive, 1 / tf.where(positive, root_share, 1.0), 0.0)
    if call.variant.eps_position == "clamp":  # it begins where the length of a row over rho is eps / rho
        along = tf.stop_gradient(zero_outside(counted, _double(h)) * inverse_rms)
        edge = tf.stop_gradient(call.eps * CLAMPED * inverse_rms)
        return tf.cast(_sum(tf.square(along), call.axes, keepdims=True) >= tf.square(edge), tf.float64)
    return 1.0


def _may_leave_range(call: Call) -> bool:
    """Whether products of the numbers of a call may leave the range of float64."""
    return "float64" in (call.x, call.result)


def _inverse_power(call: Call, h: tf.Tensor, k: Any) -> tf.Tensor:
    """2^-e with 2^e next to the largest of |a| and eps: keeps every square in range, and scaling by it is exact."""
    length = sum(_eps(call, k)) ** (0.5 if call.variant.eps_position == "inside" else 1)
    largest = tf.maximum(tf.reduce_max(tf.abs(h), call.axes, keepdims=True), length)
    return 1 / tf.clip_by_value(power_of_two(largest), 2.0**-1022, 2.0**1022)


def _sum(terms: tf.Tensor, axes: Sequence[int], keepdims: bool = False) -> tf.Tensor:
    """The sum as float64, of terms that are added in their own format."""
    slabs, left_over = _in_slabs(terms, axes)
    if slabs is None:
        return _double(tf.reduce_sum(terms, axes, keepdims=keepdims))
    result = _SLABS * _double(tf.reduce_sum(slabs, axes, keepdims=keepdims))
    return result if left_over is None else result + _double(tf.reduce_sum(left_over, axes, keepdims=keepdims))


def _in_slabs(terms: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """The mean of the slabs of the terms along their longest axis, and the terms that are left over.

    Of 1,003 terms the mean of 8 slabs has 125 terms, and 3 are left over. It is a mean and no sum, because XLA would
    make one sum of a sum of sums. Terms of a short sum XLA does not store: then both are None.
    """
    static = terms.shape.as_list()  # in graphs of TensorFlow 1 the sizes of a shape are no numbers
    sizes = [static[axis] for axis in axes]
    if None in sizes:
        axis, size = axes[sizes.index(None)], None
    else:
        axis, size = axes[sizes.index(max(sizes))], max(sizes)
    if size is not None and size <= _FUSED_SUM:
        return None, None
    shape = tf.unstack(tf.shape(terms), len(static)) if None in static else static
    slab = shape[axis] // _SLABS
    whole, left_over = terms, None
    if size is None or size % _SLABS:
        whole, left_over = tf.split(terms, [slab * _SLABS, shape[axis] - slab * _SLABS], axis)
    slabs = tf.reshape(whole, [*shape[:axis], _SLABS, slab, *shape[axis + 1 :]])
    return tf.reduce_mean(slabs, axis), left_over


def _gain(call: Call, scale: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """o + g. An o of 0 is not added: it would make +0 of a gain that is -0."""
    gain = features(call, scale, like)
    return call.variant.scale_offset + gain if call.variant.scale_offset else gain


def features(call: Call, parameter: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A parameter in the dtype of ``like``, in a shape that broadcasts against x."""
    parameter = tf.cast(parameter, like.dtype)
    if None not in call.feature_shape:
        return tf.reshape(parameter, call.feature_shape)
    return parameter[tuple(slice(None) if axis in call.feature_axes else None for axis in range(len(call.shape)))]


def _over_rows(call: Call, terms: tf.Tensor) -> tf.Tensor:
    """Sum over the axes that share the parameters, in the shape of the parameters."""
    return _sum(terms, call.shared_axes) if call.shared_axes else _double(terms)


def wide(call: Call, x: tf.Tensor) -> tf.Tensor:
    """In the format of the arithmetic."""
    narrow = call.x in dtypes.HALF and call.result in dtypes.HALF and call.product != "float64"
    return tf.cast(x, tf.float32) if narrow else _double(x)


def _double(x: tf.Tensor) -> tf.Tensor:
    return _by_way_of_float32(x) if x.dtype in (tf.float16, tf.bfloat16) else tf.cast(x, tf.float64)


def _by_way_of_float32(x: tf.Tensor) -> tf.Tensor:
    """Two casts, as LLVM makes slow code of the one from 16 bits to float64: two numbers at a time. XLA would join
    both casts again but for the changes of sign, which leave the numbers as they are."""
    return -tf.cast(-tf.cast(x, tf.float32), tf.float64)
