"""Calls whose derivatives tests of several frameworks compare, and numbers that are hard to round."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm import numpy_impl as golden
from rmsnorm.specification import dtypes

DIFFERENTIABLE: dict[str, dict[str, Any]] = {  # calls whose second derivatives show every part of the formula
    "plain": {},
    "image": {"axis": (1, 2), "feature_axis": 0},
    "partial": {"partial": 0.5},
    "mask": {"mask": True},
    "mask and eps 0": {"mask": True, "eps": 0.0},
    "outside": {"variant": "zhang_torch", "eps": 0.3},
    "clamp": {"variant": "x_transformers", "eps": 1.5},
    "variance": {"variant": "keras_rms_scaling"},
    "offset": {"variant": "gemma", "eps": 0.5},
    "before scale": {"variant": "llama", "mask": True, "partial": 0.5},
}


def small(name: str, shape: tuple[int, int, int]) -> tuple[list[Any], dict[str, Any]]:
    """x, scale and bias of such a call in float64, NaN under the mask, and its options."""
    rng, options = np.random.default_rng(0), dict(DIFFERENTIABLE[name])
    features = shape[:1] if "feature_axis" in options else shape[2:]
    arrays = [rng.standard_normal(size) for size in (shape, features, features)]
    if "mask" in options:
        options["mask"] = rng.random(shape) > 0.3
        options["mask"][0, 1] = False
        arrays[0] = np.where(options["mask"], arrays[0], np.nan)
    return arrays, options


ENDS = (
    0.0, -0.0, np.inf, -np.inf, np.nan, 1e-60, -1e-60, 1e300, 65519.999999999, 65520.0, 3.3961775292304957e38, 3e-8,
    6e-8,
)  # fmt: skip


def hard_to_round(dtype: str, least: float = -50) -> Any:
    """float64 numbers from 10^least on, ties between two numbers of 16 bits and what is next to them, and ``ENDS``."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(50_000) * np.logspace(least, 40, 50_000)
    exact = rng.standard_normal(50_000).astype(dtype).astype(np.float64)
    tie = exact + 2.0 ** np.frexp(exact)[1] * dtypes.epsilon(dtype) / 4
    tie *= 1 + 1e-14 * rng.standard_normal(50_000)
    return np.concatenate([wide, tie, ENDS])


def directions_of(arrays: list[Any]) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(array.shape) for array in arrays]


def product_with_hessian(arrays: Any, v: Any, directions: Any, options: dict[str, Any]) -> Any:
    """Of <v, y>, by central differences of the golden's gradients, 2^-17 on each side.

    They err by h^2 / 6 of the third derivative and by 2^-53 / h of the gradients: with rows of norm 1 or more and
    directions of size 3 both are below 1e-7 of the largest gradient.
    """
    h = 2.0**-17
    above, below = (
        golden.rms_norm_vjp(v, *(a + s * d for a, d in zip(arrays, directions, strict=True)), **options)
        for s in (h, -h)
    )
    return [(one - other) / (2 * h) for one, other in zip(above, below, strict=True) if one is not None]
