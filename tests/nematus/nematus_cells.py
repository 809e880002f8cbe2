"""Parameters and inputs of recurrent cells for the tests, and what the authors' own cells computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from nematus_models import DATA

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


def theano_weights(cell: str, norm: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    wide = {"gru": 2 * STATE, "lstm": 4 * STATE}[cell]
    shapes: dict[str, tuple[int, ...]] = {"W": (SIZE, wide), "U": (STATE, wide), "b": (wide,)}
    widths = [wide, wide, STATE]
    if cell == "gru":
        shapes |= {"Wx": (SIZE, STATE), "Ux": (STATE, STATE), "bx": (STATE,)}
        widths = [wide, STATE, wide, STATE]
    for index, width in enumerate(widths, start=1):
        if norm != "none":
            shapes[f"s{index}"] = (width,)
        if norm == "layer":
            shapes[f"b{index}"] = (width,)
    return {name: rng.standard_normal(shape) * 0.7 + name.startswith("s") for name, shape in shapes.items()}


def nematus_weights(norm: str, biases: tuple[str, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    weights: dict[str, Any] = {}
    for index, bias in enumerate(biases):
        for side, rows in (("state", STATE), ("input", SIZE))[: 1 if index else 2]:
            for part, width in (("gates", 2 * STATE), ("proposal", STATE)):
                weights[f"gru{index}/{side}_to_{part}"] = rng.standard_normal((rows, width)) * 0.6
                scope = f"gru{index}/{part}_{'x' if side == 'input' else 'state'}_norm/"
                if norm != "none":
                    weights[scope + ("new_std" if norm == "layer" else "scale")] = rng.uniform(0.5, 1.5, width)
                if norm == "layer":
                    weights[scope + "new_mean"] = rng.standard_normal(width) * 0.3
        if bias != "none":
            weights[f"gru{index}/gates_bias"] = rng.standard_normal(2 * STATE) * 0.5
            weights[f"gru{index}/proposal_bias"] = rng.standard_normal(STATE) * 0.5
    return weights


def authors_cell(name: str) -> dict[str, Any]:
    """Inputs, outputs and gradients of one of their cells, by the names in tests/data."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        return {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
