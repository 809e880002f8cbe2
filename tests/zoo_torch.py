"""Layers and functions of PyTorch, right and wrong, each once; tools/test_zoo.py has what is said of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from zoo import like, mean_square, rows, standard

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
silu, unit = torch.nn.functional.silu, torch.nn.functional.normalize


def hooked(tensor: Any, change: Any) -> Any:
    """The same numbers, whose gradient is what ``change`` makes of it."""
    same = tensor.view_as(tensor)
    if same.requires_grad:
        same.register_hook(change)
    return same


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


def gated(act: Any, before: bool = False) -> Any:
    """With a gate that must be there, after the norm or before it."""

    def norm(x: Any, weight: Any, gate: Any) -> Any:
        f = act(gate.float())
        return like(standard(x.float() * f, weight) if before else standard(x.float(), weight) * f, x)

    return norm


def with_gradient(second: float = 1.0, factor: float = 1.0) -> Any:
    """A norm whose dx, or the second term of it, is a little wrong."""

    def norm(x: Any, weight: Any) -> Any:
        h = hooked(x, lambda dx: factor * dx).double()
        inverse = hooked((mean_square(h) + 1e-6) ** -0.5, lambda g: second * g)
        return like(h * inverse * weight.double(), x)

    return norm


def narrow_sums(x: Any, weight: Any) -> Any:
    """The gradient for the gain is added up in the dtype of x, in a tree."""

    def added_up(terms: Any) -> Any:
        total = terms.to(x.dtype).reshape(-1, x.shape[-1])
        while len(total) > 1:
            half = (len(total) + 1) // 2
            total = total[:half] + torch.cat([total[half:], total.new_zeros(2 * half - len(total), x.shape[-1])])
        first = torch.zeros_like(terms).reshape(-1, x.shape[-1])
        first[:1] = total
        return first.reshape(terms.shape)

    return standard(x, hooked(weight.expand(x.shape), added_up))


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


def of_narrow_squares(x: Any, eps: float) -> Any:
    return x.float() * torch.rsqrt(x.square().float().mean(-1, keepdim=True) + eps)


def by_largest(x: Any) -> Any:
    return x / x.abs().amax(-1, keepdim=True)


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
        return (super().forward(x) * silu(gate.float())).to(x.dtype)


# fmt: off
# With a rounding before the gain
Llama = plain("Llama", eps=1e-5, forward=lambda self, x: self.weight * rows(x.float(), self.eps).type_as(x))
AllInT = plain("AllInT", eps=1e-5, forward=lambda self, x: rows(x, self.eps) * self.weight)
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
Learned = plain(
    "Learned", parameter=("factor", lambda dim: torch.tensor(0.5)),
    norm=lambda self, x: Plain.norm(self, x) * self.factor.float(),
)
# The authors' name of the bias
Zhang = plain(
    "Zhang", parameter=("offset", torch.zeros), norm=lambda self, x: Plain.norm(self, x) + self.offset.float())
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

# Those that are none
Clipped = plain("Clipped", norm=lambda self, x: Plain.norm(self, x.clamp(-50, 50)))
Largest = plain("Largest", norm=lambda self, x: by_largest(x) * self.gain())
Mixed = plain("Mixed", norm=lambda self, x: 0.5 * x + Plain.norm(self, x))
# fmt: on
