"""The formula of RMSNorm in operations that every array library has under the same name, so in tf and in keras.ops.

It is float32 where nothing of the call is float64: lite.py and keras_ops.py compute with it. Every row is divided by a
number next to its largest, so that no square leaves the range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rmsnorm.specification.call import Call


def length(call: Call, k: Any) -> Any:
    """What eps is beside the numbers of a row of which k are counted: rho is no less."""
    eps = call.eps
    return {"inside": eps**0.5, "outside": eps, "clamp": eps / k**0.5}[call.variant.eps_position]


def counted_only(ops: Any, values: Any, counted: Any) -> Any:
    """The values, and 0 where they are not counted. None counts all."""
    return values if counted is None else ops.where(counted, values, ops.zeros_like(values))


def normalised(
    ops: Any, sum_over: Callable[..., Any], call: Call, h: Any, c: Any, counted: Any, k: Any, divisor: Any
) -> tuple[Any, Any]:
    """h and rho, both over the divisor; the statistic is of the k counted elements of c."""
    position = call.variant.eps_position
    c = counted_only(ops, c / divisor, counted)
    if call.variant.statistic == "variance":
        c = counted_only(ops, c - sum_over(c, call.axes, True) / k, counted)
    radicand = sum_over(c * c, call.axes, True) / k
    if position == "inside" and call.eps:
        power = 2.0 ** math.frexp(call.eps**0.5)[1]  # a small eps is 0 in float32, its root is not
        ratio = power / divisor
        root = ops.sqrt(radicand + call.eps / power**2 * (ratio * ratio))
    else:
        is_zero = ops.equal(radicand, 0.0)  # where the root has no finite slope
        root = ops.sqrt(ops.where(is_zero, ops.ones_like(radicand), radicand))
        root = ops.where(is_zero, ops.zeros_like(root), root)
    if position == "outside":
        root = root + call.eps / divisor
    if position == "clamp":
        floor = length(call, k) / divisor
        rise = ops.stop_gradient(ops.where(root < floor, floor - root, ops.zeros_like(root)))
        root = ops.where(root < floor * (1 - 2.0**-20), floor, root + rise)  # CLAMPED, for the rounding of float32
    return h / divisor, root


def with_parameters(ops: Any, call: Call, y: Any, gain: Any, shift: Any, dtype: str, is_rounded: bool = True) -> Any:
    """y * (o + gain) + shift in that dtype, after each step rounded as the variant says, which has no derivative."""

    def rounded(values: Any, narrow: str | None) -> Any:
        return ops.cast(ops.cast(values, narrow), dtype) if is_rounded and call.norm is not None else values

    y = rounded(y, call.norm)
    if gain is not None:
        gain = call.variant.scale_offset + gain if call.variant.scale_offset else gain
        y = rounded(y * rounded(gain, call.product), call.product)
    return y if shift is None else rounded(y + shift, call.product)
