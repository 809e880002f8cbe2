"""Numbers that are hard to round."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm.specification import dtypes

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
