"""The derivatives of RMSNorm for PyTorch's autograd, reverse and forward mode.

    dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

A call keeps x, or x + residual, the gain, and a number a row. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import kernels, operations, operators
from rmsnorm.torch_impl.memory import laid_out
from rmsnorm.torch_impl.private import apply_of, has_tangents, is_differentiated, is_transformed, is_watched, untraced
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

_OPERATORS: Final = object()  # in place of a plan: the operators compute the call


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Any, return_inverse_rms: bool, x: Tensor, residual: Tensor | None,
        scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        run = operators.forward_below_autograd if plan is _OPERATORS else kernels.forward
        y, h, inverse_rms = run(call, plan, True, x, residual, scale, bias, mask, gate)
        ctx.call, ctx.plan = call, plan
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.bias = None if gate is not None else bias  # without a gate only its dtype counts
        kept = (
            _savable(x if h is None else h),
            scale,
            bias if gate is not None else None,
            mask,
            _savable(gate),
            inverse_rms,
        )
        ctx.save_for_backward(*kept)
        if has_tangents():
            ctx.save_for_forward(x, residual, scale, bias, mask, gate)
        ctx.set_materialize_grads(False)
        if not return_inverse_rms:  # every output costs a microsecond
            return y, h, None
        ctx.mark_non_differentiable(inverse_rms)
        return y, h, inverse_rms

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
        h, scale, bias, mask, gate, inverse_rms = ctx.saved_tensors
        bias = ctx.bias if gate is None else bias
        x, residual = ctx.dtypes
        dx, *others = dh, None, None, None
        if dy is not None:
            one_dtype = residual in (None, x) and ctx.call.x == ctx.call.sum
            dx, *others = _backward(ctx.call, ctx.plan, dy, dh, h, scale, bias, mask, gate, inverse_rms, one_dtype)
            dx = laid_out(dx, h)
        _, _, _, needs_x, needs_residual, *needs, _, needs_gate = ctx.needs_input_grad
        dscale, dbias, dgate = (d if need else None for d, need in zip(others, (*needs, needs_gate), strict=True))
        dx, dresidual = (_to(dx, t) if need else None for t, need in ((x, needs_x), (residual, needs_residual)))
        return None, None, None, dx, dresidual, dscale, dbias, None, dgate

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _, _, _, dx, dresidual, dscale, dbias, _, dgate = tangents
        x, residual, scale, bias, mask, gate = ctx.saved_tensors
        h = add(x, residual, ctx.call.x)
        terms = [term.double() for term in (dx, dresidual) if term is not None]
        dh = sum(terms) if terms else None
        dy = operations.tangents(ctx.call, h, scale, bias, mask, gate, dh, dscale, dbias, dgate)
        if residual is None:
            return dy, None, None
        return dy, cast(torch.zeros_like(h, dtype=torch.float64) if dh is None else dh, ctx.call.x), None


def _forward_of_operator(x: Tensor, *arguments: Any) -> Any:
    *tensors, text, k = arguments
    call = operators.call_of(x, text, k)
    return operators.present(x, *RMSNormFunction.apply(call, _OPERATORS, True, x, *tensors))


operators.register(_forward_of_operator)


class RepeatedFunction(torch.autograd.Function):
    """A small call that was made before: little but the kernels, as every argument and result costs time."""

    @staticmethod
    def forward(ctx: Any, repeated: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, *gate: Tensor) -> Tensor:
        ctx.repeated, ctx.bias = repeated, bias
        # saved in the order of RMSNormFunction: a checkpoint compares what the first call saves with what the next does
        y, inverse_rms = repeated.forward(x, scale, bias, *gate, with_inverse_rms=True)
        others = (bias, *map(_savable, gate)) if gate else ()
        ctx.save_for_backward(_savable(x), scale, *others, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        repeated = ctx.repeated
        x, scale, *others, inverse_rms = ctx.saved_tensors
        bias, gate = others or (ctx.bias, None)
        if not torch.is_grad_enabled() and repeated.is_readable(dy) and dy.is_contiguous():
            results = repeated.backward(dy, x, scale, inverse_rms, bias, gate, ctx.needs_input_grad[2:4])
        else:
            dx, *others = _backward(
                repeated.call, repeated.plan, dy, None, x, scale, bias, None, gate, inverse_rms, True
            )
            results = _to(dx, x.dtype), *others
        return None, *(results if gate is not None else results[:3])


@untraced
def repeat(
    repeated: kernels.Repeated | None, settings: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """y of a call that was made before, and has no tangents; None if it is another one."""
    if repeated is None or not repeated.matches(settings, x, scale, bias, gate):
        return None
    tensors: Any = (x, scale, bias) if gate is None else (x, scale, bias, gate)
    y: Tensor = _apply(repeated, *tensors) if is_differentiated(*tensors) else repeated.forward(*tensors)[0]
    return y


def own_copy(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """A copy of x for the backward pass, if there will be one, so that a model may write into x."""
    needs = torch.is_grad_enabled() and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters))
    return x.clone() if needs else x


def _savable(x: Tensor | None) -> Tensor | None:
    """x, or a copy of what was made in inference mode, as a layer that is frozen makes it."""
    return x.clone() if x is not None and x.is_inference() else x


_apply = apply_of(RepeatedFunction)  # a layer repeats no call of torch.func


def _backward(
    call: Call, plan: Any, dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None, inverse_rms: Tensor, one_dtype: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate. ``one_dtype``: that of the residual, if there is one, is that of x."""
    if plan is _OPERATORS or (
        one_dtype
        and call.has_last_axes
        and is_watched()
        and operators.can_compute(call, h, None, dy, dh, scale, mask, gate)
    ):
        return operators.backward(call, dy, h, scale, bias, mask, inverse_rms, dh, gate)
    if is_transformed() or is_differentiated(dy, dh, h, scale, gate) or not one_dtype:
        # a second derivative goes through 1 / rho
        known = None if is_differentiated(h, gate) else inverse_rms
        return operations.gradients(call, dy, h, scale, bias, mask, dh, gate, known)
    return kernels.backward(call, plan, dy, h, scale, bias, mask, inverse_rms, dh, gate)


def _to(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else cast(gradient, dtype_name(dtype))
