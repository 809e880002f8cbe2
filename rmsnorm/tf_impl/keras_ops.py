"""RMSNorm in keras.ops: what the layer computes on the backends of Keras that have no folder here, NumPy and OpenVINO.

The arithmetic is float32, float64 where x or y is; the statistic is scaled by a power of two, so that no square leaves
the range. These backends have no derivatives, and so none are thought of.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Axis, Call, Spec, resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.tf_impl import portable


def rms_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    variant: Variant,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    gate: Any = None,
    out_dtype: Any = None,
) -> Any:
    """As tf_impl.functional.rms_norm, with the arguments that the layer has."""
    call = resolve(
        "rms_norm", _spec(x), *(None if p is None else _spec(p) for p in (scale, bias)),
        variant=variant, axis=axis, feature_axis=feature_axis, gate=None if gate is None else _spec(gate),
        out_dtype=out_dtype,
    )  # fmt: skip
    if gate is not None:
        z = ops.cast(gate, call.gate)
        f = ops.silu(z) if variant.gate_function == "silu" else ops.sigmoid(z)
        x = ops.cast(x, call.gate) * f if call.is_gated_before else x
        y = _scaled(call.without_gate, x, scale, bias)
        return y if call.is_gated_before else ops.cast(y * f, call.result)
    return _scaled(call, x, scale, bias)


def _scaled(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    """y of a call without a gate."""
    if 0 in call.shape:
        return ops.cast(x, call.result)
    wide = dtypes.promote("float32", call.x, call.result)
    gain, shift = (None if p is None else ops.reshape(ops.cast(p, wide), call.feature_shape) for p in (scale, bias))
    y = portable.with_parameters(ops, call, _normalised(call, ops.cast(x, wide)), gain, shift, wide)
    return ops.cast(y, call.result)


def _normalised(call: Call, h: Any) -> Any:
    """h / rho."""
    first = [size if axis in call.axes else 1 for axis, size in enumerate(call.shape)]
    counted = None if call.k == call.n else ops.reshape(ops.arange(call.n) < call.k, first)
    largest = ops.max(ops.abs(portable.counted_only(ops, h, counted)), axis=call.axes, keepdims=True)
    length = portable.length(call, call.k)
    power = _power_of_two(ops.where(largest < length, ops.full_like(largest, length), largest))
    h, root = portable.normalised(ops, ops.sum, call, h, h, counted, call.k, power)
    return h / root


def _power_of_two(largest: Any) -> Any:
    """2^e with 2^e <= largest < 2^(e+1), within the normal numbers."""
    dtype = _dtype(largest)
    integer, exponent, end = ("int64", 0x7FF << 52, 1022) if dtype == "float64" else ("int32", 0xFF << 23, 126)
    if hasattr(ops, "view"):
        bits = ops.view(largest, integer)
        power = ops.view(ops.bitwise_and(bits, ops.cast(exponent, integer)), dtype)
    else:  # in older versions of Keras, whose backend without a folder here is NumPy
        exponents = np.frexp(ops.convert_to_numpy(largest))[1] - 1
        power = ops.convert_to_tensor(np.ldexp(np.ones(exponents.shape, dtype), exponents))
    least, most = (ops.convert_to_tensor(2.0**sign, dtype) for sign in (-end, end))
    return ops.clip(power, least, most)


def _spec(x: Any) -> Spec:
    return Spec(tuple(x.shape), _dtype(x))


def _dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))
