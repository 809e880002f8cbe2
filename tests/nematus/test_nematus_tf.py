"""What is special to Nematus's models and cells in TensorFlow: graphs, Keras's layers, training and files."""

from __future__ import annotations

import numpy as np
import pytest
from nematus_cells import BATCH, LENGTH, NORMS, SIZE, STATE, sequence, weights_of
from nematus_models import WITH_DROPOUT, WITHOUT_DROPOUT, batch, config_of, random_parameters, same

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
from nematus_framework import check_close, exact_gradients  # noqa: E402
from tf_nematus import Model, quick  # noqa: E402

from rmsnorm.nematus import numpy as golden  # noqa: E402
from rmsnorm.nematus import tf as nematus  # noqa: E402
from rmsnorm.nematus.backends import model_class  # noqa: E402
from rmsnorm.nematus.names import variables  # noqa: E402
from rmsnorm.nematus.tf.recurrent import _graphs as graphs  # noqa: E402

NUMPY_2 = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"  # where Keras saves
LAYERS = {"GRU": "gru", "LSTM": "lstm", "NematusGRU": "nematus_gru"}


@pytest.fixture
def eagerly():
    with quick():
        yield


def model_of(kind, **changes):
    """A model in float32 without dropout."""
    config = config_of(kind).replace(**{**WITHOUT_DROPOUT, **changes})
    return Model(config, random_parameters(config, "float32")).own


def arrays_of(model):
    return {name: weight.numpy() for name, weight in model.by_name().items()}


@pytest.mark.parametrize(("kind", "heads"), [("plain", 8), ("transformer rms", 1), ("zero rela tied all", 2)])
def test_a_graph_serves_all_sentences(kind, heads):
    model = model_of(kind, transformer_num_heads=heads)
    in_numpy = model_class("numpy", model.config)(model.config, arrays_of(model))
    x, x_mask, y, y_mask = batch(model.config)
    for sentences in ((x, x_mask, y, y_mask), (x[:, :2, 2:], x_mask[:2, 2:], y[:, 2:], y_mask[:, 2:])):
        for _ in range(2):
            np.testing.assert_allclose(model.loss(*sentences).numpy(), in_numpy.loss(*sentences), rtol=1e-5)
        result, wanted = (one.translate(*sentences[:2], 2, 4) for one in (model, in_numpy))
        np.testing.assert_array_equal(result.sequences, wanted.sequences)
        np.testing.assert_allclose(result.scores, wanted.scores, rtol=1e-4)
    assert len(model.graphs.traced) == 3  # the loss; what comes before the first step of a search, and a step
    assert {graph.experimental_get_tracing_count() for graph in model.graphs.traced.values()} == {1}


@pytest.mark.usefixtures("eagerly")
@pytest.mark.filterwarnings(NUMPY_2)
@pytest.mark.parametrize("kind", ["deep", "tied all", "transformer smoothed labels"])
def test_a_model_is_saved_and_comes_back(kind, tmp_path):
    """To the bit, and with the names of Nematus."""
    model = model_of(kind)
    rows = variables(model.config)
    assert sorted(weight.name for weight in model.weights) == [row.name.replace("/", ".") for row in rows]
    zeros = {row.name: np.zeros(row.shape, np.float32) for row in rows}
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    again = keras.models.load_model(tmp_path / "model.keras")
    loaded, restored = (type(model)(model.config, zeros) for _ in range(2))
    loaded.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
    for copy in (again, loaded, restored):
        assert (copy.config, type(copy)) == (model.config, type(model))
        same(arrays_of(copy), random_parameters(model.config, "float32"))
    sentences = batch(model.config)
    np.testing.assert_array_equal(again(sentences, training=True), model.loss(*sentences, training=True))
    with pytest.raises(ValueError, match=r"the file lacks \['.*'\].*expected the weights by their names"):
        model_of("prelu").load_weights(tmp_path / "model.weights.h5")


@pytest.mark.filterwarnings(NUMPY_2)
@pytest.mark.slow
def test_fit_makes_the_loss_fall(tmp_path):
    """To half in some steps, in a graph; the loss is what the method says; a loaded model goes on as the saved one."""
    model = model_of("tied decoder")
    sentences = tuple(map(tf.constant, batch(model.config)))
    data = tf.data.Dataset.from_tensors((sentences,))
    with pytest.raises(AttributeError, match=r"loss is a method that fit minimises, .*; call compile without loss="):
        model.compile(keras.optimizers.Adam(0.02), loss="mse")
    with pytest.raises(AttributeError, match=r"RNNSearch: loss is a method that fit minimises"):
        model.loss = model.logits
    model.compile(keras.optimizers.Adam(0.02))
    with quick():
        before = model.loss(*sentences).numpy().mean()
    losses = model.fit(data.repeat(5), epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[0] < before
    assert losses[-1] < 0.5 * before
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.iterations == 15
    with quick():  # each method, and each model, has a graph of its own, of seconds
        np.testing.assert_allclose(model.evaluate(data, verbose=0), model.loss(*sentences).numpy().mean(), rtol=1e-5)
        losses = [[copy.train_on_batch(sentences) for _ in range(2)] for copy in (model, again)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "zero rnn", "transformer layer"])
@pytest.mark.slow
def test_the_gradients_of_a_function_compiled_by_xla(kind):
    model = model_of(kind)
    sentences, weights = batch(model.config), model.by_name()

    def gradients_of(*sentences):
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(model.loss(*sentences))
        return list(map(tf.convert_to_tensor, tape.gradient(mean, list(weights.values()))))

    compiled = tf.function(gradients_of, jit_compile=True)(*map(tf.constant, sentences))
    wanted = exact_gradients(model.config, arrays_of(model), sentences)
    assert weights.keys() == wanted.keys()
    sizes = {name: np.linalg.norm(gradient) for name, gradient in wanted.items()}
    for name, gradient in zip(weights, compiled, strict=True):  # some are nothing but a rounding of others
        bound = 1e-4 * sizes[name] + 2**-24 * max(sizes.values())
        assert np.linalg.norm(gradient.numpy() - wanted[name]) <= bound, name


@pytest.mark.parametrize("kind", ["tied decoder", "transformer rms"])
def test_a_graph_drops_what_eager_mode_drops(kind):
    """By the seed of the model."""
    rates = WITH_DROPOUT if kind == "tied decoder" else dict.fromkeys(WITHOUT_DROPOUT, 0.3)
    model = model_of(kind, **rates)
    losses = []
    for eagerly in (False, True):
        tf.config.run_functions_eagerly(eagerly)
        model.seed.state.assign([3, 0])
        losses += [model.loss(*batch(model.config), training=True).numpy() for _ in range(2)]
    tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)


@pytest.mark.parametrize(("norm", "compiled"), [("layer", False), ("rms", True)])
def test_cells_in_a_graph_that_knows_no_lengths(norm, compiled):
    """Also compiled by XLA, with the gradients."""
    pytest.importorskip("torch")
    from torch_nematus import pull_back

    weights = weights_of("gru", norm)
    parameters = {name: tf.constant(value, "float32") for name, value in weights.items()}

    def step(x, mask):
        with tf.GradientTape() as tape:
            inputs = (x, tf.zeros((tf.shape(x)[1], STATE)), parameters)
            tape.watch(inputs)
            states = nematus.gru(*inputs, mask=mask, norm=norm)
        return tape.gradient(states, inputs)

    specs = tf.TensorSpec((None, None, SIZE)), tf.TensorSpec((None, None))
    compiled_step = tf.function(step, jit_compile=compiled, input_signature=specs)
    x, h0, mask = sequence()
    for length in (LENGTH, 2):
        result = compiled_step(tf.constant(x[:length], "float32"), tf.constant(mask[:length], "float32"))
        inputs, dh = (x[:length], 0 * h0, weights), np.ones((length, BATCH, STATE))
        wanted = pull_back("gru", inputs, (dh,), mask=mask[:length], norm=norm)[1]
        tf.nest.map_structure(lambda one, other: check_close(one.numpy(), other, "float32"), result, tuple(wanted))


def test_a_second_call_of_a_cell_traces_nothing():
    """For another length and batch; without a mask it does, once more."""
    x, h0, mask = map(tf.constant, sequence())
    weights = {name: tf.constant(value) for name, value in weights_of("gru", "none").items()}
    calls = [(x, h0, mask), (x[:2, :1], h0[:1], mask[:2, :1]), (x, h0, None)]
    before, counts = len(graphs.traced), []
    for x, h0, mask in calls:
        nematus.gru(x, h0, weights, mask=mask, partial=0.37)  # which no other test has
        own = list(graphs.traced.values())[before:]
        counts.append([graph.experimental_get_tracing_count() for graph in own])
    assert counts == [[1], [1], [1, 1]]


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", LAYERS)
def test_a_layer_is_its_function_and_its_cell_step_by_step(cell, norm):
    """In Keras's own loop: from any state, with a mask, from the end, in all that it returns.

    A word stands at both ends: before the first one Keras's outputs are zeros, and ours the states.
    """
    x, h0, _ = sequence()
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0, 1]], bool)
    norms, own = {"norm": norm, "partial": 0.4}, {"biases": ("input", "outside")} if cell == "NematusGRU" else {}
    of_function = {**norms, **own, "masking": "carry"} if own else norms
    weights = weights_of(LAYERS[cell], norm, ("input", "outside"))
    for options in ({"return_sequences": True}, {"go_backwards": True}, {"zero_output_for_mask": True}):
        layer = getattr(nematus, cell)(STATE, **norms, **own, return_state=True, dtype="float64", **options)
        layer.build((None, None, SIZE))
        assert layer.by_name().keys() == weights.keys()
        for name, value in weights.items():
            layer.by_name()[name].assign(value)
        steps = keras.layers.RNN(layer.cell, dtype="float64", return_state=True, **options)
        state = [h0, 2 * h0][: len(layer.state_size)]
        for inputs in ({"mask": mask}, {"mask": mask, "initial_state": state}, {}):
            results = layer(x.swapaxes(0, 1), **inputs)
            for result, wanted in zip(results, steps(x.swapaxes(0, 1), **inputs), strict=True):
                np.testing.assert_allclose(result.numpy(), wanted.numpy(), rtol=0, atol=1e-12)
            if "return_sequences" in options:
                states = inputs.get("initial_state", [0 * h0] * len(state))
                words = mask.T if "mask" in inputs else None
                wanted = getattr(golden, LAYERS[cell])(x, *states, weights, mask=words, **of_function)
                check_close(results[0].numpy(), (wanted[0] if cell == "LSTM" else wanted).swapaxes(0, 1))


@pytest.mark.filterwarnings(NUMPY_2)
@pytest.mark.slow
def test_a_model_with_layers_learns_is_saved_and_comes_back(tmp_path):
    """A functional model with masked words, a layer for each direction and one more; to the bit."""
    keras.utils.set_random_seed(0)
    ids = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [2, 2, 0, 0], [3, 1, 4, 2]])
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, SIZE, mask_zero=True)(inputs)
    first = nematus.NematusGRU(STATE, biases=("input", "state"), norm="rms", return_sequences=True)
    x = nematus.LSTM(STATE, norm="prms", partial=0.5)(keras.layers.Bidirectional(first)(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.05), loss="mse")
    losses = model.fit(ids, ids[:, 0], epochs=20, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
    padded = np.concatenate((ids, 0 * ids), axis=1)
    np.testing.assert_allclose(model(padded).numpy(), model(ids).numpy(), atol=1e-6)


@pytest.mark.parametrize("cell", LAYERS)
def test_a_layer_is_made_anew_from_its_config(cell):
    options = {"biases": ("input", "state")} if cell == "NematusGRU" else {}
    options |= {"norm": "prms", "partial": 0.5, "go_backwards": True, "return_state": True, "dtype": "float64"}
    layer = getattr(nematus, cell)(STATE, **options)
    for part in (layer, layer.cell, keras.layers.RNN(layer.cell)):
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(part))
        assert again.get_config() == part.get_config()
        made, wanted = (getattr(one, "cell", one) for one in (again, part))
        assert made.norms == {"norm": "prms", "partial": 0.5}
        assert made.shapes(SIZE) == wanted.shapes(SIZE)


def test_mixed_precision():
    """Weights in float32, arithmetic in bfloat16.

    In each step x, W, their product and its norm are rounded to 2^-9 of numbers of at most sqrt(4 STATE), the largest
    element of a normalised row; h changes by no more than they do.
    """
    keras.utils.set_random_seed(0)
    x, _, _ = sequence()
    layer = nematus.LSTM(STATE, norm="rms", dtype="mixed_bfloat16")
    result = layer(x.swapaxes(0, 1))
    assert result.dtype == "bfloat16"
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    bound = LENGTH * 4 * 2.0**-9 * (4 * STATE) ** 0.5
    for norm in ("rms", "none"):
        wanted = golden.lstm(x, *np.zeros((2, BATCH, STATE)), arrays_of(layer), norm=norm)[0][-1]
        assert (np.abs(result.numpy().astype(float) - wanted).max() < bound) == (norm == "rms")
