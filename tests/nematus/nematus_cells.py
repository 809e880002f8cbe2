"""Parameters and inputs of recurrent cells for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.nematus.cells import gru_shapes, initial, lstm_shapes, nematus_gru_shapes

LENGTH, BATCH, SIZE, STATE = 5, 3, 4, 6
NORMS = ["none", "layer", "rms", "prms"]
BIASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("input",), {}),
    (("state", "state"), {"masking": "carry"}),
    (("input", "none"), {"masking": "zero", "reverse": True}),
    (("input", "outside", "outside"), {"masking": "carry", "reverse": True}),
]


def sequence(seed: int = 0) -> tuple[Any, Any, Any]:
    """x, an initial state and a fractional mask."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((LENGTH, BATCH, SIZE))
    return x, rng.standard_normal((BATCH, STATE)), rng.uniform(0.1, 0.9, (LENGTH, BATCH))


def weights_of(cell: str, norm: Any, biases: Any = ()) -> dict[str, Any]:
    """Random parameters of a function: ``gru`` and ``lstm``, or ``nematus_gru`` with biases. Gains are about 1."""
    if cell == "nematus_gru":
        shapes = nematus_gru_shapes(SIZE, STATE, biases, norm)
    else:
        shapes = (gru_shapes if cell == "gru" else lstm_shapes)(SIZE, STATE, norm)
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(size) * 0.6 + (initial(name) == "ones") for name, size in shapes.items()}
