"""What float64 arithmetic rounds off, and single roundings to 16 bits, on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rmsnorm import dtypes
from rmsnorm.torch_impl.private import bits_of, is_batch_of_gradients

NAMES: Final = {getattr(torch, name): name for name in (*dtypes.FLOATS, "bool")}


def add(x: Tensor, residual: Tensor | None, dtype: str) -> Tensor:
    return x if residual is None else cast(x.double() + residual.double(), dtype)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Round once; the identity to every derivative.

    PyTorch casts float64 to 16 bits through float32 and so rounds twice. Rounding to odd first (cut off, then set the
    last bit if anything was lost) makes the second rounding right: Boldo & Melquiond 2008. Not in a batch of gradients
    (``is_grads_batched``), where no bits can be read: there one value in some 65,000 may be the other neighbour.
    """
    target: torch.dtype = getattr(torch, dtype)
    x = complete(x)
    if dtype not in dtypes.HALF or x.dtype != torch.float64 or is_batch_of_gradients(x):
        return x.to(target)
    single = x.float()
    with torch.no_grad():
        value, nearest = x.detach(), single.detach()
        bits = bits_of(nearest, torch.int32) - (nearest.double().abs() > value.abs()).int()
        inexact = nearest.isfinite() & (bits_of(bits, torch.float32).double() != value)
        to_odd = torch.where(inexact, bits_of(bits | 1, torch.float32) - nearest, -0.0)  # exact; adding -0 keeps a zero
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


def product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """a * b - product, exactly: Dekker 1971, the halves cut by a bit mask."""
    a1, b1 = (bits_of(bits_of(part, torch.int64) & -(2**27), torch.float64) for part in (a, b))
    a2, b2 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def sum_of_squares(a: Tensor, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of a^2, and what that rounded off, with ``add_up`` to sum a tensor, over devices or not.

    Every square is cut in two at the same place, so far up that the first parts add up without rounding: the same bits
    in any order, wherever the elements are. Demmel & Nguyen 2013, Fast Reproducible Floating-Point Summation.
    """
    squares = a * a
    power = 4 * power_of_two(add_up(squares))
    first = (squares + power) - power
    return add_up(first), add_up((squares - first) + product_error(a, a, squares))


def sum_error(a: Tensor, b: Any, total: Tensor) -> Tensor:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return finite((a - (total - t)) + (b - t))


def finite(error: Tensor) -> Tensor:
    return torch.where(error.isfinite(), error, 0.0)


def plus(a: Tensor, lost: Any) -> Tensor:
    """The sum with what was rounded off. Nothing is not added: it would make +0 of -0."""
    return torch.where(lost.isfinite() & (lost != 0), a + lost, a)


def power_of_two(a: Tensor) -> Tensor:
    """The largest one not above a >= 0; 0 below 2^-1022, infinity of infinity and NaN."""
    return bits_of(bits_of(a, torch.int64) & 0x7FF0000000000000, torch.float64)


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
