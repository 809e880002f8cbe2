"""The derivatives of RMSNorm for PyTorch's autograd, reverse and forward mode.

    dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

What is kept is x, or x + residual, the gain, and a number a row. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm.call import Call
from rmsnorm.torch_impl import arithmetic, operators, rows
from rmsnorm.torch_impl.arithmetic import gradients
from rmsnorm.torch_impl.dynamo import untraced
from rmsnorm.torch_impl.memory import is_plain
from rmsnorm.torch_impl.rounding import cast, dtype_name, is_transformed, is_watched


def is_differentiated(*tensors: Tensor | None) -> bool:
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Any, return_inverse_rms: bool, x: Tensor, residual: Tensor | None,
        scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        y, h, inverse_rms = rows.forward(call, plan, x, residual, scale, bias, mask)
        ctx.call, ctx.plan = call, plan
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x if h is None else h, scale, mask, inverse_rms)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(x, residual, scale, mask)
        ctx.set_materialize_grads(False)
        if not return_inverse_rms:  # every output costs a microsecond
            return y, h, None
        ctx.mark_non_differentiable(inverse_rms)
        return y, h, inverse_rms

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
        h, scale, mask, inverse_rms = ctx.saved_tensors
        x, residual, bias = ctx.dtypes
        dx, dscale, dbias = dh, None, None
        if dy is not None:
            one_dtype = residual in (None, x) and ctx.call.x == ctx.call.sum
            dx, dscale, dbias = _backward(ctx.call, ctx.plan, dy, dh, h, scale, bias, mask, inverse_rms, one_dtype)
        _, _, _, needs_x, needs_residual, needs_scale, needs_bias, _ = ctx.needs_input_grad
        return (
            None,
            None,
            None,
            _to(dx, x) if needs_x else None,
            _to(dx, residual) if needs_residual else None,
            dscale if needs_scale else None,
            dbias if needs_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _, _, _, dx, dresidual, dscale, dbias, _ = tangents
        x, residual, scale, mask = ctx.saved_tensors
        dy, dh = arithmetic.tangents(ctx.call, x, residual, scale, mask, dx, dresidual, dscale, dbias)
        return dy, dh, None


class KeptFunction(torch.autograd.Function):
    """A small call that was made before: little but the kernels, as every argument and result costs time."""

    @staticmethod
    def forward(ctx: Any, kept: rows.Kept, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        y, inverse_rms = kept.forward(x, scale, bias, with_inverse_rms=True)
        ctx.kept = kept
        ctx.save_for_backward(x, scale, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, scale, inverse_rms = ctx.saved_tensors
        kept = ctx.kept
        if not torch.is_grad_enabled() and is_plain(dy) and dy.is_contiguous():
            return None, *kept.backward(dy, x, scale, inverse_rms)
        bias = None if kept.bias is None else kept.bias[1]
        dx, *others = _backward(kept.call, kept.plan, dy, None, x, scale, bias, None, inverse_rms, True)
        return None, _to(dx, x.dtype), *others


@untraced
def again(kept: rows.Kept | None, settings: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """y of a small call that was made before, and has no tangents; None if it is another one."""
    if kept is None or not kept.fits(settings, x, scale, bias):
        return None
    return _apply(kept, x, scale, bias) if is_differentiated(x, scale, bias) else kept.forward(x, scale, bias)[0]


# Function.apply looks for torch.func first, which is no call that a layer keeps, for a microsecond and a half
_apply: Any = super(torch.autograd.Function, KeptFunction).apply


def _backward(
    call: Call, plan: Any, dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None, bias: torch.dtype | None,
    mask: Tensor | None, inverse_rms: Tensor, one_dtype: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh, dscale and dbias. ``one_dtype``: that of the residual, if there is one, is that of x."""
    if one_dtype and is_watched() and call.has_last_axes and operators.serve(call, h, None, dy, dh, scale, mask):
        return operators.backward(call, dy, h, scale, bias, mask, inverse_rms, dh)
    if is_transformed() or is_differentiated(dy, dh, h, scale) or not one_dtype:
        # a second derivative goes through 1 / rho
        return gradients(call, dy, h, scale, bias, mask, dh, None if is_differentiated(h) else inverse_rms)
    return rows.backward(call, plan, dy, h, scale, bias, mask, inverse_rms, dh)


def _to(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else cast(gradient, dtype_name(dtype))
