"""Recurrent cells in every framework: against the authors' own, against the golden, and as layers."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_cells import BATCH, BIASES, LENGTH, NORMS, SIZE, STATE, sequence, weights_of
from nematus_framework import check_close, golden_too
from nematus_models import DATA, check_directions


def cast(values: Any, dtype: str) -> Any:
    """Arrays in tuples and dictionaries, in another dtype."""
    if isinstance(values, dict):
        return {name: cast(value, dtype) for name, value in values.items()}
    return tuple(cast(value, dtype) for value in values) if isinstance(values, tuple) else values.astype(dtype)


def several(states: Any) -> tuple[Any, ...]:
    return states if isinstance(states, tuple) else (states,)


def named(arrays: Any) -> dict[str, Any]:
    """The last of them are parameters by names; so are the others."""
    return {**arrays[-1], **{f"input {i}": array for i, array in enumerate(arrays[:-1])}}


def check_cell(adapter: Any, cell: str, inputs: Any, cotangents: Any, dtype: str, **options: Any) -> None:
    """Compares states with the golden's, and gradients with differences of it.

    Only those of PyTorch in float64; all others are compared with these.
    """
    states, gradients = adapter.pull_back(cell, cast(inputs, dtype), cast(cotangents, dtype), **options)

    def golden(*own: Any) -> Any:
        return several(getattr(numpy_nematus.nematus, cell)(*own, **options))

    def loss(moved: dict[str, Any]) -> Any:
        results = golden(
            *(moved[f"input {i}"] for i in range(len(inputs) - 1)), {name: moved[name] for name in inputs[-1]}
        )
        return sum((one * other).sum() for one, other in zip(cotangents, results, strict=True))

    assert {result.dtype.name for result in golden(*cast(inputs, "float32"))} == {"float32"}
    for result, wanted in zip(several(states), golden(*inputs), strict=True):
        check_close(result, wanted, dtype)
    if adapter.KEY == "torch" and dtype == "float64":
        check_directions(loss, named(inputs), named(gradients))
        return
    pytest.importorskip("torch")
    import torch_nematus

    gradients, exact = named(gradients), named(torch_nematus.pull_back(cell, inputs, cotangents, **options)[1])
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        check_close(gradient, exact[name], dtype)


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


THEANO: Any = ((), {"masking": "carry"})  # for cells that have no biases, and carry their states
CASES = [
    *((*row, dtype) for row in product(["torch"], NORMS, [THEANO, *BIASES]) for dtype in ("float64", "float32")),
    *((*row, "float64") for row in product(["tf"], NORMS, [THEANO, *BIASES])),
    *(  # in graphs
        pytest.param("tf", norm, kind, "float32", marks=pytest.mark.slow)
        for norm, own in zip(NORMS, BIASES, strict=True)
        for kind in (THEANO, own)
    ),
    # XLA compiles RMSNorm in float32 in a tenth of the time.
    *(("flax", norm, THEANO, "float32" if norm == "prms" else "float64") for norm in NORMS),
    ("flax", "prms", BIASES[0], "float32"),
    ("flax", "none", (("input", "none"), {"masking": "zero"}), "float64"),
    ("flax", "rms", BIASES[1], "float32"),
    ("flax", "rms", BIASES[2], "float32"),
    ("flax", "layer", BIASES[3], "float64"),
]


@pytest.mark.parametrize(("adapter", "norm", "kind", "dtype"), CASES, indirect=["adapter"])
def test_the_cells_are_the_goldens(adapter: Any, norm: str, kind: Any, dtype: str) -> None:
    """Nematus's GRU, or without biases the authors' GRU and LSTM."""
    (biases, masking), (x, h0, mask), rng = kind, sequence(), np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    options = {"mask": mask if masking else None, "norm": norm, "partial": 0.4}
    with adapter.wide() if dtype == "float64" else nullcontext():
        if biases:
            inputs = x, h0, weights_of("nematus_gru", norm, biases)
            check_cell(adapter, "nematus_gru", inputs, (dh,), dtype, biases=biases, **options, **masking)
        else:
            check_cell(adapter, "gru", (x, h0, weights_of("gru", norm)), (dh,), dtype, **options)
            check_cell(adapter, "lstm", (x, h0, c0, weights_of("lstm", norm)), (dh, dc), dtype, **options)


@pytest.mark.parametrize(
    ("adapter", "norm"), [*(("torch", norm) for norm in NORMS), ("flax", "prms")], indirect=["adapter"]
)
def test_the_modules_are_the_functions_of_their_parameters(adapter: Any, norm: str) -> None:
    """Loaded with weights by their names; without a state it is zero. Layers of Keras: test_nematus_tf.py."""
    dtype = "float64" if adapter.KEY == "torch" else "float32"
    x, h0, mask = map(adapter.array, cast(sequence(), dtype))
    options, biases = {"norm": norm, "partial": 0.4}, ("input", "outside")
    more: dict[str, Any] = {"biases": biases, "masking": "carry", "reverse": True}
    for cell, function, states, own in (
        ("GRU", "gru", h0, {}), ("LSTM", "lstm", (h0, 2 * h0), {}), ("NematusGRU", "nematus_gru", h0, more),
    ):  # fmt: skip
        compute, weights = getattr(adapter.nematus, function), cast(weights_of(function, norm, biases), dtype)
        layer = adapter.new_cell(cell, SIZE, STATE, **options, **own)
        adapter.load(layer, weights)
        parameters = {name: adapter.array(value) for name, value in weights.items()}
        pairs = [(layer(x, states, mask), compute(x, *several(states), parameters, mask=mask, **options, **own))]
        zeros = [0 * state for state in several(states)]
        pairs.append((layer(x), compute(x, *zeros, parameters, **options, **own)))
        for result, wanted in pairs:
            for one, other in zip(several(result), several(wanted), strict=True):
                np.testing.assert_array_equal(adapter.numpy(one), adapter.numpy(other))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_what_a_new_layer_holds(adapter: Any, cell: str, norm: str) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    layer = adapter.new_cell(cell, SIZE, STATE, norm=norm)
    weights = {name: adapter.numpy(value) for name, value in layer.by_name().items()}
    gains = {name for name in weights if name.endswith(("scale", "new_std")) or name[0] == "s"}
    squares = []
    for name, value in weights.items():
        if value.ndim == 1:
            assert (value == float(name in gains)).all(), name
        elif value.shape[0] == STATE:
            squares += np.split(value, value.shape[1] // STATE, axis=1)
        else:
            assert 0 < abs(value).max() < 0.06, name
    for square in squares:
        np.testing.assert_allclose(square.T @ square, np.eye(STATE), rtol=0, atol=1e-5)
    assert all(abs(square - squares[0]).max() > 0.1 for square in squares[1:]), "drawn one by one"
    assert len({square.tobytes() for square in squares}) == len(squares)
    assert len(gains) == (0 if norm == "none" else 3 if cell == "LSTM" else 4)
    if adapter.KEY == "flax":
        half = adapter.new_cell(cell, SIZE, STATE, norm=norm, param_dtype="bfloat16")
        assert {value.dtype.name for value in half.by_name().values()} == {"bfloat16"}


@golden_too
def test_errors(adapter: Any) -> None:
    x, h0, _ = map(adapter.array, cast(sequence(), "float32"))
    message = r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"
    with pytest.raises(ValueError, match=message):
        adapter.nematus.gru(x, h0, {}, norm="batch")
    if adapter is not numpy_nematus:
        with pytest.raises(ValueError, match=message):
            adapter.new_cell("GRU", SIZE, STATE, norm="batch")
    with pytest.raises(KeyError, match="gru0/input_to_gates"):
        adapter.nematus.gru(x, h0, {})
