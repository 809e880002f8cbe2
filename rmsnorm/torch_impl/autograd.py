"""RMSNorm with its derivatives, by a kernel or by recipe.py, for PyTorch's autograd.

    dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

A call keeps its arguments, x + residual in place of these two, and a number or two a row. A second derivative is that
of the operations of recipe.backward, through 1 / rho. In forward mode, whose tangents go through operations, recipe.py
computes the call. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rmsnorm import recipe
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import space
from rmsnorm.torch_impl.exported import with_exact_eps
from rmsnorm.torch_impl.kernels import Kept, Results
from rmsnorm.torch_impl.memory import is_plain, laid_out
from rmsnorm.torch_impl.private import (
    apply_of,
    has_tangents,
    is_differentiated,
    is_exported,
    is_exporting,
    is_in_transform,
    untraced,
)

_FEW: Final = 4  # calls that a layer keeps: lengths of prompts alternate with single tokens, say
Known: TypeAlias = tuple[tuple[Any, Kept], ...]  # calls that a layer made, each with the attributes that it had then


class Norm(torch.autograd.Function):
    """y, x + residual (None without one), and what the backward pass needs of every row, by recipe.py."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *tensors: Any) -> Any:
        y, total, row = recipe.forward(space, call, *tensors)
        return y, total, row.inverse, row.power, row.slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, x, residual, *others = inputs
        _, total, *row = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in row if t is not None))
        ctx.known = call, x.dtype, None if residual is None else residual.dtype
        h = (x, residual) if residual is None or call.exact_sum else (total, None)
        ctx.save_for_backward(*map(_savable, (*h, *others)), *row)

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, *_: Any) -> tuple[Any, ...]:
        call, x_dtype, residual_dtype = ctx.known
        *tensors, inverse, power, slope = ctx.saved_tensors
        is_differentiable = torch.is_grad_enabled() or has_tangents()
        row = None if is_differentiable else recipe.Row(inverse, power, slope, None, None, None)
        dx, dscale, dbias, dgate = _gradients(call, dy, dh, *tensors, row)
        _, needs_x, needs_residual, *_ = ctx.needs_input_grad
        dresidual = _to(dx, residual_dtype) if needs_residual else None
        return None, _to(dx, x_dtype) if needs_x else None, dresidual, dscale, dbias, None, dgate


class KernelNorm(torch.autograd.Function):
    """The same by kernels: y of x, scale and bias; with ``others`` also x + residual and 1 / rho, or None.

    Written for speed: every argument and result costs time, and so does ``setup_context``.
    """

    @staticmethod
    def forward(ctx: Any, kept: Kept, x: Tensor, scale: Tensor | None, bias: Tensor | None, *others: Any) -> Any:
        residual, with_inverse_rms = others or (None, False)
        y, h, inverse_rms = kept.forward(True, x, residual, scale, bias)
        ctx.known = kept, bias, x.dtype, None if residual is None else residual.dtype
        ctx.save_for_backward(_savable(x) if h is None else h, scale, inverse_rms)
        if not others:
            return y
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse_rms)
        return y, h, inverse_rms if with_inverse_rms else None

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any = None, _: Any = None) -> tuple[Any, ...]:
        kept, bias, x_dtype, residual_dtype = ctx.known
        h, scale, inverse_rms = ctx.saved_tensors
        _, needs_x, needs_scale, needs_bias, *others = ctx.needs_input_grad
        if dy is None or torch.is_grad_enabled() or has_tangents() or not is_plain(kept.place, dy, dh):
            dx, dscale, dbias, _ = _gradients(kept.call, dy, dh, h, None, scale, bias, None, None, None)
        else:
            needed = needs_x or (bool(others) and others[0]), needs_scale, needs_bias
            dx, dscale, dbias = kept.backward(needed, dy, dh, h, scale, bias, inverse_rms)
            dx = dx if h.is_contiguous() else laid_out(dx, h)
        results = None, _to(dx, x_dtype) if needs_x else None, dscale, dbias
        return (*results, _to(dx, residual_dtype) if others[0] else None, None) if others else results


_by_kernel = apply_of(KernelNorm)


def _gradients(call: Call, dy: Any, dh: Any, x: Any, *others: Any) -> tuple[Any, Any, Any, Any]:
    """dx + dh, dscale, dbias and dgate by recipe.py; ``others`` are those of recipe.backward. dy is None for 0."""
    if dy is None:
        return dh, None, None, None
    dx, *gradients = recipe.backward(space, call, dy, dh, x, *others)
    return dx if is_in_transform() else laid_out(dx, x), *gradients


def _to(gradient: Tensor | None, dtype: Any) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else space.cast(gradient, space.dtype_name(dtype))


def by_kernel(
    kept: Kept, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None
) -> Results:
    """y, x + residual and 1 / rho, with derivatives if there may be any.

    The second and the third may be None where they are not there or not asked for.
    """
    if not is_differentiated(x, residual, scale, bias):
        return kept.forward(with_inverse_rms, x, residual, scale, bias)
    if residual is None and not with_inverse_rms:
        return _by_kernel(kept, x, scale, bias), None, None
    results: Results = _by_kernel(kept, x, scale, bias, residual, with_inverse_rms)
    return results


def by_recipe(call: Call, *tensors: Any) -> Results:
    """The same of x, residual, scale, bias, mask and gate."""
    if has_tangents() or is_exported() or is_exporting():  # operations, which something else differentiates
        y, h, row = recipe.forward(space, with_exact_eps(call) if is_exported() else call, *tensors)
        if has_tangents() and call.norm_dtype:  # roundings that tangents do not have, not of a factor either
            smooth, *_ = recipe.forward(space, replace(call, norm_dtype=None), *tensors)
            y = space.with_derivatives_of(smooth, y)
    elif not (is_in_transform() or is_differentiated(*tensors)):
        with torch.no_grad():
            y, h, row = recipe.forward(space, call, *tensors)
    else:
        y, h, inverse, power, slope = Norm.apply(call, *tensors)
        row = recipe.Row(inverse, power, slope, None, None, None)
    return y, h, recipe.inverse_rms(space, call, row)


@untraced
def repeat(
    known: Known, attributes: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None
) -> Any:
    """y, or y and x + residual, of a call that a layer made before, where nothing watches it; None if it is another."""
    for then, kept in known:
        if kept.matches(x, residual, scale, bias) and then == attributes:
            if residual is not None:
                return by_kernel(kept, False, x, residual, scale, bias)[:2]
            if is_differentiated(x, scale, bias):  # as in ``by_kernel``; here a microsecond counts
                return _by_kernel(kept, x, scale, bias)
            return kept.forward(False, x, None, scale, bias)[0]
    return None


def keep(
    layer: Any, attributes: Any, kept: Kept, x: Tensor, residual: Tensor | None, scale: Tensor | None,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """Let a layer keep a call, so that ``repeat`` finds it. Threads may do so at once: a new tuple replaces the old."""
    arrays = tuple(None if t is None else (t.shape, t.dtype) for t in (x, residual, scale, bias))
    known: Known = layer.__dict__.get("_kept", ())
    is_simple = kept.call.x_dtype == kept.call.sum_dtype and x.is_contiguous()
    if is_simple and all(call.arrays != arrays or then != attributes for then, call in known):
        layer.__dict__["_kept"] = ((attributes, kept._replace(arrays=arrays)), *known[: _FEW - 1])


def _savable(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of what was made in inference mode, as a layer that is frozen makes it."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor
