"""Recurrent cells in every framework: against the authors' own, against the golden, and as layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_cells import (
    BATCH,
    BIASES,
    LENGTH,
    NORMS,
    SIZE,
    STATE,
    authors_cell,
    nematus_weights,
    sequence,
    theano_weights,
)
from nematus_models import check_directions

# Two computations of one thing in another order, of numbers below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}

golden_too = pytest.mark.parametrize("adapter", ["numpy", "torch", "tf", "flax"], indirect=True)


def cast(values: Any, dtype: str) -> Any:
    """Arrays in tuples and dictionaries, in another dtype."""
    if isinstance(values, dict):
        return {name: cast(value, dtype) for name, value in values.items()}
    return tuple(cast(value, dtype) for value in values) if isinstance(values, tuple) else values.astype(dtype)


def check_cell(adapter: Any, cell: str, inputs: Any, cotangents: Any, dtype: str, **options: Any) -> None:
    """Compares states with the golden's, and gradients with differences of it.

    Only those of PyTorch in float64; all others are compared with these.
    """
    states, gradients = adapter.pull_back(cell, cast(inputs, dtype), cast(cotangents, dtype), **options)

    def golden(*own: Any) -> Any:
        result = getattr(numpy_nematus.nematus, cell)(*own, **options)
        return result if cell == "lstm" else (result,)

    wanted_states = golden(*inputs)
    states = states if cell == "lstm" else (states,)
    *gradients, of_parameters = gradients
    if adapter.__name__ == "torch_nematus" and dtype == "float64":
        check_all([*zip(states, wanted_states, strict=True)], dtype)
        count = len(inputs) - 1

        def loss(moved: dict[str, Any]) -> Any:
            own = [moved[f"input {i}"] for i in range(count)]
            results = golden(*own, {name: moved[name] for name in inputs[-1]})
            return sum((one * other).sum() for one, other in zip(cotangents, results, strict=True))

        named = [{f"input {i}": array for i, array in enumerate(arrays)} for arrays in (inputs[:-1], gradients)]
        check_directions(loss, inputs[-1] | named[0], of_parameters | named[1])
        return
    pytest.importorskip("torch")
    import torch_nematus

    *wanted, wanted_of_parameters = torch_nematus.pull_back(cell, inputs, cotangents, **options)[1]
    assert of_parameters.keys() == wanted_of_parameters.keys()
    pairs = [*zip(states, wanted_states, strict=True), *zip(gradients, wanted, strict=True)]
    check_all(pairs + [(of_parameters[name], gradient) for name, gradient in wanted_of_parameters.items()], dtype)


def check_all(pairs: Any, dtype: str) -> None:
    for result, wanted in pairs:
        assert result.dtype == dtype
        np.testing.assert_allclose(result, wanted, rtol=0, atol=EXACT[dtype] * max(1.0, abs(wanted).max()))


def check_theano_cells(adapter: Any, norm: str, dtype: str) -> None:
    x, h0, mask = sequence()
    rng = np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    options = {"mask": mask, "norm": norm, "partial": 0.4}
    check_cell(adapter, "gru", (x, h0, theano_weights("gru", norm)), (dh,), dtype, **options)
    check_cell(adapter, "lstm", (x, h0, c0, theano_weights("lstm", norm)), (dh, dc), dtype, **options)


def check_nematus_gru(adapter: Any, norm: str, biases: Any, masking: dict[str, Any], dtype: str) -> None:
    x, h0, mask = sequence()
    dh = np.random.default_rng(5).standard_normal((LENGTH, BATCH, STATE))
    options = {"biases": biases, "mask": mask if masking else None, "norm": norm, "partial": 0.4, **masking}
    check_cell(adapter, "nematus_gru", (x, h0, nematus_weights(norm, biases)), (dh,), dtype, **options)


@golden_too
@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(adapter: Any, name: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    arrays = authors_cell(name)
    weights = {key.removeprefix("param_"): value for key, value in arrays.items() if key.startswith("param_")}
    cell, letters = ("lstm", ("h", "c")) if name == "rlnlstm" else ("gru", ("h",))
    states = tuple(arrays[f"{letter}0"] for letter in letters)
    cotangents = tuple(arrays[f"cotangent_{letter}"] for letter in letters)
    options = {"mask": arrays["mask_fractional"], "norm": norm}
    inputs = (arrays["x"], *states, weights)
    results: dict[str, Any] = {}
    with adapter.wide():
        if adapter is numpy_nematus:
            outputs = getattr(adapter.nematus, cell)(*inputs, **options)
        else:
            outputs, (dx, *dstates, dweights) = adapter.pull_back(cell, inputs, cotangents, **options)
            assert dweights.keys() == weights.keys()
            results = {"grad_fractional_x": dx}
            results |= {f"grad_fractional_{one}0": dstate for one, dstate in zip(letters, dstates, strict=True)}
            results |= {f"grad_fractional_param_{key}": value for key, value in dweights.items()}
        parameters = {key: adapter.array(value) for key, value in weights.items()}
        zeros = [adapter.array(0 * state) for state in states]
        bare = getattr(adapter.nematus, cell)(adapter.array(arrays["x"]), *zeros, parameters, norm=norm)
        bare = adapter.numpy(bare[0] if cell == "lstm" else bare)
    if cell == "gru":
        outputs = (outputs,)
    results |= {f"{letter}_fractional": output for letter, output in zip(letters, outputs, strict=True)}
    results["h_nomask_zeroinit"] = bare
    for key, result in results.items():
        np.testing.assert_allclose(result, arrays[key], rtol=1e-12, atol=1e-12, err_msg=key)


THEANO = [
    *(("torch", norm, dtype) for norm in NORMS for dtype in ("float64", "float32")),
    *(("tf", norm, "float64") for norm in NORMS),
    # XLA compiles RMSNorm in float32 in a tenth of the time.
    *(("flax", norm, "float32" if norm == "prms" else "float64") for norm in NORMS),
]


@pytest.mark.parametrize(("adapter", "norm", "dtype"), THEANO, indirect=["adapter"])
def test_the_theano_cells_are_the_goldens(adapter: Any, norm: str, dtype: str) -> None:
    with adapter.wide() if dtype == "float64" else nullcontext():
        check_theano_cells(adapter, norm, dtype)


NEMATUS = [
    *(("torch", norm, *case, dtype) for norm in NORMS for case in BIASES for dtype in ("float64", "float32")),
    *(("tf", norm, *case, "float64") for norm in NORMS for case in BIASES),
    ("flax", "prms", *BIASES[0], "float32"),
    ("flax", "none", ("input", "none"), {"masking": "zero"}, "float64"),
    ("flax", "rms", *BIASES[1], "float32"),
    ("flax", "rms", *BIASES[2], "float32"),
    ("flax", "layer", *BIASES[3], "float64"),
]


@pytest.mark.parametrize(("adapter", "norm", "biases", "masking", "dtype"), NEMATUS, indirect=["adapter"])
def test_nematus_gru_is_the_goldens(adapter: Any, norm: str, biases: Any, masking: dict[str, Any], dtype: str) -> None:
    with adapter.wide() if dtype == "float64" else nullcontext():
        check_nematus_gru(adapter, norm, biases, masking, dtype)


@pytest.mark.parametrize("adapter", ["tf"], indirect=True)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.slow
def test_in_graphs_the_cells_are_the_goldens(adapter: Any, norm: str) -> None:
    check_theano_cells(adapter, norm, "float32")
    check_nematus_gru(adapter, norm, *BIASES[NORMS.index(norm)], "float32")


@pytest.mark.parametrize(
    ("adapter", "norm"), [*(("torch", norm) for norm in NORMS), ("flax", "prms")], indirect=["adapter"]
)
def test_the_modules_are_the_functions_of_their_parameters(adapter: Any, norm: str) -> None:
    """Loaded with weights by their names; without a state it is zero. Layers of Keras: test_nematus_tf.py."""
    dtype = "float64" if adapter.__name__ == "torch_nematus" else "float32"
    x, h0, mask = map(adapter.array, cast(sequence(), dtype))
    nematus, options = adapter.nematus, {"norm": norm, "partial": 0.4}
    biases: Any = ("input", "outside")
    more = {"biases": biases, "masking": "carry", "reverse": True}
    for cell, function, weights, states, own in (
        ("GRU", nematus.gru, theano_weights("gru", norm), (h0,), {}),
        ("LSTM", nematus.lstm, theano_weights("lstm", norm), (h0, 2 * h0), {}),
        ("NematusGRU", nematus.nematus_gru, nematus_weights(norm, biases), (h0,), more),
    ):
        layer = adapter.new_cell(cell, SIZE, STATE, **options, **own)
        adapter.load(layer, cast(weights, dtype))
        parameters = {name: adapter.array(value) for name, value in cast(weights, dtype).items()}
        wanted = function(x, *states, parameters, mask=mask, **options, **own)
        check_equal(adapter, layer(x, states if cell == "LSTM" else h0, mask), wanted)
        if cell != "NematusGRU":
            zeros = [0 * state for state in states]
            check_equal(adapter, layer(x), function(x, *zeros, parameters, **options))


def check_equal(adapter: Any, result: Any, wanted: Any) -> None:
    pairs = zip(result, wanted, strict=True) if isinstance(wanted, tuple) else [(result, wanted)]
    for one, other in pairs:
        np.testing.assert_array_equal(adapter.numpy(one), adapter.numpy(other))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_what_a_new_layer_holds(adapter: Any, cell: str, norm: str) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    layer = adapter.new_cell(cell, SIZE, STATE, norm=norm)
    weights = {name: adapter.numpy(value) for name, value in layer.by_name().items()}
    squares = []
    for name, value in weights.items():
        leaf = name.rpartition("/")[2]
        if value.ndim == 1:
            assert (value == float(leaf in ("scale", "new_std") or leaf[0] == "s")).all(), name
        elif value.shape[0] == STATE:
            squares += np.split(value, value.shape[1] // STATE, axis=1)
        else:
            assert 0 < abs(value).max() < 0.06, name
    for square in squares:
        np.testing.assert_allclose(square.T @ square, np.eye(STATE), rtol=0, atol=1e-5)
    assert all(abs(square - squares[0]).max() > 0.1 for square in squares[1:]), "drawn one by one"
    assert len({square.tobytes() for square in squares}) == len(squares)
    gains = [name for name in weights if name.endswith(("scale", "new_std")) or name[0] == "s"]
    assert len(gains) == (0 if norm == "none" else 3 if cell == "LSTM" else 4)


@golden_too
def test_errors(adapter: Any) -> None:
    x, h0, _ = map(adapter.array, cast(sequence(), "float32"))
    nematus, message = adapter.nematus, r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"
    with pytest.raises(ValueError, match=message):
        nematus.gru(x, h0, {}, norm="batch")
    if adapter is not numpy_nematus:
        with pytest.raises(ValueError, match=message):
            adapter.new_cell("GRU", SIZE, STATE, norm="batch")
    with pytest.raises(KeyError, match="gru0/input_to_gates"):
        nematus.gru(x, h0, {})
