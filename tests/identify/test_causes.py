"""The first sentence of identify says the cause: kernels that are right but for one circumstance, or one dtype."""

from __future__ import annotations

from typing import Any

import pytest
from torch_zoo import torch

from rmsnorm.identify import identify

pytestmark = pytest.mark.torch


def wide(x: Any) -> Any:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse(h: Any, eps: float = 1e-6) -> Any:
    return torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def norm(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return (wide(x) * inverse(wide(x), eps) * weight).type_as(x)


def lost_tail(x: Any, weight: Any) -> Any:
    """Whole blocks of 128 columns alone are summed."""
    n, h = x.shape[-1], wide(x)
    total = h[..., : n // 128 * 128 or n].square().sum(-1, keepdim=True)
    return (h * torch.rsqrt(total / n + 1e-6) * weight).type_as(x)


def odd_row(x: Any, weight: Any) -> Any:
    """Two rows at once, of which a last one without a neighbour is forgotten."""
    r = inverse(wide(x)).reshape(-1, 1)
    r = torch.cat([r[:-1], r[-2:-1]]) if len(r) % 2 and len(r) > 1 else r
    return (wide(x) * r.reshape(*x.shape[:-1], 1) * weight).type_as(x)


def eps_of(dtype: Any, eps: float, other: float) -> Any:
    return lambda x, weight: norm(x, weight, other if x.dtype == dtype else eps)


def eps_kept_in_x(x: Any, weight: Any) -> Any:
    return norm(x, weight, torch.tensor(1e-8, dtype=x.dtype).item())


class IntoDy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return norm(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            dx, dscale = torch.autograd.grad(norm(*leaves), leaves, dy)
        return dy.copy_(dx), dscale


def into_dy(x: Any, weight: Any) -> Any:
    return IntoDy.apply(x, weight)


def static_y() -> Any:
    memory: dict[Any, Any] = {}

    def function(x: Any, weight: Any) -> Any:
        y = norm(x, weight)
        return y if y.requires_grad else memory.setdefault((x.shape, x.dtype), torch.empty_like(y)).copy_(y)

    return function


class Stale(torch.nn.Module):
    """It keeps a copy of its gain, which training alone makes anew."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight, self.kept = torch.nn.Parameter(torch.ones(dim)), None

    def forward(self, x: Any) -> Any:
        if self.training or self.kept is None:
            self.kept = self.weight.detach().clone()
        return norm(x, self.weight if self.training else self.kept)


def narrow_gain(x: Any, weight: Any) -> Any:
    return (wide(x) * inverse(wide(x)) * weight.to(torch.bfloat16)).type_as(x)


def with_sum(x: Any, residual: Any, weight: Any) -> Any:
    total = (wide(x) + wide(residual)).type_as(x)
    return norm(total, weight), total


class DroppedDh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        return with_sum(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any) -> Any:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return torch.autograd.grad(with_sum(*leaves)[0], leaves, dy)


def dropped_dh(x: Any, residual: Any, weight: Any) -> Any:
    return DroppedDh.apply(x, residual, weight)


def truncated_sum(x: Any, residual: Any, weight: Any) -> Any:
    total = wide(x) + wide(residual)
    if x.dtype == torch.bfloat16:
        total = (total.view(torch.int32) & -65536).view(torch.float32)
    return norm(total.type_as(x), weight), total.type_as(x)


def clipped(x: Any, weight: Any) -> Any:
    return norm(wide(x).clamp(-1e3, 1e3), weight).type_as(x)


def first_columns(x: Any, weight: Any) -> Any:
    h = wide(x)
    return (h * inverse(h[..., :1024] if x.shape[-1] > 1500 else h) * weight).type_as(x)


def rounded_inverse(x: Any, weight: Any) -> Any:
    return (wide(x) * inverse(wide(x)).bfloat16() * weight).type_as(x)


def half_of_k(x: Any, weight: Any) -> Any:
    h = wide(x)
    return (h * inverse(h[..., : max(1, int(x.shape[-1] * 0.29))]) * weight).type_as(x)


CAUSES = {
    lost_tail: "the last 123 of 1531 elements, after the last full block of 128, are not summed",
    odd_row: "in a call of 257 rows, the last one of an odd number of rows has the statistic of the row before it",
    eps_of(torch.float16, 1e-6, 1e-5): "eps is 1e-05 for float16 x, and 1e-06 in wider dtypes",
    eps_of(torch.float16, 1e-8, 1e-7): "eps is 1e-07 for float16 x, and 1e-08 in wider dtypes",
    eps_of(torch.bfloat16, 1e-6, 1e-5): "eps is 1e-05 for bfloat16 x, and 1e-06 in wider dtypes",
    eps_kept_in_x: "eps is rounded to float16 for float16 x, so that 1e-08 becomes 0",
    into_dy: "its backward pass writes to the gradient of y",
    static_y(): "the next call writes to the memory of y: y of an earlier call changes",
    Stale: "the gain of an earlier call is kept: y changes with the gain in training alone",
    narrow_gain: "the gain is rounded to bfloat16",
    dropped_dh: "with a residual, the gradient for x lacks that of the returned sum x + residual",
    truncated_sum: "for bfloat16 x, with a residual, the second result is another bfloat16 of shape (6, 33), expected "
    "x + residual",
    clipped: "x is cut off at 1000",
    first_columns: "only the first 1024 of 1531 elements count",
    rounded_inverse: "1 / rho is rounded to bfloat16 before the product with x",
    half_of_k: "k = floor(n p) is computed in floating point: 12 of 43, 18 of 64, 26 of 90, 28 of 100, 43 of 150, "
    "45 of 157, 46 of 160",
}


@pytest.mark.parametrize("function", CAUSES, ids=lambda function: getattr(function, "__name__", ""))
def test_the_first_sentence_says_the_cause(function: Any) -> None:
    identity = identify(function, framework=None if function is Stale else "torch")
    assert not identity.recognised
    assert identity.defects[0] == CAUSES[function], identity.text


@pytest.mark.parametrize("function", [norm, with_sum, lambda x, weight: norm(x, weight, 1e-8)])
def test_without_a_mistake_it_is_recognised(function: Any) -> None:
    identity = identify(function, framework="torch")
    assert identity.recognised, identity.text
