"""The kernels as operators of PyTorch: one node each in a program that is compiled, exported or otherwise traced.

    rmsnorm::forward    y, h = x + residual, 1 / rho
    rmsnorm::backward   dx + dh, dscale, dbias, dgate

They compute where the last axes are normalised. A result that is not there (h without a residual, the
gradient of a parameter that is None) is a tensor of no elements, as a schema has no optional results. Derivatives of
the gradients, tangents and batches of parameters are those of the plain operations of operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from rmsnorm import cpu, gpu
from rmsnorm.cpu.prepared import axes_last
from rmsnorm.specification.call import Call, fields_of, text_of
from rmsnorm.torch_impl import gpu as gpu_rows
from rmsnorm.torch_impl import inductor, kernels, operations, private
from rmsnorm.torch_impl.memory import is_plain, laid_out, moved, moved_back
from rmsnorm.torch_impl.private import constant, is_differentiated, untraced
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

TYPES: Final = (Tensor, Parameter, *private.TRACED)  # others, a DTensor say, do not know the operators

LIBRARY: Final = torch.library.Library("rmsnorm", "DEF")
LIBRARY.define(
    "forward(Tensor x, Tensor? residual, Tensor? scale, Tensor? bias, Tensor? mask, Tensor? gate, "
    "str text, SymInt? k) -> (Tensor y, Tensor h, Tensor inverse_rms)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "backward(Tensor dy, Tensor? dh, Tensor h, Tensor inverse_rms, Tensor? scale, Tensor? bias, Tensor? mask, "
    "Tensor? gate, str text, SymInt? k) -> (Tensor dx, Tensor dscale, Tensor dbias, Tensor dgate)",
    tags=torch.Tag.pt2_compliant_tag,
)
_forward, _backward = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
inductor.prepare(_forward, _backward)
constant(text_of)
_has_kernels, _is_usable = constant(lambda: cpu.is_available()), constant(gpu_rows.is_usable)


def can_compute(call: Call, x: Tensor | None, residual: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the operators can compute a call on these tensors, once its axes are in order."""
    present = [t for t in (x, residual, *others) if t is not None]
    rows = axes_last(call)
    if (
        private.below_autograd is None
        or (not private.nests_operators and private.is_in_transform())
        or call.x != call.sum
        or not (rows.has_last_axes and rows.has_neighbours)
        or not all(type(t) in TYPES and t.layout is torch.strided for t in present)
        or (residual is not None and x is not None and residual.dtype != x.dtype)
    ):
        return False
    if all(t.is_cpu for t in present):
        return _has_kernels()
    formats = (dtype_name(t.dtype) for t in present if t.dtype != torch.bool)
    is_on_gpu = call.gate is None and all(t.is_cuda for t in present)
    return is_on_gpu and gpu.supports(rows, *formats) and _is_usable(present[0].device)


def forward(
    call: Call, plan: Any, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, mask: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """y, h = x + residual (None without one) and 1 / rho in float64."""
    x, residual, mask, gate = moved(call, x, residual, mask, gate)
    y, h, inverse_rms = _forward(x, residual, scale, bias, mask, gate, *_arguments(axes_last(call)))
    y, h, inverse_rms = moved_back(call, y, None if residual is None else h, inverse_rms)
    return y, h, inverse_rms


def backward(
    call: Call, dy: Tensor, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    inverse_rms: Tensor, dh: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh in T; dscale, dbias and dgate in the dtypes of the parameters and the gate."""
    dx, *others = _backward(dy, dh, h, inverse_rms, scale, bias, mask, gate, *_arguments(call))
    dscale, dbias, dgate = (None if p is None else d for p, d in zip((scale, bias, gate), others, strict=True))
    return dx, dscale, dbias, dgate


def _arguments(call: Call) -> tuple[str, Any]:
    """The arguments of the operators beside the tensors: the text of a call, and k if it is not n.

    Every argument takes half a microsecond, so most are one text.
    """
    return call.text, None if call.variant.partial is None else call.k


def call_of(x: Tensor, text: str, k: Any) -> Call:
    """The call with these arguments, on tensors like x."""
    return Call.from_text(text, x.shape, dtype_name(x.dtype), k)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@untraced
def _run_forward(
    x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    gate: Tensor | None, *text: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call, plan = kernels.planned(x.device, x.shape, x.dtype, *map(dtype_of, (scale, bias, gate)), *text)
    y, h, inverse_rms = kernels.forward(call, plan, True, x, residual, scale, bias, mask, gate)
    return y, x.new_empty(0) if h is None else h, inverse_rms


@untraced
def _run_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, inverse_rms: Tensor, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None, *text: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call, plan = kernels.planned(h.device, h.shape, h.dtype, *map(dtype_of, (scale, bias, gate)), *text)
    results = kernels.backward(call, plan, dy, h, scale, bias, mask, inverse_rms, dh, gate)
    return present(h, *results)


def present(like: Tensor, *tensors: Tensor | None) -> Any:
    """The tensors, with one of no elements where there is none."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def in_order(like: Tensor, *tensors: Tensor | None) -> Any:
    """As ``present``, with the strides that ``_forward_types`` and ``_backward_types`` say."""
    return tuple(tensor.contiguous() for tensor in present(like, *tensors))


def _forward_types(
    x: Tensor, residual: Tensor | None, scale: Any, bias: Any, mask: Any, gate: Any, text: str, k: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inductor.register()
    private.decompose_in_exports(_forward, _plain_forward)
    fields = fields_of(text)
    axes, result = fields["axes"], getattr(torch, fields["result"])
    reduced = [*x.shape[:-axes], *(1 for _ in range(axes))]
    y, inverse_rms = x.new_empty(x.shape, dtype=result), x.new_empty(reduced, dtype=torch.float64)
    return y, x.new_empty(0) if residual is None else x.new_empty(x.shape), inverse_rms


def _backward_types(
    dy: Tensor, dh: Any, h: Tensor, inverse_rms: Any, scale: Tensor | None, bias: Tensor | None, mask: Any,
    gate: Tensor | None, text: str, k: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    private.decompose_in_exports(_backward, _plain_backward)
    results: tuple[Tensor, ...] = present(
        h, *(None if p is None else p.new_empty(p.shape) for p in (h, scale, bias, gate))
    )
    return results


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        with private.below_autograd():
            return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, residual, scale, bias, mask, gate, *ctx.text = inputs
        _, h, inverse_rms = output
        ctx.save_for_backward(x if residual is None else h, scale, bias, mask, gate, inverse_rms)
        ctx.save_for_forward(x, residual, scale, bias, mask, gate)
        ctx.mark_non_differentiable(*((h, inverse_rms) if residual is None else (inverse_rms,)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
        h, scale, bias, mask, gate, inverse_rms = ctx.saved_tensors
        dx, dscale, dbias, dgate = dh, None, None, None
        if dy is not None:
            dx, dscale, dbias, dgate = _backward(dy, dh, h, inverse_rms, scale, bias, mask, gate, *ctx.text)
            dx = laid_out(dx, h)
        _, needs_residual, needs_scale, needs_bias, _, needs_gate, *rest = ctx.needs_input_grad
        return (
            dx, dx if needs_residual else None, dscale if needs_scale else None, dbias if needs_bias else None, None,
            laid_out(dgate, gate) if needs_gate else None, *(None for _ in rest),
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, dx: Any, dresidual: Any, dscale: Any, dbias: Any, _: Any, dgate: Any, *__: Any) -> Any:
        x, *others = ctx.saved_tensors
        call = call_of(x, *ctx.text)
        return *tangents(call, (x, *others), (dx, dresidual, dscale, dbias, dgate)), None


def tangents(call: Call, tensors: Sequence[Any], moves: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Those of y and of h = x + residual, None without one, in their dtypes.

    ``tensors`` are x, residual, scale, bias, mask and gate; ``moves`` are the tangents of all but the mask.
    """
    x, residual, scale, bias, mask, gate = tensors
    dx, dresidual, dscale, dbias, dgate = moves
    h = add(x, residual, call.x)
    terms = [term.double() for term in (dx, dresidual) if term is not None]
    dh = sum(terms) if terms else None
    dy = operations.tangents(call, h, scale, bias, mask, gate, dh, dscale, dbias, dgate)
    if residual is None:
        return dy, None
    return dy, cast(torch.zeros_like(h, dtype=torch.float64) if dh is None else dh, call.x)


class _Backward(torch.autograd.Function):
    """Its derivatives are those of the plain operations, which also go through 1 / rho."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        with private.below_autograd():
            return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dy, dh, h, _, scale, bias, mask, gate, *ctx.text = inputs
        ctx.save_for_backward(dy, dh, h, scale, bias, mask, gate)
        ctx.save_for_forward(dy, dh, h, scale, bias, mask, gate)
        _, *others = output
        pairs = zip(others, (scale, bias, gate), strict=True)
        ctx.mark_non_differentiable(*(result for result, primal in pairs if primal is None))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        function, primals, found = _plain(ctx)
        _, pull_back = torch.func.vjp(function, *primals)
        rest = iter(pull_back(cotangents))
        ddy, ddh, dx, dscale, dbias, dgate = (next(rest) if is_there else None for is_there in found)
        return ddy, ddh, dx, None, dscale, dbias, None, dgate, *(None for _ in ctx.text)

    @staticmethod
    def jvp(
        ctx: Any, ddy: Any, ddh: Any, dx: Any, _: Any, dscale: Any, dbias: Any, __: Any, dgate: Any, *___: Any
    ) -> Any:
        function, primals, found = _plain(ctx)
        moves = (t for t, is_there in zip((ddy, ddh, dx, dscale, dbias, dgate), found, strict=True) if is_there)
        tangents = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, moves, strict=True))
        results, pull_back = torch.func.vjp(function, *primals)
        _, push_forward = torch.func.vjp(pull_back, tuple(map(torch.zeros_like, results)))  # which is linear
        (moved,) = push_forward(tangents)
        _, _, _, *parameters = found
        return tuple(t if is_there else None for t, is_there in zip(moved, (True, *parameters), strict=True))


def _plain(ctx: Any) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[bool, ...]]:
    """The gradients as a function of those of dy, dh, h, scale, bias and gate that are there; these; which they are."""
    *tensors, mask, gate = ctx.saved_tensors
    every = *tensors, gate

    def gradients(*primals: Tensor) -> Any:
        rest = iter(primals)
        v, vh, x, g, b, z = (None if p is None else next(rest) for p in every)
        return _plain_backward(v, vh, x, None, g, b, mask, z, *ctx.text)

    return gradients, tuple(p for p in every if p is not None), tuple(p is not None for p in every)


def differentiated(function: Any, plain: Callable[..., Any], run_on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator for autograd; plain operations under torch.func, as a Function does not nest there."""

    @untraced
    def run(*arguments: Any) -> Any:
        if private.is_in_transform():
            return plain(*arguments)
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        if is_differentiated(*tensors):
            return function.apply(*arguments)
        if is_plain(*tensors):
            return run_on_cpu(*arguments)  # the dispatcher would take as long as a small kernel
        return function.forward(*arguments)

    return run


def _plain_forward(x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any, *text: Any) -> Any:
    call = call_of(x, *text)
    h = add(x, residual, call.x)
    y, inverse_rms = operations.forward(call, h, scale, bias, mask, gate)
    return in_order(x, y, None if residual is None else h, inverse_rms.detach())


def _plain_backward(
    dy: Any, dh: Any, h: Any, inverse_rms: Any, scale: Any, bias: Any, mask: Any, gate: Any, *text: Any
) -> Any:
    call = call_of(h, *text)
    dx, *others = operations.gradients(call, dy, h, scale, bias, mask, dh, gate)
    return in_order(h, cast(dx, call.x), *others)


def _batched_forward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """More rows; plain operations where a parameter is batched, too."""
    x, residual, scale, bias, mask, gate, *text = arguments
    dims = (*in_dims[:4], in_dims[5])
    x, residual, scale, bias, gate = _with_batches(info, dims, x, residual, scale, bias, gate)
    mask = _mask_first(mask, in_dims[4], x)
    if in_dims[2] is None and in_dims[3] is None:
        _, _, scale, bias, *_ = arguments
        return _forward(x, residual, scale, bias, mask, gate, *text), (0, None if residual is None else 0, 0)
    call = _call_on_batch(x, text)
    h = add(x, residual, call.x)
    y, inverse_rms = operations.forward(call, h, scale, bias, mask, gate)
    return present(x, y, None if residual is None else h, inverse_rms), (0, None if residual is None else 0, 0)


def _batched_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """More rows; plain operations where a parameter has gradients, which each element of the batch has of its own."""
    dy, dh, h, inverse_rms, scale, bias, mask, gate, *text = arguments
    dims = (*in_dims[:6], in_dims[7])
    dy, dh, h, inverse_rms, scale, bias, gate = _with_batches(info, dims, dy, dh, h, inverse_rms, scale, bias, gate)
    mask, batched = _mask_first(mask, in_dims[6], h), (0, *(None if t is None else 0 for t in (scale, bias, gate)))
    if scale is None and bias is None:
        return _backward(dy, dh, h, inverse_rms, None, None, mask, gate, *text), batched
    call = _call_on_batch(h, text)
    # an outer derivative goes through 1 / rho
    dx, *others = operations.gradients(call, dy, h, scale, bias, mask, dh, gate)
    return in_order(h, cast(dx, call.x), *others), batched


def _with_batches(info: Any, in_dims: Any, *tensors: Tensor | None) -> list[Any]:
    """The tensors with the batch as their first axis."""
    return [
        None if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def _call_on_batch(x: Tensor, text: Any) -> Call:
    """The call on a batch in which each element has parameters of its own."""
    call = call_of(x, *text)
    return replace(call, feature_axes=(0, *call.feature_axes))


def _mask_first(mask: Tensor | None, dim: int | None, x: Any) -> Tensor | None:
    """The mask with the batch first if it has one, and then as many axes as x has."""
    if mask is None or dim is None:
        return mask
    mask = mask.movedim(dim, 0)
    return mask.reshape(mask.shape[0], *(1 for _ in range(x.ndim - mask.ndim)), *mask.shape[1:])


for _name, _run, _types, _function, _plain_operations, _batched in (
    ("forward", _run_forward, _forward_types, _Forward, _plain_forward, _batched_forward),
    ("backward", _run_backward, _backward_types, _Backward, _plain_backward, _batched_backward),
):
    LIBRARY.impl(_name, _run, "CPU")
    LIBRARY.impl(_name, _run, "CUDA")
    LIBRARY.impl(_name, differentiated(_function, _plain_operations, _run), "Autograd")
    torch.library.register_fake(f"rmsnorm::{_name}", _types, lib=LIBRARY)
    torch.library.register_vmap(f"rmsnorm::{_name}", _batched, lib=LIBRARY)
