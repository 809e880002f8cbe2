"""RMSNorm with its derivatives, by a kernel or by recipe.py: one function of PyTorch's autograd.

    dx = R^T u,    u = (o + scale) * dy,    dscale = sum over rows of dy * h / rho,    dbias = sum over rows of dy

A call keeps its arguments, x + residual in place of these two, and a number or two a row. A second derivative is that
of the operations of recipe.backward, through 1 / rho. In forward mode, whose tangents go through operations, recipe.py
computes the call. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rmsnorm import recipe
from rmsnorm.engines import Prepared
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import space
from rmsnorm.torch_impl.kernels import Kept, Results
from rmsnorm.torch_impl.memory import laid_out
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
    """y, x + residual (None without one), and what the backward pass needs of every row.

    ``run`` is a Call, which recipe.py computes, or a Kept, which kernels compute, without a mask and a gate.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Kept | Call, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Any:
        if isinstance(run, Kept):
            return *run.forward(True, x, residual, scale, bias), None, None
        y, total, row = recipe.forward(space, run, x, residual, scale, bias, mask, gate)
        return y, total, row.inverse, row.power, row.slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        run, x, residual, *others = inputs
        _, total, *row = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in row if t is not None))
        ctx.known = run, None if residual is None else (x.dtype, residual.dtype)
        call = run.call if isinstance(run, Kept) else run
        h = (x, residual) if residual is None or call.exact_sum else (total, None)
        ctx.save_for_backward(*map(_savable, (*h, *others)), *row)

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, *_: Any) -> tuple[Any, ...]:
        run, dtypes = ctx.known
        x, residual, scale, bias, mask, gate, *row = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, dscale, dbias, dgate = dh, None, None, None
        if dy is not None:
            is_differentiable = torch.is_grad_enabled() or has_tangents()
            if isinstance(run, Kept) and not is_differentiable and run.is_readable(dy, dh):
                needed = needs[1] or needs[2], needs[3], needs[4]
                dx, dscale, dbias = run.backward(needed, dy, dh, x, scale, bias, row[0])
            else:
                is_kept = not is_differentiable and not isinstance(run, Kept)
                known = recipe.Row(*row, None, None, None) if is_kept else None
                call = run.call if isinstance(run, Kept) else run
                tensors = x, residual, scale, bias, mask, gate
                dx, dscale, dbias, dgate = recipe.backward(space, call, dy, dh, *tensors, known)
            dx = laid_out(dx, x)
        of_x, of_residual = dtypes or (x.dtype, None)
        dresidual = dx.to(of_residual) if needs[2] and dx is not None else None
        dx = dx.to(of_x) if needs[1] and dx is not None else None
        return None, dx, dresidual, dscale, dbias, None, dgate


_apply = apply_of(Norm)


def by_kernel(kept: Kept, with_inverse_rms: bool, *tensors: Any) -> Results:
    """y, x + residual and 1 / rho of x, residual, scale and bias, with derivatives if there may be any.

    The second and the third may be None where they are not there or not asked for.
    """
    if not is_differentiated(*tensors):
        return kept.forward(with_inverse_rms, *tensors)
    y, h, inverse_rms, *_ = _apply(kept, *tensors, None, None)
    return y, h, inverse_rms


def by_recipe(call: Call, *tensors: Any) -> Results:
    """The same of x, residual, scale, bias, mask and gate."""
    is_plain = has_tangents() or is_exported() or is_exporting()  # operations, which something else differentiates
    if is_plain or not (is_in_transform() or is_differentiated(*tensors)):
        y, h, row = recipe.forward(space, call, *tensors)
    else:
        y, h, *numbers = Norm.apply(call, *tensors)
        row = recipe.Row(*numbers, None, None, None)
    return y, h, recipe.inverse_rms(space, call, row)


@untraced
def repeat(known: Known, attributes: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """y of a call that a layer made before, where nothing watches it; None if it is another one."""
    for then, kept in known:
        if kept.matches(x, scale, bias) and then == attributes:
            if is_differentiated(x, scale, bias):  # as in ``by_kernel``; here a microsecond counts
                y: Tensor = _apply(kept, x, None, scale, bias, None, None)[0]
                return y
            return kept.forward(False, x, None, scale, bias)[0]
    return None


def keep(
    layer: Any, attributes: Any, kept: Kept, prepared: Prepared, x: Tensor, scale: Tensor | None, bias: Tensor | None
) -> None:
    """Let a layer keep a call, so that ``repeat`` finds it. Threads may do so at once: a new tuple replaces the old."""
    arrays = tuple(None if t is None else (t.shape, t.dtype) for t in (x, scale, bias))
    known: Known = layer.__dict__.get("_kept", ())
    if x.is_contiguous() and all(call.arrays != arrays or then != attributes for then, call in known):
        layer.__dict__["_kept"] = ((attributes, kept._replace(arrays=arrays)), *known[: _FEW - 1])


def _savable(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of what was made in inference mode, as a layer that is frozen makes it."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor
