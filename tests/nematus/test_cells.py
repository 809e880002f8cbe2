"""The authors' recurrent cells in every framework: against Theano, against the golden, and as layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_framework import check_close, golden_too
from nematus_models import DATA

from rmsnorm.nematus.cells import cell_shapes

LENGTH, BATCH, SIZE, STATE = 5, 3, 4, 6
every_cell = pytest.mark.parametrize(
    ("kind", "norm"), [(kind, norm) for kind in ("gru", "lstm") for norm in ("none", "layer", "rms", "prms")]
)


def several(states: Any) -> tuple[Any, ...]:
    return states if isinstance(states, tuple | list) else (states,)


@golden_too
@pytest.mark.parametrize(
    ("name", "cell", "norm"), [("gru", "gru", "none"), ("rlngru", "gru", "rms"), ("rlnlstm", "lstm", "rms")]
)
def test_the_authors_cells(adapter: Any, name: str, cell: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs, and gradients in PyTorch."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        arrays = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    letters = ("h", "c") if cell == "lstm" else ("h",)
    names = ["x", *(f"{letter}0" for letter in letters), *(key for key in arrays if key.startswith("param_"))]
    function, results = getattr(adapter.nematus, cell), {}
    with adapter.wide():
        inputs = {key: adapter.array(arrays[key]) for key in names}
        if adapter.KEY == "torch":
            inputs = {key: value.requires_grad_() for key, value in inputs.items()}
        weights = {key.removeprefix("param_"): value for key, value in inputs.items() if key.startswith("param_")}
        x, *states = (value for key, value in inputs.items() if not key.startswith("param_"))
        outputs = several(function(x, *states, weights, mask=adapter.array(arrays["mask_fractional"]), norm=norm))
        bare = several(function(x, *(0 * state for state in states), weights, norm=norm))
        if adapter.KEY == "torch":
            cotangents = [adapter.array(arrays[f"cotangent_{letter}"]) for letter in letters]
            gradients = adapter.torch.autograd.grad(outputs, list(inputs.values()), cotangents)
            results |= {f"grad_fractional_{key}": value for key, value in zip(names, gradients, strict=True)}
        results |= {f"{letter}_fractional": output for letter, output in zip(letters, outputs, strict=True)}
        results["h_nomask_zeroinit"] = bare[0]
    for key, result in results.items():
        np.testing.assert_allclose(adapter.numpy(result), arrays[key], rtol=1e-12, atol=1e-12, err_msg=key)


@every_cell
def test_a_layer_is_the_golden_of_its_parameters(adapter: Any, kind: str, norm: str) -> None:
    """In float32, with and without a mask and first states; a cell of Keras has the batch first."""
    rng = np.random.default_rng(3)
    shapes = cell_shapes(kind, SIZE, STATE, norm)  # type: ignore[arg-type]
    weights = {name: rng.standard_normal(size) * 0.6 + (name[0] == "s") for name, size in shapes.items()}
    weights = {name: value.astype("f4") for name, value in weights.items()}
    x, mask = rng.standard_normal((LENGTH, BATCH, SIZE)).astype("f4"), rng.uniform(0.1, 0.9, (LENGTH, BATCH))
    states = rng.standard_normal((1 + (kind == "lstm"), BATCH, STATE)).astype("f4")
    layer = adapter.new_cell(kind, SIZE, STATE, norm=norm, partial=0.4)
    adapter.load(layer, weights)
    golden = getattr(numpy_nematus.nematus, kind)
    turned = (lambda array: np.swapaxes(array, 0, 1)) if adapter.KEY == "tf" else np.asarray
    for first, own in ((states, mask.astype("f4")), ([], None)):
        arrays = [adapter.array(turned(x)), *map(adapter.array, first)]
        results = layer(*arrays, mask=None if own is None else adapter.array(turned(own)))
        wanted = golden(x, *(first if len(first) else 0 * states), weights, mask=own, norm=norm, partial=0.4)
        for result, expected in zip(several(results), several(wanted), strict=True):
            check_close(turned(adapter.numpy(result)), expected, "float32")


@every_cell
def test_what_a_new_layer_holds(adapter: Any, kind: str, norm: str) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    weights = {
        name: adapter.numpy(value) for name, value in adapter.new_cell(kind, SIZE, STATE, norm=norm).by_name().items()
    }
    squares: list[Any] = []
    for name, value in weights.items():
        if value.ndim == 1:
            assert (value == float(name[0] == "s")).all(), name
        elif value.shape[0] == STATE:
            squares += np.split(value, value.shape[1] // STATE, axis=1)
        else:
            assert 0 < abs(value).max() < 0.06, name
    for square in squares:
        np.testing.assert_allclose(square.T @ square, np.eye(STATE), rtol=0, atol=1e-5)
    assert len({square.tobytes() for square in squares}) == len(squares), "drawn one by one"
    gains = [name for name in weights if name[0] == "s"]
    assert len(gains) == (0 if norm == "none" else 3 if kind == "lstm" else 4)


def test_what_a_layer_is_made_of(adapter: Any) -> None:
    with pytest.raises(ValueError, match="norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        adapter.new_cell("gru", SIZE, STATE, norm="batch")
    with pytest.raises(ValueError, match="Recurrent: kind is 'rnn', expected 'gru' or 'lstm'"):
        adapter.new_cell("rnn", SIZE, STATE)
    if adapter.KEY == "flax":
        half = adapter.new_cell("gru", SIZE, STATE, norm="rms", param_dtype="bfloat16")
        assert {value.dtype.name for value in half.by_name().values()} == {"bfloat16"}


def test_keras_makes_a_layer_anew_and_masks_what_an_embedding_masks() -> None:
    keras = pytest.importorskip("keras")
    import tf_nematus

    layer = tf_nematus.nematus.Recurrent("gru", STATE, norm="prms", partial=0.5, dtype="float64")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == layer.get_config()
    embed = keras.layers.Embedding(5, SIZE, mask_zero=True)
    states, short = (layer(embed(np.array([ids]))).numpy() for ids in ([1, 2, 0, 0], [1, 2]))
    np.testing.assert_allclose(states[:, :2], short, rtol=1e-12)
    np.testing.assert_array_equal(states[:, 2:], states[:, [1, 1]])
