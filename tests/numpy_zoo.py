"""Norms of NumPy, each once. torch_zoo.py has those of PyTorch, test_zoo.py what is said of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def rows(x: Any, eps: float = 1e-6) -> Any:
    """x / rho, in the dtype of x."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps))


def standard(x: Any, weight: Any) -> Any:
    """In float64, with one rounding."""
    return (rows(x.astype(np.float64)) * weight.astype(np.float64)).astype(x.dtype)


def in_float32(x: Any, weight: Any) -> Any:
    """As a kernel that multiplies by 1 / rho."""
    wide = x.astype(np.float32)
    inverse = np.float32(1) / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
    return (wide * inverse * weight.astype(np.float32)).astype(x.dtype)


def llama(x: Any, weight: Any) -> Any:
    """With a rounding before the gain, and the wider dtype of the two."""
    normalised = rows(x.astype(np.float64)).astype(x.dtype).astype(np.float64)
    promoted = x.dtype if x.dtype == weight.dtype else np.promote_types(x.dtype, weight.dtype)
    return (normalised * weight.astype(np.float64)).astype(promoted)


def only_float32(x: Any, weight: Any) -> Any:
    if x.dtype != np.float32:
        raise TypeError("float32, please")
    return rows(x, 1e-5) * weight
