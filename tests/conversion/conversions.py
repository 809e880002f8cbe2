"""What the tests of LayerNorm into RMSNorm share: bounds, and what became of a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.conversion.layer_norm import Conversion

ROUNDING = 1e-12  # of the greatest output, in float64: some 1e4 roundings of 1.1e-16
SINGLE = 2e-5  # likewise in float32, whose roundings are 6e-8: some 300 of them

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def shown(result: Conversion) -> dict[str, str]:
    """Why each layer was left, or nothing where it was converted."""
    return {layer.name: "" if layer.converted else layer.why for layer in result.layers}


def distance(before: Any, after: Any) -> float:
    before, after = (np.asarray(output, np.float64) for output in (before, after))
    return float(np.abs(before - after).max() / np.abs(before).max())
