"""NumPy: ours beside the lines that people usually write."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp
from rmsnorm.specification import errors
from rmsnorm.specification.variants import PRESETS, Variant
from timing.candidates import (
    BUILTIN,
    COPY,
    LAYER_NORM,
    OURS,
    Candidate,
    Workbench,
    copy,
    copy_into,
)  # fmt: skip
from timing.machine import processor
from timing.problem import Array, Problem


def load(device: str) -> Workbench:
    if device != "cpu":
        raise errors.not_a_choice("numpy", "device", device, ["cpu"])
    return Workbench(np.__version__, processor(), _candidates)


def _candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
    x, scale, dy = problem.x, problem.scale, problem.dy
    eps = PRESETS["standard"].eps_for(problem.dtype)

    def ours() -> Any:
        y = rms_norm(x, scale, variant=variant)
        return (y,) if op == "fwd" else (y, *rms_norm_vjp(dy, x, scale, variant=variant)[:2])

    def naive(centre: bool) -> Any:
        y = _naive(x, scale, eps, centre)
        return (y,) if op == "fwd" else (y, *_naive_vjp(dy, x, scale, eps, centre))

    functions = {
        OURS: (ours, variant),
        BUILTIN: (lambda: naive(False), PRESETS["standard"]),
        LAYER_NORM: (lambda: naive(True), None),
    }
    return [
        *(Candidate(kind, call, "", expected) for kind, (call, expected) in functions.items()),
        Candidate(COPY, copy(problem, op)),
        copy_into(problem, op),
    ]


def _naive(x: Array, scale: Array, eps: float, centre: bool) -> Array:
    """RMSNorm, or LayerNorm, in the way that people usually write it."""
    h = x.astype(np.float32, copy=False)
    if centre:
        h = h - np.mean(h, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + eps)
    return (h / rms * scale).astype(x.dtype)


def _naive_vjp(dy: Array, x: Array, scale: Array, eps: float, centre: bool) -> tuple[Array, Array]:
    h, v = x.astype(np.float32, copy=False), dy.astype(np.float32, copy=False)
    if centre:
        h = h - np.mean(h, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + eps)
    normalised, u = h / rms, v * scale
    dx = (u - normalised * np.mean(u * normalised, axis=-1, keepdims=True)) / rms
    if centre:
        dx = dx - np.mean(dx, axis=-1, keepdims=True)
    over = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), np.sum(v * normalised, axis=over).astype(scale.dtype)
