"""The derivatives of RMSNorm for PyTorch's autograd, reverse and forward mode.

    dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

A call keeps x, or x + residual, the gain, and a number a row. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rmsnorm.torch_impl import operations, operators
from rmsnorm.torch_impl.kernels import Gradients, Kept, Plain, Results
from rmsnorm.torch_impl.memory import laid_out
from rmsnorm.torch_impl.private import apply_of, has_tangents, is_differentiated, is_transformed, is_watched, untraced
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

_FEW: Final = 4  # calls that a layer keeps: lengths of prompts alternate with single tokens, say
Run: TypeAlias = Kept | Plain | operators.Node  # a call whose axes are in order, and what computes it
Known: TypeAlias = tuple[tuple[Any, Kept], ...]  # calls that a layer made, each with the attributes that it had then


class RMSNormFunction(torch.autograd.Function):
    """y of x, scale and bias; with ``others`` also h and 1 / rho, or None: every argument and result costs time."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor, scale: Tensor | None, bias: Tensor | None, *others: Any) -> Any:
        if not others and not has_tangents():
            y, _, inverse_rms = run.forward(True, x, None, scale, bias, None, None)
            ctx.known = run, bias, None
            ctx.save_for_backward(x.clone() if x.is_inference() else x, scale, inverse_rms)
            return y
        residual, mask, gate, return_inverse_rms = others or (None, None, None, False)
        y, h, inverse_rms = run.forward(True, x, residual, scale, bias, mask, gate)
        dtypes = None if residual is None else (x.dtype, residual.dtype)
        ctx.known = run, None if gate is not None else bias, dtypes  # without a gate only the bias's dtype counts
        if has_tangents():
            ctx.save_for_forward(x, residual, scale, bias, mask, gate)
        if not others:
            ctx.save_for_backward(_savable(x), scale, inverse_rms)
            return y
        more = None if gate is None else bias, mask, _savable(gate)
        ctx.save_for_backward(_savable(x if h is None else h), scale, *more, inverse_rms)
        ctx.set_materialize_grads(False)
        if not return_inverse_rms:
            return y, h, None
        ctx.mark_non_differentiable(inverse_rms)
        return y, h, inverse_rms

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None, _: Any = None) -> tuple[Any, ...]:
        run, bias, dtypes = ctx.known
        h, scale, *more, inverse_rms = ctx.saved_tensors
        is_plain = not (more or torch.is_grad_enabled() or has_tangents()) and isinstance(run, Kept)
        if is_plain and run.is_readable(dy):
            needed = ctx.needs_input_grad[1:]
            dx, dscale, dbias, _ = run.backward(needed, dy, None, h, scale, bias, None, None, inverse_rms)
            return None, dx if h.is_contiguous() else laid_out(dx, h), dscale, dbias
        gate_bias, mask, gate = more or (None, None, None)
        bias = bias if gate is None else gate_bias
        _, needs_x, needs_scale, needs_bias, *others = ctx.needs_input_grad
        needs_residual, _, needs_gate, _ = others or (False, False, False, False)
        needed = needs_x or needs_residual, needs_scale, needs_bias, needs_gate
        x, residual = dtypes or (h.dtype, None)
        gradients: Gradients = (dh, None, None, None)
        if dy is not None:
            one_dtype = residual is None or (residual is x and run.rows.x == run.rows.sum)
            gradients = _gradients(run, one_dtype, needed, dy, dh, h, scale, bias, mask, gate, inverse_rms)
        dx, dscale, dbias, dgate = (d if need else None for d, need in zip(gradients, needed, strict=True))
        results = None, _to(dx, x) if needs_x else None, dscale, dbias
        return (*results, _to(dx, residual) if needs_residual else None, None, dgate, None) if others else results

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _, dx, dscale, dbias, *others = tangents
        dresidual, _, dgate, _ = others or (None, None, None, None)
        call = ctx.known[0].rows
        x, residual, scale, bias, mask, gate = ctx.saved_tensors
        h = add(x, residual, call.x)
        terms = [term.double() for term in (dx, dresidual) if term is not None]
        dh = sum(terms) if terms else None
        dy = operations.tangents(call, h, scale, bias, mask, gate, dh, dscale, dbias, dgate)
        if not others:
            return dy
        if residual is None:
            return dy, None, None
        return dy, cast(torch.zeros_like(h, dtype=torch.float64) if dh is None else dh, call.x), None


_apply = apply_of(RMSNormFunction)


def _gradients(
    run: Run, one_dtype: bool, needed: tuple[bool, ...], dy: Tensor, dh: Tensor | None, h: Tensor,
    scale: Tensor | None, bias: Tensor | None, mask: Tensor | None, gate: Tensor | None, inverse_rms: Tensor,
) -> Gradients:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, which may be differentiated, traced or transformed.

    ``one_dtype``: that of the residual, if there is one, is that of x.
    """
    is_differentiable = is_differentiated(dy, dh, h, scale, gate)
    is_plain = one_dtype and not is_differentiable and not is_transformed()
    if isinstance(run, Kept) and is_plain and run.is_readable(dy, dh):
        dx, *others = run.backward(needed, dy, dh, h, scale, bias, mask, gate, inverse_rms)
    elif isinstance(run, operators.Node) or (
        one_dtype
        and run.rows.has_last_axes
        and is_watched()
        and operators.can_compute(run.rows, h, None, dy, dh, scale, mask, gate)
    ):
        arguments = run.arguments if isinstance(run, operators.Node) else operators.arguments_of(run.rows)
        dx, *others = operators.backward(arguments, dy, h, scale, bias, mask, inverse_rms, dh, gate)
    else:  # a second derivative goes through 1 / rho
        known = None if is_differentiable and is_differentiated(h, gate) else inverse_rms
        dx, *others = operations.gradients(run.rows, dy, h, scale, bias, mask, dh, gate, known)
    return laid_out(dx, h), *others


def compute(run: Kept | Plain, with_inverse_rms: bool, *tensors: Any) -> Results:
    """y, h and 1 / rho of x, residual, scale, bias, mask and gate, with derivatives if there may be any."""
    if not is_differentiated(*tensors):
        return run.forward(with_inverse_rms, *tensors)
    x, residual, scale, bias, mask, gate = tensors
    apply = _apply if isinstance(run, Kept) else RMSNormFunction.apply
    if residual is mask is gate is None and not with_inverse_rms:
        return apply(run, x, scale, bias), None, None
    results: Results = apply(run, x, scale, bias, residual, mask, gate, with_inverse_rms)
    return results


@untraced
def repeat(
    known: Known, attributes: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    gate: Tensor | None,
) -> Any:  # fmt: skip
    """y, or y and h, of a call that a layer made before, where nothing watches it; None if it is another one."""
    for then, kept in known:
        if kept.matches(x, residual, scale, bias, gate) and then == attributes:
            if residual is gate is None:  # written out, as in this case a microsecond counts
                if is_differentiated(x, scale, bias):
                    return _apply(kept, x, scale, bias)
                return kept.forward(False, x, None, scale, bias, None, None)[0]
            y, h, _ = compute(kept, False, x, residual, scale, bias, None, gate)
            return y if residual is None else (y, h)
    return None


def keep(layer: Any, attributes: Any, kept: Kept, x: Tensor) -> None:
    """Let a layer keep a call, so that ``repeat`` finds it. Threads may do so at once: a new tuple replaces the old."""
    known: Known = layer.__dict__.get("_kept", ())
    is_simple = kept.order is None and kept.rows.x == kept.rows.sum and x.is_contiguous()
    if is_simple and all(call is not kept or then != attributes for then, call in known):
        layer.__dict__["_kept"] = ((attributes, kept), *known[: _FEW - 1])


def _savable(x: Tensor | None) -> Tensor | None:
    """x, or a copy of what was made in inference mode, as a layer that is frozen makes it."""
    return x.clone() if x is not None and x.is_inference() else x


def _forward_of_operator(x: Tensor, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any, *text: Any) -> Any:
    run = operators.Node(text, x.shape, dtype_name(x.dtype))
    return operators.present(x, *RMSNormFunction.apply(run, x, scale, bias, residual, mask, gate, True))


operators.register(_forward_of_operator)


def _to(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else cast(gradient, dtype_name(dtype))
