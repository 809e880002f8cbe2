"""RMSNorm in keras.ops: what the layer computes where Keras runs on JAX or PyTorch. No TensorFlow.

The arithmetic is float32, float64 where x or y is; the statistic is scaled by a power of two, so that no square leaves
the range. Derivatives are those of the backend, which keeps what it likes.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from rmsnorm import dtypes
from rmsnorm.call import Axis, Call, Spec, resolve
from rmsnorm.variants import Variant


def rms_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    variant: Variant,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    out_dtype: str | None = None,
) -> Any:
    """As tf_impl.functional.rms_norm, with the arguments that the layer has."""
    call = resolve(
        "rms_norm", _spec(x), *(None if p is None else _spec(p) for p in (scale, bias)),
        variant=variant, axis=axis, feature_axis=feature_axis, out_dtype=out_dtype,
    )  # fmt: skip
    if 0 in call.shape:
        return ops.cast(x, call.result)
    wide = dtypes.promote("float32", call.x, call.result)
    y = _normalised(call, ops.cast(x, wide))
    gain, shift = (None if p is None else ops.reshape(ops.cast(p, wide), call.feature_shape) for p in (scale, bias))

    smooth = y
    if gain is not None:
        smooth = smooth * (variant.scale_offset + gain)
    if shift is not None:
        smooth = smooth + shift
    if call.norm not in (None, wide):
        smooth = _straight_through(_before_scale(call, y, gain, shift, wide), smooth)
    return ops.cast(smooth, call.result)


def _before_scale(call: Call, y: Any, gain: Any, shift: Any, wide: str) -> Any:
    """Each operation rounded as the variant says."""

    def rounded(value: Any, dtype: str | None) -> Any:
        return ops.cast(ops.cast(value, dtype), wide)

    y = rounded(y, call.norm)
    if gain is not None:
        y = rounded(y * rounded(call.variant.scale_offset + gain, call.product), call.product)
    return y if shift is None else rounded(y + shift, call.product)


def _straight_through(value: Any, smooth: Any) -> Any:
    """The value, to the bit, with the derivative of what it is rounded from."""
    zero = ops.stop_gradient(smooth) - smooth
    return ops.where(ops.isfinite(smooth), ops.stop_gradient(value) - zero, value)


def _normalised(call: Call, h: Any) -> Any:
    """h / rho."""
    n, k, eps, position = call.n, call.k, call.eps, call.variant.eps_position
    first = [size if axis in call.axes else 1 for axis, size in enumerate(call.shape)]
    counted = None if k == n else ops.reshape(ops.arange(n) < k, first)

    def kept(value: Any) -> Any:
        return value if counted is None else ops.where(counted, value, ops.zeros_like(value))

    def total(value: Any) -> Any:
        return ops.sum(value, axis=call.axes, keepdims=True)

    length = {"inside": eps**0.5, "outside": eps, "clamp": eps / k**0.5}[position]
    largest = ops.max(ops.abs(kept(h)), axis=call.axes, keepdims=True)
    # not ops.maximum: on PyTorch it makes float32 of float64
    inverse = _inverse_power(ops.where(largest < length, ops.full_like(largest, length), largest))
    h = h * inverse
    c = kept(h)
    if call.variant.statistic == "variance":
        c = kept(c - total(c) / k)
    square = total(c * c) / k + (eps * inverse * inverse if position == "inside" else 0.0)
    zero = square == 0  # where the root is to have a finite slope
    root = ops.where(zero, ops.zeros_like(square), ops.sqrt(ops.where(zero, ops.ones_like(square), square)))
    if position == "outside":
        root = root + eps * inverse
    if position == "clamp":
        root = ops.where(root < length * inverse, length * inverse, root)
    return h / root


def _inverse_power(largest: Any) -> Any:
    """2^-e with 2^e <= largest < 2^(e+1), within the normal numbers; a constant to every derivative."""
    integer, exponent, end = (
        ("int64", 0x7FF << 52, 1022) if _dtype(largest) == "float64" else ("int32", 0xFF << 23, 126)
    )
    bits = ops.view(largest, integer)
    power = ops.view(ops.bitwise_and(bits, ops.cast(exponent, integer)), _dtype(largest))
    # not plain numbers: on PyTorch they would be float32
    least, most = (ops.convert_to_tensor(2.0**sign, _dtype(largest)) for sign in (-end, end))
    return 1.0 / ops.clip(power, least, most)


def _spec(x: Any) -> Spec:
    return Spec(tuple(x.shape), _dtype(x))


def _dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))
