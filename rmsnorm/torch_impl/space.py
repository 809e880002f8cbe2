"""What recipe.py has of an array library, in PyTorch: the operations by the names that it uses."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm import recipe
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl.private import has_tangents, is_exported, is_exporting

is_spread: Final = False  # a DTensor's own operations add up over its devices
NAMES: Final = {getattr(torch, name): name for name in (*dtypes.FLOATS, "bool")}

where, reshape, broadcast_to, ones_like = torch.where, torch.reshape, torch.broadcast_to, torch.ones_like
sqrt, reciprocal, root = torch.sqrt, torch.reciprocal, recipe.root


def dtype_name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def name_of(a: Tensor) -> str:
    return dtype_name(a.dtype)


def shape(a: Tensor) -> torch.Size:
    return a.shape


def complete(a: Tensor) -> Tensor:
    """A DTensor with the sum over its devices done where that is pending, as it must be before anything nonlinear."""
    if type(a) is Tensor or not any(placement.is_partial() for placement in getattr(a, "placements", ())):
        return a
    from torch.distributed.tensor import Replicate

    return a.redistribute(placements=[Replicate() if p.is_partial() else p for p in a.placements])


def cast(a: Tensor, name: str) -> Tensor:
    return complete(a).to(getattr(torch, name))


def constant(a: Tensor) -> Tensor:
    return a.detach()


def _are_differentiated() -> bool:
    """Whether something may differentiate these operations, which in an exported program does so by its own means."""
    return has_tangents() or (torch.is_grad_enabled() and not is_exported() and not is_exporting())


def rsqrt(a: Tensor) -> Tensor:
    """PyTorch's own has the third power of it in its derivative, which leaves the range."""
    return 1 / torch.sqrt(a)


def rounded(a: Tensor, name: str) -> Tensor:
    """The digits of a dtype. Where something may differentiate it, the identity to every derivative."""
    is_written_out = torch.compiler.is_compiling() and a.dtype == torch.float32 and name in dtypes.HALF
    if is_written_out and not is_exported():
        value = _rounded_by_sums(a, name)
    else:
        value = cast(cast(a, name), name_of(a))
    return with_derivatives_of(a, value) if _are_differentiated() else value


def with_derivatives_of(smooth: Tensor, value: Tensor) -> Tensor:
    """The value, with the derivatives of another one, which is the same where it is not finite."""
    zero = smooth.detach() - smooth  # +0, so that less it a zero keeps its sign
    return torch.where(smooth.isfinite(), value.detach() - zero, smooth)


def _rounded_by_sums(a: Tensor, name: str) -> Tensor:
    """A float32 rounded to 16 bits without a cast, as Inductor leaves out casts to 16 bits and back.

    Source: Veltkamp's splitting, Dekker 1971; the factor is 2^s + 1 for s digits that go. The sums are written so that
    no fused operation changes them. In bfloat16 a number above 2^111, which only a gain as large makes, becomes NaN.
    """
    c = a * (2.0**16 if name == "bfloat16" else 2.0**13) + a
    near = c - (c - a)
    if name == "bfloat16":
        return near
    near = torch.where(a.abs() < 2.0**-14, (a + 0.75) - 0.75, near)  # subnormal: to a multiple of 2^-24
    return torch.where(a.abs() < 65520, near, a * torch.inf)


def sum(a: Tensor, axes: Any) -> Tensor:
    return complete(a.sum(axes, keepdim=True))


def mean(a: Tensor, axes: Any) -> Tensor:
    if hasattr(a, "placements"):  # whose mean over a spread axis gathers all of it
        return sum(a, axes) / math.prod(a.shape[axis] for axis in axes)
    return a.mean(axes, keepdim=True)


def max(a: Tensor, axes: Any) -> Tensor:
    """Of numbers >= 0: 0 over axes without elements. Of a DTensor the sum, near enough: a shard may be empty."""
    has_elements = not hasattr(a, "placements") and all(a.shape[axis] for axis in axes)
    return complete(a.amax(axes, keepdim=True) if has_elements else a.sum(axes, keepdim=True))


def over(a: Tensor, axes: Any) -> Tensor:
    return a.sum(axes) if axes else a


def maximum(a: Tensor, b: Any) -> Tensor:
    return torch.where(a < b, b, a)


def index(a: Tensor, entries: tuple[Any, ...]) -> Tensor:
    """By unsqueeze: an index of a fake tensor asks for the device itself."""
    for axis, entry in enumerate(entries):
        a = a.unsqueeze(axis) if entry is None else a
    return a


def arange(n: int, like: Tensor) -> Tensor:
    indices = torch.arange(n, device=like.device)
    if not hasattr(like, "placements"):
        return indices
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh
    return DTensor.from_local(indices, mesh, [Replicate()] * mesh.ndim, run_check=False)


def sigmoid(z: Tensor) -> Tensor:
    """For other runtimes by the exponential of -|z|: onnxruntime's operator (1.31) is 0 below -15.9 in float32."""
    return z.clamp(max=0).exp() / (1 + (-z.abs()).exp()) if is_exported() else torch.sigmoid(z)


def silu(z: Tensor) -> Tensor:
    """PyTorch's own where it will do: its gradient has no forward mode."""
    return z * sigmoid(z) if has_tangents() or is_exported() else functional.silu(z)


def mean_square(ops: Any, call: Call, c: Tensor, row: recipe.Row, least: float) -> tuple[Tensor, Any]:
    """For derivatives in a unit that makes each row about 1, so that powers of 1 / rho stay in range.

    For other runtimes in one unit: few operations, and an eps that their optimisers do not drop. onnxscript's takes an
    addend below 2e-8 for 0: github.com/microsoft/onnxscript, rewriter/_matcher.py, abs_tol.
    """
    if _are_differentiated():
        largest = maximum(max(c.detach().abs(), call.axes), least)
        exponent = largest.log2().floor().clamp(*((-1000, 1000) if c.dtype == torch.float64 else (-120, 120)))
        unit: Any = torch.where((largest > 0) & largest.isfinite(), (-exponent).exp2(), 1.0)
    elif is_exported():
        unit = 2.0**15 if vanishes(call.variant.eps_for(call.sum_dtype)) else 1.0
    else:
        return recipe.mean_square(ops, call, c, row, least)
    scaled = c * unit
    squares = scaled * scaled
    return mean(squares, call.axes) if row.counted is None else sum(squares, call.axes) / row.k, unit


def vanishes(eps: float) -> bool:
    """Whether a program for ONNX may take an eps for 0."""
    return 0 < eps < 2e-8
