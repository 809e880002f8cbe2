"""What is special to Nematus's models and cells in TensorFlow: graphs, Keras's layers, training and files."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from nematus_models import WITHOUT_DROPOUT, batch, config_of, random_parameters, same

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
from tf_nematus import Model, quick  # noqa: E402

from rmsnorm.nematus.backends import model_class  # noqa: E402
from rmsnorm.nematus.names import variables  # noqa: E402

NUMPY_2 = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"  # where Keras saves


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
    if kind != "transformer rms":  # which takes long to compile, and is in zero's
        compiled = tf.function(model.loss, jit_compile=True)
        np.testing.assert_allclose(compiled(*sentences).numpy(), in_numpy.loss(*sentences), rtol=1e-5)
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
def test_a_new_process_loads_a_model_of_keras(tmp_path):
    """With what the page names: ``rmsnorm.nematus.tf_models`` imported."""
    model = model_of("plain")
    model.save(tmp_path / "model.keras")
    sentences = batch(model.config)
    np.savez(tmp_path / "batch.npz", *sentences)
    program = """
import sys, numpy, keras, rmsnorm.nematus.tf_models
model = keras.saving.load_model(sys.argv[1] + "/model.keras")
print(*model.loss(*numpy.load(sys.argv[1] + "/batch.npz").values()).numpy())
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    np.testing.assert_allclose([*map(float, done.stdout.split())], model.loss(*sentences), rtol=1e-5)


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


def test_a_graph_drops_what_eager_mode_drops():
    """By the seed of the model, and anew at every call."""
    model, losses = model_of("transformer rms", **dict.fromkeys(WITHOUT_DROPOUT, 0.3)), []
    for where in (nullcontext(), quick()):
        model.seed.state.assign([3, 0])
        with where:
            losses += [model.loss(*batch(model.config), training=True).numpy() for _ in range(2)]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    assert abs(losses[0] - losses[1]).max() > 1e-3
