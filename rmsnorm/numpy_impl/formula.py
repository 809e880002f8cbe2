"""The formula: RMSNorm, its gradients and its derivative in plain NumPy. Start reading here.

    y = a / rho * g + b,    rho = sqrt(mean(a_i^2) + eps)

Source: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4 and section 4.2, whose symbols these are: a is a row along
the last axis, g the gain, b the bias. ``numpy_impl.rms_norm``, the golden, computes the same for every variant, axis,
mask and dtype, correctly rounded; a test compares the two. ``paper.derivation`` holds the steps of the proof.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rms(a: Array, eps: float = 1e-6) -> Array:
    """rho, one number for each row."""
    return np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + eps)


def rms_norm(a: Array, g: Array, b: Array, eps: float = 1e-6) -> Array:
    """y."""
    return a / rms(a, eps) * g + b


def r_matrix(a: Array, eps: float = 1e-6) -> Array:
    """R = d(a / rho) / da of one row: (I - a a^T / (n rho^2)) / rho. The functions below never form it."""
    rho = rms(a, eps)
    return (np.eye(a.size) - np.outer(a, a) / (a.size * rho**2)) / rho


def rms_norm_vjp(v: Array, a: Array, g: Array, eps: float = 1e-6) -> tuple[Array, Array, Array]:
    """dL/da = R^T (g v), dL/dg = sum of v a / rho and dL/db = sum of v over the rows, for v = dL/dy."""
    rho = rms(a, eps)
    normalised, u = a / rho, g * v
    da = (u - normalised * np.mean(u * normalised, axis=-1, keepdims=True)) / rho
    rows = tuple(range(a.ndim - 1))
    return da, np.sum(v * normalised, axis=rows), np.sum(v, axis=rows)


def rms_norm_jvp(a: Array, g: Array, da: Array, dg: Array, db: Array, eps: float = 1e-6) -> Array:
    """dy = (R da) g + a / rho dg + db, for the tangents da, dg and db."""
    rho = rms(a, eps)
    normalised = a / rho
    moved = (da - normalised * np.mean(normalised * da, axis=-1, keepdims=True)) / rho
    return moved * g + normalised * dg + db
