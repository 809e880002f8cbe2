"""Arrays for a call with some options, in the formats and magnitudes that tests of several frameworks use."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

MAGNITUDES = {
    "float16": (1.0, 1e4, 1e-6),
    "bfloat16": (1.0, 1e20, 1e-30),
    "float32": (1.0, 1e20, 1e-30),
    "float64": (1.0, 1e20, 1e-30, 1e300, 1e-300),
}


def make(
    options: dict[str, Any], dtype: str, parameters: str, seed: int, magnitude: float = 1.0, limit: float = np.inf
) -> Any:
    """Arguments of the golden: x, scale, bias, options, of which ``mask`` is a shape and ``residual`` a dtype.

    Every mask has an empty row and NaN under it.

    Rows differ in size by up to exp(limit), and numbers of a row go up to 2 limit.
    """
    rng = np.random.default_rng(seed)
    shape, options = (2, 3, 4, 5), dict(options)
    axis = options.get("feature_axis", options.get("axis", -1))
    axes = sorted(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    sizes = [shape[a] for a in axes]
    x = np.clip(rng.standard_normal(shape), -2 * limit, 2 * limit)
    x = x * np.exp(np.clip(rng.standard_normal((*shape[:-1], 1)), -limit, limit)) * magnitude
    x = np.clip(x, -6e4, 6e4).astype(dtype) if dtype == "float16" else x.astype(dtype)
    scale, bias = (rng.standard_normal(sizes).astype(parameters) for _ in range(2))
    if "residual" in options:
        options["residual"] = (rng.standard_normal(shape) * magnitude).astype(options["residual"])
    if "mask" in options:
        mask = rng.random(options["mask"]) > 0.3
        mask[-1] = False
        options["mask"] = mask
        x = np.where(np.broadcast_to(mask, shape), x, np.asarray(np.nan, dtype)).astype(dtype)
    return x, scale, bias, options
