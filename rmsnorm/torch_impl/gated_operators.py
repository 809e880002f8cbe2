"""The kernels for norms in groups, with a gate or not, as operators of PyTorch: a node each in compiled programs.

    rmsnorm::gated_forward     y, 1 / rho
    rmsnorm::gated_backward    dx, dscale, dgate

They compute what gate.py plans, on the CPU. Without groups a compiler does better: it joins the gate with what is
beside it, and calls the norm's own kernel. dscale without a gain, or dgate without a gate, is a tensor of no
elements, as a schema has no optional results. Derivatives of the gradients, tangents and batches are those of plain
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from rmsnorm import cpu
from rmsnorm.call import Call, Roundings
from rmsnorm.torch_impl import gate as gates
from rmsnorm.torch_impl.dynamo import untraced
from rmsnorm.torch_impl.operators import (
    LIBRARY,
    TYPES,
    call_of,
    decoded,
    differentiated,
    dtype_of,
    present,
    settings_of,
)
from rmsnorm.torch_impl.rounding import dtype_name
from rmsnorm.torch_impl.rows import CPU

LIBRARY.define(
    "gated_forward(Tensor x, Tensor? scale, Tensor? gate, str settings) -> (Tensor y, Tensor inverse_rms)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "gated_backward(Tensor dy, Tensor x, Tensor? scale, Tensor? gate, str settings) "
    "-> (Tensor dx, Tensor dscale, Tensor dgate)",
    tags=torch.Tag.pt2_compliant_tag,
)
FORWARD: Final = torch.ops.rmsnorm.gated_forward.default
BACKWARD: Final = torch.ops.rmsnorm.gated_backward.default


def serve(call: Call, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None) -> bool:
    """Whether the operators can compute a call with these tensors. torch.func takes plain operations, which nest."""
    tensors = [t for t in (x, scale, gate) if t is not None]
    return (
        call.axes != call.feature_axes
        and bias is None
        and all(type(t) in TYPES and t.layout is torch.strided and t.is_cpu for t in tensors)
        and not torch._C._are_functorch_transforms_active()
        and cpu.supports_gated(call, None if gate is None else dtype_name(gate.dtype))
    )


def forward(call: Call, x: Tensor, scale: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """y, and 1 / rho in float64."""
    y, inverse_rms = FORWARD(x, scale, gate, settings_of(call)[0])
    return y, inverse_rms


def gradients(
    call: Call, dy: Tensor, x: Tensor, scale: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dscale and dgate."""
    dx, dscale, dgate = BACKWARD(dy, x, scale, gate, settings_of(call)[0])
    return dx, None if scale is None else dscale, None if gate is None else dgate


@lru_cache(maxsize=4096)
def _planned(
    shape: Any, x: torch.dtype, scale: torch.dtype | None, gate: torch.dtype | None, settings: str
) -> tuple[Call, Any]:
    call = call_of(shape, x, settings, None)
    return call, gates.plan(CPU, call, scale and dtype_name(scale), None, gate and dtype_name(gate))


@untraced
def run_forward(x: Tensor, scale: Tensor | None, gate: Tensor | None, settings: str) -> tuple[Tensor, Tensor]:
    call, plan = _planned(x.shape, x.dtype, dtype_of(scale), dtype_of(gate), settings)
    if plan is None:  # no rows, or a program from a process with kernels in one without
        return _plain_forward(x, scale, gate, settings)
    y, inverse_rms = gates.forward(call, plan, x, scale, gate, with_inverse_rms=True)
    assert inverse_rms is not None  # noqa: S101
    return y, inverse_rms


@untraced
def run_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, gate: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    call, _ = _planned(x.shape, x.dtype, dtype_of(scale), dtype_of(gate), settings)
    results = gates.gradients(call, dy, x, scale, gate)
    if results is None:  # likewise, or dy in float64
        return _plain_backward(dy, x, scale, gate, settings)
    return present(x, *results)


def _forward_types(x: Tensor, scale: Any, gate: Any, settings: str) -> tuple[Tensor, Tensor]:
    fields = decoded(settings)
    reduced = [*x.shape[: -fields["axes"]], *(1 for _ in range(fields["axes"]))]
    return torch.empty_like(x, dtype=getattr(torch, fields["result"])), x.new_empty(reduced, dtype=torch.float64)


def _backward_types(
    dy: Tensor, x: Tensor, scale: Tensor | None, gate: Tensor | None, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    dscale = None if scale is None else torch.empty_like(scale, memory_format=torch.contiguous_format)
    return present(x, torch.empty_like(x), dscale, None if gate is None else torch.empty_like(gate))


_PLAIN: Final[dict[str, Callable[..., Any]]] = {}  # functions that take plain operations under torch.func


def _plain_forward(x: Any, scale: Any, gate: Any, settings: str) -> tuple[Tensor, Tensor]:
    y, inverse_rms = _PLAIN["rms_norm"](x, scale, gate=gate, return_inverse_rms=True, **_options(x, settings))
    return y, inverse_rms.double()


def _plain_backward(dy: Any, x: Any, scale: Any, gate: Any, settings: str) -> Any:
    dx, dscale, _, *dgate = _PLAIN["rms_norm_vjp"](dy, x, scale, gate=gate, **_options(x, settings))
    return present(x, dx, dscale, *(dgate or (None,)))


def _options(x: Tensor, settings: str) -> dict[str, Any]:
    call = call_of(x.shape, x.dtype, settings, None)
    return {
        "variant": call.variant, "eps": call.eps, "axis": call.axes, "feature_axis": call.feature_axes,
        "out_dtype": Roundings(call.norm, call.product, call.result),
    }  # fmt: skip


def _of_present(function: Callable[..., Any], *tensors: Tensor | None) -> tuple[Callable[..., Any], list[Tensor]]:
    """The function of the tensors that are not None, and these."""

    def own(*primals: Tensor) -> Any:
        rest = iter(primals)
        return function(*(None if t is None else next(rest) for t in tensors))

    return own, [t for t in tensors if t is not None]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return FORWARD(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 4
        x, scale, gate = ctx.saved_tensors
        dx, dscale, dgate = BACKWARD(dy, x, scale, gate, ctx.settings)
        return dx, None if scale is None else dscale, None if gate is None else dgate, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (dy,) = _push_forward(lambda x, scale, gate: _plain_forward(x, scale, gate, ctx.settings)[:1], ctx, tangents)
        return dy, None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return BACKWARD(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(d for d, t in zip(output, tensors[1:], strict=True) if t is None))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        function, primals = _of_present(partial(_plain_backward, settings=ctx.settings), *ctx.saved_tensors)
        _, pull_back = torch.func.vjp(function, *primals)
        rest = iter(pull_back(cotangents))
        return *(None if t is None else next(rest) for t in ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = _push_forward(partial(_plain_backward, settings=ctx.settings), ctx, tangents)
        return tuple(None if t is None else d for d, t in zip(moved, ctx.saved_tensors[1:], strict=True))


def _push_forward(function: Callable[..., Any], ctx: Any, tangents: Any) -> Any:
    """The derivative of a function of the saved tensors along tangents, by its transpose, which is linear."""
    own, primals = _of_present(function, *ctx.saved_tensors)
    moves = [None if t is None else torch.zeros_like(t) if d is None else d
             for t, d in zip(ctx.saved_tensors, tangents, strict=False)]  # fmt: skip
    results, pull_back = torch.func.vjp(own, *primals)
    _, push_forward = torch.func.vjp(pull_back, tuple(map(torch.zeros_like, results)))
    (moved,) = push_forward(tuple(move for move in moves if move is not None))
    return moved


def _batched(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Element by element: a batch of whole calls is rare, and each may have a gain of its own."""

    def run(info: Any, in_dims: Any, *arguments: Any) -> Any:
        pairs = list(zip(arguments, in_dims, strict=True))
        results = [
            operator(*(a if dim is None else a.select(dim, i) for a, dim in pairs)) for i in range(info.batch_size)
        ]
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    return run


def register(rms_norm: Callable[..., Any], rms_norm_vjp: Callable[..., Any]) -> None:
    """Give the operators their kernels, and these functions for derivatives of gradients, and for tangents."""
    _PLAIN.update(rms_norm=rms_norm, rms_norm_vjp=rms_norm_vjp)
    for name, operator, run, types, function, plain in (
        ("gated_forward", FORWARD, run_forward, _forward_types, _Forward, _plain_forward),
        ("gated_backward", BACKWARD, run_backward, _backward_types, _Backward, _plain_backward),
    ):
        LIBRARY.impl(name, run, "CPU")
        LIBRARY.impl(name, differentiated(function, plain, run), "Autograd")
        torch.library.register_fake(f"rmsnorm::{name}", types, lib=LIBRARY)
        torch.library.register_vmap(f"rmsnorm::{name}", _batched(operator), lib=LIBRARY)
