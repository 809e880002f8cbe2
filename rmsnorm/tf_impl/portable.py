"""The formula of RMSNorm in operations that every array library, exporter and quantiser knows.

The names are those of keras.ops. The arithmetic is float32, float64 where x or y is. Every row is brought next to 1 by
its largest number, so that no square leaves the range. No constant stands beside the numbers of x that is larger than
they are, since a quantiser gives both one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.dtypes import promote
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import CLAMPED, Variant


def counted_only(ops: Any, values: Any, counted: Any) -> Any:
    """The values, and 0 where they are not counted. None counts all."""
    return values if counted is None else ops.where(counted, values, ops.zeros_like(values))


def normalised(
    ops: Any,
    call: Call,
    h: Any,
    c: Any,
    counted: Any,
    k: Any,
    constant: Callable[[Any], Any] = lambda values: values,
    empty: Any = None,
) -> tuple[Any, Any]:
    """h / rho and 1 / rho. The statistic is of the k counted elements of c.

    There is no division: LiteRT's in 8 bits fails if the divisor has the code 0. Nor is there a sum where a mean will
    do: LiteRT's sum in 16 bits is wrong.
    """

    def mean(values: Any) -> Any:
        if counted is None and call.n is not None:
            return ops.mean(values, call.axes, keepdims=True)
        return ops.sum(values, call.axes, keepdims=True) / k

    position, eps, is_double = call.variant.eps_position, call.eps, promote("float32", call.x, call.result) == "float64"
    least = 2.0 ** (-512 if is_double else -64)  # no finite number has a smaller root below; an infinity would have 0
    length = {"inside": eps**0.5, "outside": eps, "clamp": eps / k**0.5}[position]  # rho is no less
    largest = ops.max(ops.abs(counted_only(ops, c, counted)), call.axes, keepdims=True)
    largest = constant(ops.maximum(largest, length) if eps else largest)
    if empty is not None:
        largest = ops.where(empty, ops.ones_like(largest), largest)
    root = ops.maximum(ops.rsqrt(largest), least)  # of 1 / largest, which may be no normal number
    c = counted_only(ops, c * root * root, counted)
    square, floor = mean(c * c), length * root * root
    if position == "outside":
        # the root of the mean square, with a finite slope at 0
        inverse = ops.rsqrt(square * ops.maximum(ops.rsqrt(ops.maximum(square, 1e-30)), least) + floor)
        inverse = inverse * inverse
    elif position == "clamp":
        clamped = CLAMPED**2 if is_double else 1 - 2.0**-19  # for the rounding of float32
        above = ops.maximum(square, floor * floor * clamped)  # which decides what the slope is
        inverse = ops.rsqrt(above + constant(ops.maximum(floor * floor - above, 0.0)))
    else:
        inverse = ops.rsqrt(square + floor * floor)
    inverse = inverse * root
    # h * root has two readers, so no operation writes into it while LiteRT looks for the range of its numbers
    return h * root * inverse, inverse * root


def with_parameters(ops: Any, call: Call, y: Any, gain: Any, shift: Any, dtype: str, is_rounded: bool = True) -> Any:
    """y * (o + gain) + shift in that dtype, after each step rounded as the variant says, which has no derivative."""

    def rounded(values: Any, narrow: str | None) -> Any:
        return ops.cast(ops.cast(values, narrow), dtype) if is_rounded and call.norm is not None else values

    y = rounded(y, call.norm)
    if gain is not None:
        gain = call.variant.scale_offset + gain if call.variant.scale_offset else gain
        y = rounded(y * rounded(gain, call.product), call.product)
    return y if shift is None else rounded(y + shift, call.product)


def rms_norm(
    x: Any, scale: Any = None, bias: Any = None, *, variant: Variant, axis: Axis = -1, feature_axis: Axis | None = None,
    gate: Any = None, out_dtype: Any = None,
) -> Any:  # fmt: skip
    """As tf_impl.functional.rms_norm with the arguments that the layer has, in keras.ops.

    It computes on the backends of Keras that have no folder here, NumPy and OpenVINO, which have no derivatives.
    """
    from keras import ops

    gain, shift, z = (None if t is None else _spec(t) for t in (scale, bias, gate))
    options = {"variant": variant, "axis": axis, "feature_axis": feature_axis, "gate": z, "out_dtype": out_dtype}
    call = resolve("rms_norm", _spec(x), gain, shift, **options)
    if gate is None:
        return _of_keras(ops, call, x, scale, bias)
    gate = ops.cast(gate, call.gate)
    f = ops.silu(gate) if variant.gate_function == "silu" else ops.sigmoid(gate)
    if call.is_gated_before:
        return _of_keras(ops, call.without_gate, ops.cast(x, call.gate) * f, scale, bias)
    return ops.cast(_of_keras(ops, call.without_gate, x, scale, bias) * f, call.result)


def _of_keras(ops: Any, call: Call, x: Any, scale: Any, bias: Any) -> Any:
    """y of a call without a gate."""
    if 0 in call.shape:
        return ops.cast(x, call.result)
    wide = promote("float32", call.x, call.result)
    gain, shift = (None if p is None else ops.reshape(ops.cast(p, wide), call.feature_shape) for p in (scale, bias))
    first = [size if axis in call.axes else 1 for axis, size in enumerate(call.shape)]
    counted = None if call.k == call.n else ops.reshape(ops.arange(call.n) < call.k, first)
    h = ops.cast(x, wide)
    exact = SimpleNamespace(**{  # Keras's own make float32 of float64 on every backend without a folder here
        **vars(ops), "rsqrt": lambda a: a**-0.5, "where": lambda condition, a, b: ops.select([condition], [a], b),
        "maximum": lambda a, b: ops.select([a < b], [b + ops.zeros_like(a)], a),
        "mean": lambda a, axes, keepdims: ops.sum(a, axes, keepdims=keepdims) / call.n,
    })  # fmt: skip
    y, _ = normalised(exact, call, h, h, counted, call.k)
    return ops.cast(with_parameters(ops, call, y, gain, shift, wide), call.result)


def _spec(x: Any) -> Spec:
    from keras import backend

    return Spec(tuple(x.shape), str(backend.standardize_dtype(x.dtype)))
