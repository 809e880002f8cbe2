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
        by_operators = is_watched() and ctx.call.has_last_axes
        if dy is None:
            pass
        elif by_operators and residual in (None, x) and operators.serve(ctx.call, h, None, dy, dh, scale, mask):
            dx, dscale, dbias = operators.backward(ctx.call, dy, h, scale, bias, mask, inverse_rms, dh)
        elif is_transformed() or is_differentiated(dy, dh, h, scale) or residual not in (None, x):
            # a second derivative goes through 1 / rho
            kept = None if is_differentiated(h) else inverse_rms
            dx, dscale, dbias = gradients(ctx.call, dy, h, scale, bias, mask, dh, kept)
        else:
            dx, dscale, dbias = rows.backward(ctx.call, ctx.plan, dy, h, scale, bias, mask, inverse_rms, dh)
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


def _to(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else cast(gradient, dtype_name(dtype))
