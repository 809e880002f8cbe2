"""The authors' recurrent cells in every framework: against Theano and against the golden."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_framework import check_close, golden_too
from nematus_models import DATA

from rmsnorm.nematus.cells import cell_shapes

LENGTH, BATCH, SIZE, STATE = 5, 3, 4, 6
NORMS = ["none", "layer", "rms", "prms"]
KINDS = ["gru", "lstm"]


def inputs_of(kind: Any, norm: Any, dtype: str = "float64") -> tuple[list[Any], dict[str, Any], Any]:
    """x and the first states, random parameters with gains about 1, and a mask of fractions."""
    rng = np.random.default_rng(3)
    shapes = cell_shapes(kind, SIZE, STATE, norm)
    weights = {name: rng.standard_normal(size) * 0.6 + (name[0] == "s") for name, size in shapes.items()}
    arrays = [rng.standard_normal((LENGTH, BATCH, SIZE)), *rng.standard_normal((1 + (kind == "lstm"), BATCH, STATE))]
    mask = rng.uniform(0.1, 0.9, (LENGTH, BATCH))
    return [x.astype(dtype) for x in arrays], {k: w.astype(dtype) for k, w in weights.items()}, mask.astype(dtype)


def several(states: Any) -> tuple[Any, ...]:
    return states if isinstance(states, tuple | list) else (states,)


@golden_too
@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(adapter: Any, name: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        arrays = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    weights = {key.removeprefix("param_"): value for key, value in arrays.items() if key.startswith("param_")}
    cell, letters = ("lstm", ("h", "c")) if name == "rlnlstm" else ("gru", ("h",))
    inputs = (arrays["x"], *(arrays[f"{letter}0"] for letter in letters), weights)
    options = {"mask": arrays["mask_fractional"], "norm": norm}
    function, results = getattr(adapter.nematus, cell), {}
    with adapter.wide():
        if adapter is numpy_nematus:
            outputs = function(*inputs, **options)
        else:
            cotangents = tuple(arrays[f"cotangent_{letter}"] for letter in letters)
            outputs, (*gradients, dweights) = adapter.pull_back(cell, inputs, cotangents, **options)
            of_inputs = dict(zip(("x", "h0", "c0"), gradients, strict=False))
            of_weights = {f"param_{key}": dweights[key] for key in weights}
            results |= {f"grad_fractional_{key}": value for key, value in (of_inputs | of_weights).items()}
        x, *zeros = (adapter.array(value) for value in (arrays["x"], *(0 * state for state in inputs[1:-1])))
        bare = several(function(x, *zeros, {key: adapter.array(value) for key, value in weights.items()}, norm=norm))
        results["h_nomask_zeroinit"] = adapter.numpy(bare[0])
    results |= {f"{letter}_fractional": output for letter, output in zip(letters, several(outputs), strict=True)}
    for key, result in results.items():
        np.testing.assert_allclose(result, arrays[key], rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_cell_is_the_golden(adapter: Any, kind: str, norm: str) -> None:
    """In float32, with and without a mask."""
    (x, *states), weights, mask = inputs_of(kind, norm, "float32")
    own = {name: adapter.array(value) for name, value in weights.items()}
    for some in (mask, None):
        options: dict[str, Any] = {"norm": norm, "partial": 0.4}
        wanted = getattr(numpy_nematus.nematus, kind)(x, *states, weights, mask=some, **options)
        arrays = map(adapter.array, (x, *states))
        own_mask = None if some is None else adapter.array(some)
        results = getattr(adapter.nematus, kind)(*arrays, own, mask=own_mask, **options)
        for result, expected in zip(several(results), several(wanted), strict=True):
            check_close(adapter.numpy(result), expected, "float32")


def test_a_wrong_norm(adapter: Any) -> None:
    (x, *states), weights, _ = inputs_of("gru", "none", "float32")
    with pytest.raises(ValueError, match="norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        adapter.nematus.gru(*map(adapter.array, (x, *states)), weights, norm="batch")
