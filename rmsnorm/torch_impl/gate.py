"""The factor f(z) of a gate z and its derivative, in the dtype of the product with the gate.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

And by one kernel the norm with its gate, or in groups, for rows in the memory of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from rmsnorm import cpu
from rmsnorm.call import Call
from rmsnorm.cpu.memory import advise
from rmsnorm.torch_impl import onnx
from rmsnorm.torch_impl.memory import gapless, is_plain, laid_out, rows_of
from rmsnorm.torch_impl.rounding import dtype_name, is_watched
from rmsnorm.torch_impl.rows import CPU, openmp_threads


def factor(call: Call, gate: Tensor) -> Tensor:
    z = gate.to(getattr(torch, str(call.gate)))
    if onnx.is_exported():
        return z * onnx.sigmoid(z) if call.variant.gate_function == "silu" else onnx.sigmoid(z)
    return functional.silu(z) if call.variant.gate_function == "silu" else z.sigmoid()


def slope(call: Call, gate: Tensor) -> Tensor:
    z = gate.to(getattr(torch, str(call.gate)))
    below = (-z).sigmoid()
    return z.sigmoid() * (1 + z * below if call.variant.gate_function == "silu" else below)


@lru_cache(maxsize=4096)
def plan(device: torch.device, call: Call, scale: str | None, bias: object, gate: str | None) -> Any:
    """What the kernels need for a call with a gain and a gate of these dtypes; None if they cannot compute it."""
    if device.type != "cpu" or bias is not None or not cpu.supports_gated(call, gate):
        return None
    from rmsnorm.cpu import launch

    return launch.gated_plan(call, gate, scale)


def is_served(*tensors: Tensor | None) -> bool:
    """Whether the kernels may read the tensors, and nothing sees the operations."""
    return not is_watched() and forward_ad._current_level < 0 and is_plain(*tensors)


def forward(
    call: Call, plan: Any, x: Tensor, scale: Tensor | None, gate: Tensor | None, with_inverse_rms: bool
) -> tuple[Tensor, Tensor | None]:
    """y and, if asked for, 1 / rho in float64."""
    y = torch.empty(*x.shape, dtype=getattr(torch, call.result), device=CPU)
    inverse_rms = torch.empty(*plan.reduced, dtype=torch.float64, device=CPU) if with_inverse_rms else None
    matrix, gain = rows_of(x, plan.n), gapless(scale)
    gates, gate_step = _gates(gate, plan.n)
    if plan.large:
        advise(y.data_ptr(), y.nbytes)
    plan.run_forward(
        openmp_threads, (matrix, gates, gain, y, inverse_rms),
        matrix.data_ptr(), matrix.stride(0) * x.element_size(), _address(gates), _address(gain), 0,
        0, gate_step, 0, y.data_ptr(), 0, _address(inverse_rms),
    )  # fmt: skip
    return y if x.is_contiguous() else laid_out(y, x), inverse_rms


def gradients(
    call: Call, dy: Tensor, x: Tensor, scale: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """dx, dscale and dgate, without a forward pass before; None if the kernels cannot compute them."""
    gain = None if scale is None else dtype_name(scale.dtype)
    z = None if gate is None else dtype_name(gate.dtype)
    own = plan(CPU, replace(call, result=dtype_name(dy.dtype)), gain, None, z)
    if own is None:
        return None
    dx = torch.empty(*x.shape, dtype=x.dtype, device=CPU)
    dgate = None if gate is None else torch.empty(*x.shape, dtype=gate.dtype, device=CPU)
    dscale = None if scale is None else torch.empty(*scale.shape, dtype=scale.dtype, device=CPU)
    matrix, gains, dy = rows_of(x, own.n), gapless(scale), dy.contiguous()
    gates, gate_step = _gates(gate, own.n)
    for result in (dx, dgate) if own.large else ():
        if result is not None:
            advise(result.data_ptr(), result.nbytes)
    own.run_backward(
        openmp_threads, (matrix, gates, gains, dy, dx, dgate, dscale),
        matrix.data_ptr(), matrix.stride(0) * x.element_size(), _address(gains),
        _address(gates), gate_step, 0,
        0, dy.data_ptr(), _address(dgate), dx.data_ptr(), _address(dscale), 0,
    )  # fmt: skip
    if gate is not None and dgate is not None and not gate.is_contiguous():
        dgate = laid_out(dgate, gate)
    return dx if x.is_contiguous() else laid_out(dx, x), dscale, dgate


def _gates(gate: Tensor | None, n: int) -> tuple[Tensor | None, int]:
    """The gate in rows of n, and the bytes from one to the next."""
    if gate is None:
        return None, 0
    gates = rows_of(gate, n)
    return gates, gates.stride(0) * gates.element_size()


class GatedFunction(torch.autograd.Function):
    """The kernels for PyTorch's autograd. What is kept is x, the gain and the gate, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Any, vjp: Callable[..., Any], return_inverse_rms: bool, x: Tensor,
        scale: Tensor | None, gate: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        y, inverse_rms = forward(call, plan, x, scale, gate, return_inverse_rms)
        ctx.call, ctx.vjp = call, vjp
        ctx.save_for_backward(x, scale, gate)
        ctx.set_materialize_grads(False)
        if inverse_rms is not None:
            ctx.mark_non_differentiable(inverse_rms)
        return y, inverse_rms

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 7
        x, scale, gate = ctx.saved_tensors
        dx, dscale, _, *dgate = ctx.vjp(ctx.call, dy, x, scale, None, gate)
        return None, None, None, None, dx, dscale, *(dgate or (None,))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
