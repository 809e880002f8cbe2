"""The arithmetic of RMSNorm on PyTorch tensors.

All of it is float64, so that results in 16 and 32 bits are correctly rounded and no square of theirs leaves the range.
Where x or y is float64 itself, rows are multiplied by a power of two, so that no square of these leaves the range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import CLAMPED
from rmsnorm.torch_impl.gate import factor, slope
from rmsnorm.torch_impl.private import is_transformed
from rmsnorm.torch_impl.rounding import (
    cast,
    complete,
    dtype_name,
    excess,
    exponent_of,
    straight_through,
    two_to,
)


class Statistic(NamedTuple):
    """Of every row, the normalised axes kept with size 1; rho belongs to h * inverse_power."""

    empty: Tensor | None
    inverse_power: Tensor | float
    rho: Tensor
    inverse_rms: Tensor


def statistic(call: Call, h: Tensor, mask: Tensor | None) -> Statistic:
    call, h = leading_part(call, h, mask)
    counted, k, empty = counted_elements(call, h, mask)
    c = counted_only(h, counted)
    inverse_power: Any = 1.0
    if _may_leave_range(call):
        inverse_power = _inverse_power(call, c, k)
        c = c * inverse_power
    q = _sum(call, c.square()) / k
    inside, outside, floor = _eps(call, k, inverse_power)
    radicand = q + inside
    root = torch.where(radicand == 0, 0.0, torch.where(radicand == 0, 1.0, radicand).sqrt())  # a finite slope at 0
    rho = root + outside
    if call.variant.eps_position == "clamp":
        rho = _clamped(rho, _tensor(floor, q))
    if empty is not None:
        rho = torch.where(empty, 1.0, rho)  # for eps = 0: no 0 / 0 for a derivative to meet
    inverse_rms = inverse_power / rho
    if empty is not None:
        inverse_rms = torch.where(empty, 0.0, inverse_rms)
    return Statistic(empty, inverse_power, rho, inverse_rms)


def forward(
    call: Call, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y, and 1 / rho in float64."""
    if gate is not None:
        return gated(call, _forward, h, scale, bias, mask, gate)
    return _forward(call, h, scale, bias, mask)


def gated(
    call: Call, norm: Callable[..., tuple[Tensor, Tensor]], h: Tensor, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and 1 / rho of a call with a gate, if ``norm`` computes those of the call without it.

    f(z) is in the dtype of the product with it.
    """
    if (
        torch.onnx.is_in_onnx_export()
    ):  # it has no derivatives, and onnxruntime drops a rounding to float16 before Where
        (f,) = _zero_in_empty(call, h, mask, factor(call, gate, sigmoid))
    else:
        h, gate = _zero_in_empty(call, h, mask, h, gate)
        f = factor(call, _constant_under_mask(gate, mask), sigmoid)
    if call.is_gated_before:
        return norm(call.without_gate, _constant_under_mask(h, mask).to(f.dtype) * f, scale, bias, mask)
    y, inverse_rms = norm(call.without_gate, h, scale, bias, mask)
    return _constant_under_mask(cast(y * f, call.result), mask), inverse_rms


def _zero_in_empty(call: Call, h: Tensor, mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, and 0 in rows without counted elements, where the gate and x may be NaN."""
    empty = None if mask is None else counted_elements(call, h, mask)[2]
    return tensors if empty is None else tuple(torch.where(empty, 0.0, t) for t in tensors)


def _constant_under_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values, of which derivatives take those under the mask as constants."""
    if mask is None or torch.onnx.is_in_onnx_export():  # such a program has no derivatives
        return values
    return torch.where(mask, values, values.detach())


def _unmasked(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 under the mask, where the gate and x may be NaN."""
    return values if mask is None else torch.where(mask, values, 0.0)


def _forward(
    call: Call, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    h = complete(h).double()  # once: the gradients of its uses then add up in float64
    row = statistic(call, h, mask)
    y = _scaled(call, h, row, scale, bias)
    if mask is not None and (torch.is_grad_enabled() or is_transformed()):
        smooth = _scaled(call, torch.where(mask, h, 0.0), row, scale, bias)
        y = torch.where(mask, smooth, y.detach())
    if row.empty is not None:
        y = torch.where(row.empty, 0.0, y)
    return y, row.inverse_rms


def _scaled(call: Call, h: Tensor, row: Statistic, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """h / rho, the gain and the bias, rounded as the variant says."""
    y = h * row.inverse_power / row.rho
    rounded = None if call.norm is None else _before_scale(call, y, scale, bias)
    if scale is not None:
        y = y * _gain(call, scale)
    if bias is not None:
        y = y + _features(call, bias)
    return cast(y if rounded is None else straight_through(rounded, y), call.result)


@torch.no_grad()
def _before_scale(call: Call, y: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    y = cast(y, call.norm or call.x).double()
    if scale is not None:
        gain = cast(_gain(call, scale), call.product).double()
        y = cast(y * gain, call.product).double()
    if bias is not None:
        y = cast(y + _features(call, bias), call.product).double()
    return y


def backward(
    call: Call, dy: Tensor, h: Tensor, scale: Tensor | None, mask: Tensor | None, inverse_rms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale and dbias in float64, from x and 1 / rho alone."""
    h, v = complete(h), complete(dy).double()
    counted, k, empty = counted_elements(call, h, mask)
    has_gradient = None if mask is None or empty is None else mask & ~empty
    if has_gradient is not None:
        v, h = torch.where(has_gradient, v, 0.0), torch.where(has_gradient, h, 0.0)
    normalised = h * inverse_rms
    u, gain, exponents = v, None if scale is None else _gain(call, scale), []
    if _may_leave_range(call):  # within it while they are multiplied
        exponents = [exponent_of(inverse_rms), excess(exponent_of(_sum(call, v.abs() / call.n)), 850)]
        u = v * two_to(-exponents[-1])
        if gain is not None and not hasattr(gain, "placements"):  # of a DTensor it would have to be sent
            exponents.append(excess(exponent_of(gain.abs().mean()), 100))
            gain = gain * two_to(-exponents[-1])
    u = u if gain is None else u * gain
    along = counted_only(normalised, counted)
    along = along * _slope(call, along, inverse_rms)
    along = along * (_sum(call, u * normalised) / k)
    dx = u - (along if counted is None else torch.where(counted, along, 0.0))  # not 0 times infinity
    if not exponents:
        dx = inverse_rms * dx
    else:
        total: Any = sum(exponents)
        half = (total / 2).floor()
        dx = (inverse_rms * two_to(-exponents[0])) * dx * two_to(half) * two_to(total - half)
    along_scale = v * normalised
    if has_gradient is not None:  # again: 1 / rho may be infinite
        dx, along_scale = torch.where(has_gradient, dx, 0.0), torch.where(has_gradient, along_scale, 0.0)
    return dx, _over_rows(call, along_scale), _over_rows(call, v)


def gradients(
    call: Call, dy: Tensor, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    dh: Tensor | None, gate: Tensor | None = None, inverse_rms: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh in float64, dscale, dbias and dgate in their dtypes; without 1 / rho, its derivative counts."""
    dgate = None
    if gate is not None:
        dy, h, gate = _zero_in_empty(call, h, mask, dy, h, gate)
        whole, norm, ungated = call, call.without_gate, h
        f = factor(call, gate)
        if call.is_gated_before:
            h = h.to(f.dtype) * f
        else:
            dgate = dy * _forward(norm, h, scale, bias, mask)[0].double()
            dy = dy.double() * f
        call = norm
    h = h.double()
    if inverse_rms is None:
        inverse_rms = statistic(call, h, mask).inverse_rms
    dx, dscale, dbias = backward(call, dy, h, scale, mask, inverse_rms)
    if gate is not None:
        if whole.is_gated_before:
            dgate, dx = dx * ungated, _unmasked(dx * f, mask)
        dgate = cast(_unmasked(dgate * slope(whole, gate), mask), dtype_name(gate.dtype))
    return (
        dx if dh is None else dx + dh.double(),
        None if scale is None else cast(dscale, dtype_name(scale.dtype)),
        None if bias is None else cast(dbias, dtype_name(bias.dtype)),
        dgate,
    )


def tangents(
    call: Call, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None,
    dh: Tensor | None, dscale: Tensor | None, dbias: Tensor | None, dgate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """That of y, in its dtype, along those of h, of the parameters and of the gate."""
    norm, along = call, None
    if gate is not None:
        h, gate = _zero_in_empty(call, h, mask, h, gate)
        norm, f = call.without_gate, factor(call, gate)
        df = None if dgate is None else _unmasked(dgate.double() * slope(call, gate), mask)
        if call.is_gated_before:
            along = None if df is None else h * df
            dh = along if dh is None else dh.double() * f + (0.0 if along is None else along)
            h = h.to(f.dtype) * f
        elif df is not None:
            along = _forward(norm, h, scale, bias, mask)[0].double() * df
    h = h.double()
    dy = tangent(norm, h, scale, mask, statistic(norm, h, mask).inverse_rms, dh, dscale, dbias)
    if gate is not None and not call.is_gated_before:
        dy = _unmasked(dy * f, mask) + (0.0 if along is None else along)
    return cast(dy, call.result)


def tangent(
    call: Call, h: Tensor, scale: Tensor | None, mask: Tensor | None, inverse_rms: Tensor,
    dh: Tensor | None, dscale: Tensor | None, dbias: Tensor | None,
) -> Tensor:  # fmt: skip
    """dy in float64, from x and 1 / rho alone."""
    counted, k, empty = counted_elements(call, h, mask)
    h = h if mask is None else torch.where(mask, h, 0.0)
    normalised = h * inverse_rms
    dy = torch.zeros_like(h)
    if dh is not None:
        dh = dh.double() if mask is None else torch.where(mask, dh.double(), 0.0)
        along = counted_only(normalised, counted)
        along = along * _slope(call, along, inverse_rms)
        dy = inverse_rms * (dh - normalised * (_sum(call, along * dh) / k))
        if scale is not None:
            dy = dy * _gain(call, scale)
    if dscale is not None:
        dy = dy + normalised * _features(call, dscale)
    if dbias is not None:
        dy = dy + _features(call, dbias)
    return dy if mask is None or empty is None else torch.where(mask & ~empty, dy, 0.0)


def counted_elements(call: Call, h: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Any, Tensor | None]:
    """Elements that enter the statistic (None for all), how many, and rows without any (None where there are none)."""
    if mask is None and call.k == call.n and call.n:
        return None, call.k, None
    counted: Any = mask
    if mask is None or call.variant.partial is not None:
        sizes = [size if axis in call.axes else 1 for axis, size in enumerate(h.shape)]
        counted = h.new_zeros(sizes, dtype=torch.bool)  # a DTensor where a is one
        if call.n:
            ends = h.new_ones(call.k, dtype=torch.bool), h.new_zeros(call.n - call.k, dtype=torch.bool)
            counted = torch.cat(ends).reshape(sizes)
        if mask is None and call.n:
            return counted, call.k, None
        counted = counted if mask is None else counted & mask
    counted = counted.expand(h.shape)
    k = _sum(call, counted)
    empty = k == 0
    return counted, (k + empty).double(), empty


def leading_part(call: Call, h: Tensor, mask: Tensor | None) -> tuple[Call, Tensor]:
    """The elements of which the statistic is, and the call on these: the leading ones, if no mask chooses others."""
    if mask is not None or (leading := call.leading) is None or hasattr(h, "placements"):  # those of a DTensor
        return call, h
    return leading, h.narrow(*call.axes, 0, leading.n)


def counted_only(h: Tensor, counted: Tensor | None) -> Tensor:
    """The numbers that the statistic squares: h, 0 where not counted."""
    return h if counted is None else torch.where(counted, h, 0.0)


def _eps(call: Call, k: Any, inverse_power: Any = 1.0) -> tuple[Any, Any, Any]:
    """Eps under the root, eps beside it, and the floor under rho, in units of the scaled statistic."""
    position, eps = call.variant.eps_position, call.eps
    return (
        eps * inverse_power * inverse_power if position == "inside" else 0.0,
        eps * inverse_power if position == "outside" else 0.0,
        eps * inverse_power / k**0.5 if position == "clamp" else 0.0,
    )


def _tensor(value: Any, like: Tensor) -> Tensor:
    """A number as the tensor of an operation: a program that is decomposed cannot keep one of torch.as_tensor."""
    if isinstance(value, Tensor):
        return value.to(like)
    if like.is_nested is True:  # of a Proxy it is a Proxy; jagged rows have no new_full in PyTorch 2.6
        return torch.full((), value, dtype=like.dtype, device=like.device)
    return like.new_full((), value)


def _slope(call: Call, along: Tensor, inverse_rms: Tensor) -> Any:
    """rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp.

    ``along`` is what the statistic squares, over rho. So its length is eps / rho where the clamp begins.
    """
    if call.variant.eps_position == "outside":
        without_eps = 1 - call.eps * inverse_rms  # s / rho
        return torch.where(without_eps > 0, 1 / torch.where(without_eps > 0, without_eps, 1.0), 0.0)
    if call.variant.eps_position == "clamp":
        return 1 - (_sum(call, along.square()) < (call.eps * CLAMPED * inverse_rms).square()).double()
    return 1.0


def _may_leave_range(call: Call) -> bool:
    """Whether products of the numbers of a call may leave the range of float64."""
    return "float64" in (call.x, call.result) and bool(call.n)


def _inverse_power(call: Call, h: Tensor, k: Any) -> Tensor:
    """2^-e with 2^e next to the mean of |a|, or eps: keeps every square in range, and scaling by it is exact."""
    length = sum(_eps(call, k)) ** (0.5 if call.variant.eps_position == "inside" else 1)
    with torch.no_grad():
        return two_to(-exponent_of(_at_least(_sum(call, h.abs() / call.n), _tensor(length, h))))


def _clamped(root: Tensor, floor: Tensor) -> Tensor:
    """Their maximum, with the derivative of the root where that is the floor, up to rounding."""
    rise = torch.where(root < floor, floor - root, 0.0).detach()
    return torch.where(root < floor * CLAMPED, floor, root + rise)


def _at_least(values: Tensor, least: Tensor) -> Tensor:
    """Their maximum, an operation that DTensors of PyTorch 2.5 lack."""
    return torch.where(values < least, least, values)


def _sum(call: Call, terms: Tensor) -> Tensor:
    return complete(terms.sum(call.axes, keepdim=True))


def _gain(call: Call, scale: Tensor) -> Tensor:
    """o + g. An o of 0 is not added: it would make +0 of a gain that is -0."""
    gain = _features(call, scale)
    return call.variant.scale_offset + gain if call.variant.scale_offset else gain


def _features(call: Call, parameter: Tensor) -> Tensor:
    return parameter.double().reshape(call.feature_shape)


def _over_rows(call: Call, terms: Tensor) -> Tensor:
    """Sum over the axes that share the parameters, in the shape of the parameters."""
    return terms.sum(call.shared_axes) if call.shared_axes else terms
