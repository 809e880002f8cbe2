"""Layers and functions of PyTorch, right and wrong, each once; tools/test_zoo.py has what is said of them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from zoo import like, rows, standard

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
silu, unit = torch.nn.functional.silu, torch.nn.functional.normalize


# Functions.


def blocks_by_rows(x: Any, weight: Any) -> Any:
    """Blocks of 1,024 elements for fewer than 256 rows, else of 256: the sums are added up in another order."""
    wide, total, width = x.float(), 0.0, max(1, x.shape[-1])
    for part in wide.square().split(1024 if wide.numel() // width < 256 else 256, dim=-1):
        total = total + part.sum(-1, keepdim=True)
    return (wide * torch.rsqrt(total / width + 1e-6) * weight.float()).to(x.dtype)


def by_vector_norm(x: Any, weight: Any) -> Any:
    """The norm of a library, which adds in eight lanes, or one after the other where elements are apart in memory."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(size**2 / x.shape[-1] + 1e-6) * weight.float()).to(x.dtype)


def rounds_otherwise_with_a_residual(x: Any, weight: Any, residual: Any = None) -> Any:
    if residual is not None:
        return standard(x + residual, weight)
    return weight * standard(x, torch.ones_like(weight))


def channels(x: torch.Tensor, weight: Any, condition: Any) -> Any:
    """Along axis 1 of 4, as images have them, with an argument that nobody can guess."""
    y = rows(x.float(), axis=1) * (1 + condition[:, None, None, None])
    return like(y * weight.float()[:, None, None], x)


def sigmoid_gate(x: Any, gate: Any) -> Any:
    return rows(x) * torch.sigmoid(gate)


def stopped_gate(x: Any, gate: Any) -> Any:
    """No gradient reaches the gate."""
    return sigmoid_gate(x, gate.detach())


def sum_without_gradient(x: Any, weight: Any, residual: Any = None) -> Any:
    """No gradient reaches the residual."""
    h = x if residual is None else x + residual.detach()
    y = like(rows(h) * weight, x)
    return y if residual is None else (y, h)


def with_gradient(second: float = 1.0, factor: float = 1.0) -> Any:
    """A norm whose dx, or the second term of it, is a little wrong."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, inverse)
            return (x.double() * inverse * weight.double()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight, inverse = ctx.saved_tensors
            dscale = (dy.double() * x.double() * inverse).sum(tuple(range(x.ndim - 1)))
            v, y = dy.double() * weight.double(), x.double() * inverse
            dx = factor * inverse * (v - second * y * (v * y).mean(-1, keepdim=True))
            return dx.to(x.dtype), dscale.to(weight.dtype)

    return lambda x, weight: Norm.apply(x, weight)


def with_narrow_sums(factor: float) -> Any:
    """The gradient for the gain is added up in the dtype of x, in a tree; dx is ``factor`` times what it must be."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return standard(x, weight)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (dx,) = torch.autograd.grad(standard(leaf, weight), leaf, dy)
            terms = (dy.float() * rows(x.float())).to(x.dtype).reshape(-1, x.shape[-1])
            while len(terms) > 1:
                half = (len(terms) + 1) // 2
                terms = terms[:half] + torch.cat([terms[half:], terms.new_zeros(2 * half - len(terms), x.shape[-1])])
            return factor * dx, terms.sum(0).to(weight.dtype)

    return lambda x, weight: Norm.apply(x, weight)


def needs_a_gpu(x: torch.Tensor) -> Any:
    return rows(x) + torch.zeros(1, device="cuda")


def narrow(x: Any) -> Any:
    return torch.mean(x, -1, keepdim=True)


def slow(x: Any) -> Any:
    time.sleep(0.2)
    return rows(x)


# Layers.


class Plain(torch.nn.Module):
    """RMSNorm with a gain in float32, rounded once."""

    eps = 1e-6
    first = staticmethod(torch.nn.init.ones_)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(self.first(torch.empty(dim)))

    def forward(self, x: Any) -> Any:
        return like(self.norm(x.float()), x)

    def norm(self, x: Any) -> Any:
        return rows(x, self.eps) * self.gain()

    def gain(self) -> Any:
        return self.weight.float()


def plain(name: str, base: Any = Plain, parameter: tuple[str, Any] | None = None, **changes: Any) -> Any:
    """A layer with these methods and numbers in the place of those of the base, and with a second parameter."""

    def init(self: Any, dim: int) -> None:
        base.__init__(self, dim)
        if parameter:
            self.register_parameter(parameter[0], torch.nn.Parameter(parameter[1](dim)))

    return type(name, (base,), {"__module__": __name__, "__init__": init, **changes})


def part(x: Any, share: float = 0.0625) -> Any:
    """Of the first elements alone, whose number is rounded up."""
    return x * torch.rsqrt(x[..., : math.ceil(x.shape[-1] * share)].square().mean(-1, keepdim=True) + 1e-6)


def of_narrow_squares(x: Any, eps: float) -> Any:
    return x.float() * torch.rsqrt(x.square().float().mean(-1, keepdim=True) + eps)


def by_constant(x: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()


def by_largest(x: Any) -> Any:
    return x / x.abs().amax(-1, keepdim=True)


class NoGain(torch.nn.Module):
    """Llama 4's norm of queries and keys: float64 is rounded to float32 first."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Any) -> Any:
        return like(rows(x.float(), self.eps), x)


class Zhang(torch.nn.Module):
    """The authors' rmsnorm_torch.py."""

    def __init__(self, d: int, p: float = 0.25, eps: float = 1e-8, bias: bool = True) -> None:
        super().__init__()
        self.d, self.p, self.eps = d, p, eps
        self.scale = torch.nn.Parameter(torch.ones(d))
        self.offset = torch.nn.Parameter(torch.zeros(d))

    def forward(self, x: Any) -> Any:
        k = int(self.d * self.p)
        rms = x[..., :k].norm(2, dim=-1, keepdim=True) * k ** (-0.5)
        return self.scale * (x / (rms + self.eps)) + self.offset


class Image(torch.nn.Module):
    """As in denoising-diffusion-pytorch: the gain says the number of axes, the factor says which one is normalised."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x: Any) -> Any:
        return unit(x, dim=1) * self.g * self.g.shape[1] ** 0.5


class Mamba2(Plain):
    """With a gate before the norm that may be left out, in groups of ``size`` neighbours or of elements apart."""

    size: int | None = None
    axis = -1

    def forward(self, x: Any, gate: Any = None) -> Any:
        wide = x.float() if gate is None else x.float() * silu(gate.float())
        wide = wide.unflatten(-1, (-1, self.size or x.shape[-1]) if self.axis == -1 else (self.size, -1))
        return self.weight * rows(wide, axis=self.axis).flatten(-2).to(x.dtype)


class Qwen3Next(Mamba2):
    """With a gate after the norm, which must be there."""

    def forward(self, x: Any, gate: Any) -> Any:
        return (super().forward(x) * self.act(gate.float())).to(x.dtype)

    def act(self, gate: Any) -> Any:
        return silu(gate)


class Required(Plain):
    """A forward that must have a gate, after the norm, or ``before`` it."""

    before = False

    def forward(self, x: Any, gate: Any) -> Any:
        f, ones = self.act(gate.float()), torch.ones(())
        on_x, on_y = (f, ones) if self.before else (ones, f)
        return (self.norm(x.float() * on_x) * on_y).to(x.dtype)

    def act(self, z: Any) -> Any:
        return silu(z)


# fmt: off
# With a rounding before the gain
Llama = plain("Llama", eps=1e-5, forward=lambda self, x: self.weight * rows(x.float(), self.eps).type_as(x))
AllInT = plain("AllInT", eps=1e-5, forward=lambda self, x: rows(x, self.eps) * self.weight)
Ceil = plain("Ceil", norm=lambda self, x: part(x) * self.gain())
# x-transformers
Clamp = plain("Clamp", forward=lambda self, x: unit(x, dim=-1) * x.shape[-1] ** 0.5 * self.weight)
# bzhangGo/zero, gated_rms_norm
Gated = plain(
    "Gated", parameter=("gate", torch.ones),
    norm=lambda self, x: rows(x, 1e-8) * self.gain() * torch.sigmoid(self.gate.float() * x),
)
Grouped = plain("Grouped", norm=lambda self, x: rows(x.unflatten(-1, (-1, 16))).flatten(-2) * self.gain())
# All of x, with a gain along the last of two axes that may have one size
Jointly = plain("Jointly", norm=lambda self, x: x * torch.rsqrt(x.square().mean() + 1e-6) * self.gain())
# A gain of 1 + g that starts at 1, as Gemma's
Offset = plain("Offset", first=staticmethod(torch.nn.init.zeros_), gain=lambda self: 1 + self.weight.float())

# Those that are wrong
# minimind #301: the square before the cast
MiniMind = plain("MiniMind", forward=lambda self, x: (self.weight * of_narrow_squares(x, 1e-5)).type_as(x))
# coremltools #2821: x / max|x| without rescaling eps
CoreML = plain("CoreML", norm=lambda self, x: rows(by_largest(x), 1e-5) * self.gain())
# 1 + gain in the dtype of the gain, where Gemma casts first
OffsetRounded = plain("OffsetRounded", gain=lambda self: (1 + self.weight).float())
Constant = plain("Constant", norm=lambda self, x: by_constant(x) * self.gain())
Learned = plain(
    "Learned", parameter=("factor", lambda dim: torch.tensor(0.5)),
    norm=lambda self, x: Plain.norm(self, x) * self.factor.float(),
)
Zero = plain("Zero", first=staticmethod(torch.nn.init.zeros_))
# A gain of 1 + g after an initialiser for gains without an offset
Twice = plain("Twice", Offset, first=staticmethod(torch.nn.init.ones_))
Drawn = plain("Drawn", first=staticmethod(torch.nn.init.uniform_))
Shifted = plain(
    "Shifted", parameter=("bias", lambda dim: torch.full((dim,), 0.5)),
    norm=lambda self, x: Plain.norm(self, x) + self.bias.float(),
)
InTraining = plain(  # another one in training
    "InTraining", forward=lambda self, x: torch.nn.functional.dropout(Plain.forward(self, x), 0.5, self.training))
ConstantGate = plain("ConstantGate", Qwen3Next, act=lambda self, gate: silu(gate.detach()))

# Those that are none
Clipped = plain("Clipped", norm=lambda self, x: Plain.norm(self, x.clamp(-50, 50)))
Largest = plain("Largest", norm=lambda self, x: by_largest(x) * self.gain())
Mixed = plain("Mixed", norm=lambda self, x: 0.5 * x + Plain.norm(self, x))
# fmt: on
