"""Norms, right and wrong, each once, over the arrays of NumPy or of PyTorch.

zoo_torch.py has layers, and what only PyTorch has; zoo_circumstances.py has those that are wrong in few calls, and
wrong_equations.py those with another equation. tools/test_zoo.py says what the tools say of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.parity.design import MASKS, OPTIONS
from rmsnorm.targets.bridges import NumPy


def options_of(circumstance: str) -> list[str]:
    """Those of gate, mask and residual that are in its name."""
    parts = ["mask" if part in MASKS else part for part in circumstance.split("; ")]
    return [name for name in OPTIONS if name in parts]


class WithGradients(NumPy):
    """Arrays of NumPy, with a function of the arguments and dy that returns the gradients by their names."""

    differentiable = True

    def __init__(self, derivatives: Any) -> None:
        super().__init__()
        self.derivatives = derivatives

    def linear(self, function: Any, tensors: Any, leaves: Any) -> Any:
        return function(tensors), lambda cotangents: self.derivatives(tensors, cotangents[0])


# The arrays of either library.


def wide(x: Any) -> Any:
    """In float64 in NumPy, in float32 at least in PyTorch: so few roundings that no result of 16 bits shows them."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def like(y: Any, x: Any) -> Any:
    """y in the dtype of x."""
    return y.astype(x.dtype) if isinstance(x, np.ndarray) else y.type_as(x)


def mean_square(h: Any, axis: int = -1) -> Any:
    return (h * h).mean(axis)[..., None] if axis == -1 else (h * h).mean(axis, keepdims=True)


def rows(h: Any, eps: float = 1e-6, axis: int = -1) -> Any:
    """h / rho, in the dtype of h."""
    return h / (mean_square(h, axis) + eps) ** 0.5


def standard(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """With one rounding."""
    return like(rows(wide(x), eps) * wide(weight), x)


def llama(x: Any, weight: Any) -> Any:
    """With a rounding before the gain, and the wider dtype of the two. Of NumPy."""
    promoted = x.dtype if x.dtype == weight.dtype else np.promote_types(x.dtype, weight.dtype)
    return (wide(like(rows(wide(x)), x)) * wide(weight)).astype(promoted)


def masked(h: Any, weight: Any, mask: Any) -> Any:
    """With a mask or None."""
    squares, count = wide(h) * wide(h), max(1, h.shape[-1])
    if mask is not None:
        mask = np.broadcast_to(mask, h.shape) if isinstance(h, np.ndarray) else mask.expand(h.shape)
        squares = np.where(mask, squares, 0.0) if isinstance(h, np.ndarray) else squares.where(mask, 0.0)
        count = mask.sum(-1)[..., None].clip(1)
    q = squares.sum(-1)[..., None] / count
    return wide(h) / (q + 1e-6) ** 0.5 * wide(weight)


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z)) if isinstance(z, np.ndarray) else z.sigmoid()


def options(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
    """With each option that `check` passes, and SiLU of the gate after the norm."""
    h = x if residual is None else x + residual
    y = masked(h, weight, mask)
    if gate is not None:
        y = y * wide(gate) * sigmoid(wide(gate))
    return like(y, x) if residual is None else (like(y, x), h)


# Those that are wrong.


def forgets(option: str, *beside: str) -> Any:
    """A norm with a mask, a residual and a gate, that forgets one of them beside the others."""

    def norm(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
        given = {"mask": mask, "residual": residual, "gate": gate}
        if all(given[name] is not None for name in beside):
            given[option] = None
        return options(x, weight, **given)

    return norm


def another_sum(second: Any) -> Any:
    """What is returned beside y is ``second`` of x and x + residual."""

    def norm(x: Any, weight: Any, residual: Any = None) -> Any:
        y = options(x, weight, residual=residual)
        return y if residual is None else (y[0], second(x, y[1]))

    return norm


def halves(x: Any, weight: Any) -> Any:
    """Each half of an even row by itself."""
    n = x.shape[-1] // 2 if x.shape[-1] % 2 == 0 else x.shape[-1]
    parts = wide(x).reshape(*x.shape[:-1], x.shape[-1] // max(n, 1), n)
    return like(rows(parts).reshape(x.shape) * wide(weight), x)


def where(condition: Any, change: Any) -> Any:
    """What a change makes of y where a condition on x holds."""

    def norm(x: Any, weight: Any) -> Any:
        y = standard(x, weight)
        return change(y) if condition(x) else y

    return norm


def in_place(x: Any, weight: Any) -> Any:
    y = standard(x, weight)
    x[...] = 0
    return y


def out_of_luck(x: Any, weight: Any = None) -> Any:
    raise RuntimeError("out of luck\nwith a long story")


def of_blocks_of_8(x: Any, weight: Any) -> Any:
    """The rest of a row is 0."""
    end = x.shape[-1] - x.shape[-1] % 8
    return np.concatenate([standard(x, weight)[..., :end], 0 * x[..., end:]], axis=-1)
