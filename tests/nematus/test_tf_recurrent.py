"""The recurrent cells of Keras and TensorFlow: against the authors' own, against the golden, and as Keras's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import DATA
from test_recurrent import BATCH, LENGTH, NORMS, SIZE, STATE, nematus_weights, sequence, theano_weights

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from rmsnorm.nematus.numpy import recurrent as golden  # noqa: E402
from rmsnorm.nematus.tf import recurrent, recurrent_layers  # noqa: E402

EXACT = 1e-12  # two float64 computations of one thing in another order, of numbers below 10
SINGLE = 2e-5  # float32: some hundred roundings of such numbers
BIASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("input",), {}),
    (("state", "state"), {"masking": "carry"}),
    (("input", "none"), {"masking": "zero", "reverse": True}),
    (("input", "outside", "outside"), {"masking": "carry", "reverse": True}),
]


@pytest.fixture
def eagerly() -> Any:
    """Without graphs, whose tracing takes longer than short sequences."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def tensors(values: Any, dtype: str = "float64") -> Any:
    return tf.nest.map_structure(lambda value: tf.constant(value, dtype), values)


def gradients(function: Any, given: Any, cotangents: Any, **options: Any) -> tuple[Any, Any]:
    """What a function gives, and the gradients of its arguments."""
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = function(*given, **options)
    return found, tape.gradient(found, given, cotangents)


def close(found: Any, wanted: Any, dtype: str, name: str = "") -> None:
    assert found.dtype == dtype
    bound = EXACT if dtype == "float64" else SINGLE
    scale = max(1.0, abs(wanted).max())
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=bound * scale, err_msg=name)


def close_all(found: Any, wanted: dict[str, Any], dtype: str) -> None:
    """Of gradients: those of the inputs, then of the parameters by name."""
    *inputs, parameters = found
    named = {**dict(zip(("x", "h0", "c0"), inputs, strict=False)), **parameters}
    assert named.keys() == wanted.keys()
    for name, gradient in wanted.items():
        close(named[name], gradient, dtype, name)


@pytest.mark.parametrize(("name", "norm"), [("gru", "none"), ("rlngru", "rms"), ("rlnlstm", "rms")])
def test_the_authors_cells(name: str, norm: str) -> None:
    """Theano in float64, with a mask of fractions: outputs and gradients."""
    with np.load(DATA / "C1.npz", allow_pickle=False) as archive:
        held = {key.split("/")[1]: value for key, value in archive.items() if key.startswith(f"{name}/")}
    weights = tensors({key.removeprefix("param_"): held[key] for key in held if key.startswith("param_")})
    options = {"mask": held["mask_fractional"], "norm": norm}
    x, h0 = tensors((held["x"], held["h0"]))
    if name == "rlnlstm":
        c0 = tf.constant(held["c0"])
        cotangents = tensors((held["cotangent_h"], held["cotangent_c"]))
        (h, c), (dx, dh0, dc0, dweights) = gradients(recurrent.lstm, (x, h0, c0, weights), cotangents, **options)
        found = {"h_fractional": h, "c_fractional": c, "grad_fractional_c0": dc0}
        bare = recurrent.lstm(x, 0 * h0, 0 * c0, weights, norm=norm)[0]
    else:
        cotangent = tf.constant(held["cotangent_h"])
        h, (dx, dh0, dweights) = gradients(recurrent.gru, (x, h0, weights), cotangent, **options)
        found = {"h_fractional": h}
        bare = recurrent.gru(x, 0 * h0, weights, norm=norm)
    found |= {"grad_fractional_x": dx, "grad_fractional_h0": dh0, "h_nomask_zeroinit": bare}
    found |= {f"grad_fractional_param_{key}": value for key, value in dweights.items()}
    for key, value in found.items():
        np.testing.assert_allclose(value.numpy(), held[key], rtol=EXACT, atol=EXACT, err_msg=key)


def check_theano_cells(norm: Any, dtype: str) -> None:
    x, h0, mask = sequence()
    rng = np.random.default_rng(5)
    c0, dh, dc = rng.standard_normal((BATCH, STATE)), *rng.standard_normal((2, LENGTH, BATCH, STATE))
    options: dict[str, Any] = {"mask": mask, "norm": norm, "partial": 0.4}

    weights = theano_weights("gru", norm)
    h, found = gradients(recurrent.gru, tensors((x, h0, weights), dtype), tf.constant(dh, dtype), **options)
    close(h, golden.gru(x, h0, weights, **options), dtype)
    dx, dh0, wanted = golden.gru_vjp(dh, x, h0, weights, **options)
    close_all(found, {**wanted, "x": dx, "h0": dh0}, dtype)

    weights = theano_weights("lstm", norm)
    given = tensors((x, h0, c0, weights), dtype)
    (h, c), found = gradients(recurrent.lstm, given, tensors((dh, dc), dtype), **options)
    for each, state in zip((h, c), golden.lstm(x, h0, c0, weights, **options), strict=True):
        close(each, state, dtype)
    dx, dh0, dc0, wanted = golden.lstm_vjp(dh, dc, x, h0, c0, weights, **options)
    close_all(found, {**wanted, "x": dx, "h0": dh0, "c0": dc0}, dtype)


def check_nematus_gru(norm: Any, biases: Any, masking: dict[str, Any], dtype: str) -> None:
    x, h0, mask = sequence()
    dh = np.random.default_rng(5).standard_normal((LENGTH, BATCH, STATE))
    weights = nematus_weights(norm, biases)
    options = {"biases": biases, "mask": mask if masking else None, "norm": norm, "partial": 0.4, **masking}
    h, found = gradients(recurrent.nematus_gru, tensors((x, h0, weights), dtype), tf.constant(dh, dtype), **options)
    close(h, golden.nematus_gru(x, h0, weights, **options), dtype)
    dx, dh0, wanted = golden.nematus_gru_vjp(dh, x, h0, weights, **options)
    close_all(found, {**wanted, "x": dx, "h0": dh0}, dtype)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("norm", NORMS)
def test_the_theano_cells_are_the_goldens(norm: Any) -> None:
    check_theano_cells(norm, "float64")


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("biases", "masking"), BIASES)
def test_nematus_gru_is_the_goldens(norm: Any, biases: Any, masking: dict[str, Any]) -> None:
    check_nematus_gru(norm, biases, masking, "float64")


@pytest.mark.parametrize("norm", NORMS)
def test_in_graphs_the_cells_are_the_goldens(norm: Any) -> None:
    check_theano_cells(norm, "float32")
    check_nematus_gru(norm, *BIASES[NORMS.index(norm)], "float32")


@pytest.mark.parametrize(("norm", "compiled"), [("layer", False), ("rms", True)])
def test_in_a_graph_that_knows_no_lengths(norm: Any, compiled: bool) -> None:
    """Also compiled by XLA, with the gradients."""
    weights = theano_weights("gru", norm)
    given = tensors(weights, "float32")

    def step(x: Any, mask: Any) -> Any:
        h0 = tf.zeros((tf.shape(x)[1], STATE))
        return gradients(recurrent.gru, (x, h0, given), None, mask=mask, norm=norm)[1]

    specs = tf.TensorSpec((None, None, SIZE)), tf.TensorSpec((None, None))
    compiled_step = tf.function(step, jit_compile=compiled, input_signature=specs)
    x, h0, mask = sequence()
    for length in (LENGTH, 2):
        found = compiled_step(*tensors((x[:length], mask[:length]), "float32"))
        dh = np.ones((length, BATCH, STATE))
        dx, dh0, wanted = golden.gru_vjp(dh, x[:length], 0 * h0, weights, mask=mask[:length], norm=norm)
        close_all(found, {**wanted, "x": dx, "h0": dh0}, "float32")


def test_a_second_call_traces_nothing() -> None:
    """For another length and batch; for another norm it does."""
    x, h0, mask = (tf.constant(each) for each in sequence())
    weights = tensors(theano_weights("gru", "none"))
    recurrent.gru(x, h0, weights, mask=mask)
    before = len(recurrent._graphs.traced)
    traced = next(reversed(recurrent._graphs.traced.values()))
    count = traced.experimental_get_tracing_count()
    recurrent.gru(x[:2, :1], h0[:1], weights, mask=mask[:2, :1])
    assert traced.experimental_get_tracing_count() == count == 1
    assert len(recurrent._graphs.traced) == before
    recurrent.gru(x, h0, weights)
    assert len(recurrent._graphs.traced) == before + 1


def layers(norm: Any, dtype: str = "float64", **options: Any) -> Any:
    """Every layer, with weights by their names, and its cell in Keras's own loop."""
    biases: Any = ("input", "outside")
    own: dict[str, Any] = {"norm": norm, "partial": 0.4, "dtype": dtype}
    made = (
        (recurrent_layers.NematusGRU(STATE, biases=biases, **own, **options), nematus_weights(norm, biases)),
        (recurrent_layers.GRU(STATE, **own, **options), theano_weights("gru", norm)),
        (recurrent_layers.LSTM(STATE, **own, **options), theano_weights("lstm", norm)),
    )
    for layer, weights in made:
        layer.build((None, None, SIZE))
        assert layer.by_name().keys() == weights.keys()
        for name, value in weights.items():
            layer.by_name()[name].assign(value)
        yield layer, keras.layers.RNN(layer.cell, dtype=dtype, **options), weights


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_is_its_cell_step_by_step(norm: Any) -> None:
    """In Keras's own loop: from any state, with a mask, from the end, in all that it returns.

    A word stands at both ends: before the first one Keras's outputs are zeros, and ours the states.
    """
    x, h0, _ = sequence()
    x = x.swapaxes(0, 1)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0, 1]], bool)
    for options in ({}, {"return_sequences": True, "go_backwards": True}, {"zero_output_for_mask": True}):
        for layer, steps, _ in layers(norm, return_state=True, **options):
            state = [h0, 2 * h0][: len(layer.state_size)]
            for given in ({"mask": mask}, {"mask": mask, "initial_state": state}, {}):
                for found, wanted in zip(layer(x, **given), steps(x, **given), strict=True):
                    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=0, atol=EXACT)


def test_a_layer_is_the_function_of_its_weights() -> None:
    x, _, mask = sequence()
    mask = mask > 0.4
    options: dict[str, Any] = {"norm": "rms", "partial": 0.4, "mask": mask}
    for (layer, _, weights), function in zip(
        layers("rms", return_sequences=True),
        (
            lambda *given: golden.nematus_gru(*given, biases=("input", "outside"), masking="carry", **options),
            lambda *given: golden.gru(*given, **options),
            lambda x, h0, weights: golden.lstm(x, h0, h0, weights, **options)[0],
        ),
        strict=True,
    ):
        wanted = function(x, np.zeros((BATCH, STATE)), weights)
        close(layer(x.swapaxes(0, 1), mask=mask.T), wanted.swapaxes(0, 1), "float64")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_what_a_new_layer_holds(cell: str, norm: Any) -> None:
    """As Nematus begins: orthogonal squares for the state, small numbers for the input, gains 1, all else 0."""
    keras.utils.set_random_seed(0)
    layer = getattr(recurrent_layers, cell)(STATE, norm=norm)
    layer.build((None, None, SIZE))
    weights = {name: weight.numpy() for name, weight in layer.by_name().items()}
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
        np.testing.assert_allclose(square.T @ square, np.eye(STATE), atol=1e-5)
    assert abs(squares[0] - squares[1]).max() > 0.1  # each drawn for itself
    gains = [name for name in weights if name.endswith(("scale", "new_std")) or name[0] == "s"]
    assert len(gains) == (0 if norm == "none" else 3 if cell == "LSTM" else 4)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_a_model_with_layers_learns_is_saved_and_comes_back(tmp_path: Any) -> None:
    """A functional model with masked words, a layer for each direction and one more; to the bit."""
    keras.utils.set_random_seed(0)
    ids = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [2, 2, 0, 0], [3, 1, 4, 2]])
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, SIZE, mask_zero=True)(inputs)
    first = recurrent_layers.NematusGRU(STATE, biases=("input", "state"), norm="rms", return_sequences=True)
    x = recurrent_layers.LSTM(STATE, norm="prms", partial=0.5)(keras.layers.Bidirectional(first)(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.05), loss="mse")
    losses = model.fit(ids, ids[:, 0], epochs=20, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
    padded = np.concatenate((ids, 0 * ids), axis=1)
    np.testing.assert_allclose(model(padded).numpy(), model(ids).numpy(), atol=1e-6)


@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NematusGRU"])
def test_a_layer_is_made_anew_from_its_config(cell: str) -> None:
    options = {"biases": ("input", "state")} if cell == "NematusGRU" else {}
    options |= {"norm": "prms", "partial": 0.5, "go_backwards": True, "return_state": True, "dtype": "float64"}
    layer = getattr(recurrent_layers, cell)(STATE, **options)
    for each in (layer, layer.cell, keras.layers.RNN(layer.cell)):
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(each))
        assert again.get_config() == each.get_config()
        made, wanted = (getattr(one, "cell", one) for one in (again, each))
        assert made.norms == {"norm": "prms", "partial": 0.5}
        assert made.shapes(SIZE) == wanted.shapes(SIZE)


def test_a_file_of_another_layer(tmp_path: Any) -> None:
    models = [
        keras.Sequential([keras.Input((None, SIZE)), recurrent_layers.GRU(STATE, norm=norm)])
        for norm in ("rms", "none")
    ]
    models[0].save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match=r"gru_cell.*: the file lacks \[\] and holds \['s1'\] instead"):
        models[1].load_weights(tmp_path / "model.weights.h5")


def test_mixed_precision() -> None:
    """Weights in float32, arithmetic in bfloat16: within some roundings of 2^-9."""
    x, _, _ = sequence()
    layer = recurrent_layers.LSTM(STATE, norm="rms", dtype="mixed_bfloat16")
    found = layer(x.swapaxes(0, 1))
    assert found.dtype == "bfloat16"
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    weights = {name: weight.numpy() for name, weight in layer.by_name().items()}
    wanted = golden.lstm(x, *np.zeros((2, BATCH, STATE)), weights, norm="rms")[0][-1]
    np.testing.assert_allclose(found.numpy().astype(float), wanted, atol=0.03)


def test_an_unknown_norm() -> None:
    x, h0, _ = sequence()
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent.gru(x, h0, {}, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm is 'batch', expected 'none', 'layer', 'rms' or 'prms'"):
        recurrent_layers.GRU(STATE, norm="batch")  # type: ignore[arg-type]
