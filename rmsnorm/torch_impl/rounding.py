"""Single roundings to 16 bits, and powers of two, on PyTorch tensors."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rmsnorm.specification import dtypes
from rmsnorm.torch_impl.private import is_batch_of_gradients

NAMES: Final = {getattr(torch, name): name for name in (*dtypes.FLOATS, "bool")}


def add(x: Tensor, residual: Tensor | None, dtype: str) -> Tensor:
    return x if residual is None else cast(x.double() + residual.double(), dtype)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Round once; the identity to every derivative.

    PyTorch casts float64 to 16 bits through float32 and so rounds twice. Rounding to odd first (to that neighbour in
    float32 whose last bit is 1) makes the second rounding right: Boldo & Melquiond 2008. Not in a batch of gradients
    (``is_grads_batched``), where no bits can be read: there one value in some 65,000 may be the other neighbour.
    """
    target: torch.dtype = getattr(torch, dtype)
    x = complete(x)
    if dtype not in dtypes.HALF or x.dtype != torch.float64 or is_batch_of_gradients(x):
        return x.to(target)
    single = x.float()
    with torch.no_grad():
        value, nearest = x.detach(), single.detach()
        error = value - nearest.double()
        other = torch.nextafter(nearest, error.sign().float() * torch.inf)  # the value is between these two
        even = ((nearest.double() + other.double()) / 2).float()
        is_moved = nearest.isfinite() & (error != 0) & (even == nearest)
        to_odd = torch.where(is_moved, other - nearest, -0.0)  # exact; adding -0 keeps a zero
    return (single + to_odd).to(target)


def complete(x: Tensor) -> Tensor:
    """A DTensor with the sum over its devices done where that is pending, as it must be before anything nonlinear."""
    if type(x) is Tensor or not any(placement.is_partial() for placement in getattr(x, "placements", ())):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def straight_through(value: Tensor, smooth: Tensor) -> Tensor:
    """The value of one with the derivatives of the other, which is the same where it is not finite."""
    zero = smooth.detach() - smooth  # +0, so that less it a zero keeps its sign
    return torch.where(smooth.isfinite(), value.detach() - zero, smooth)


def dtype_name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


@torch.no_grad()
def exponent_of(a: Tensor) -> Tensor:
    """About log2 of a >= 0, a whole number; 0 where a is 0 or not finite. Views of bits have no batched gradients."""
    exponent = a.log2().floor().clamp(-1022, 1022)
    return torch.where((a > 0) & (a < torch.inf), exponent, 0.0)


def excess(exponent: Tensor, limit: int) -> Tensor:
    """How far beyond a limit it is. Most often 0: small numbers beside large ones are not lost."""
    return exponent - exponent.clamp(-limit, limit)


@torch.no_grad()
def two_to(exponent: Tensor) -> Tensor:
    return exponent.clamp(-1022, 1023).exp2()
