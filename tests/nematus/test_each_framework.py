"""What is special to Nematus's models in each framework: graphs and compilers, files of Keras, training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_models import CONFIGS, WITHOUT_DROPOUT, batch, random_parameters, same
from programs import printed

from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.names import variables

in_torch, in_tf, in_flax = (pytest.mark.parametrize("adapter", [key], indirect=True) for key in ("torch", "tf", "flax"))


def model_of(adapter: Any, kind: str, *, training: bool = False, **changes: Any) -> Any:
    """A model of the framework itself in float32, without dropout."""
    config = CONFIGS[kind].replace(**{**WITHOUT_DROPOUT, **changes})
    return adapter.Model(config, random_parameters(config, "float32"), training=training).own


@in_torch
@pytest.mark.parametrize("kind", ["rms", "transformer rms"])
def test_the_loss_compiles_in_one_piece(adapter: Any, kind: str) -> None:
    """In training too, and its gradients are those of torch.func. Short sentences, as the graph is as long as they."""
    torch, model = adapter.torch, model_of(adapter, kind, training=True)
    x, x_mask, y, y_mask = map(torch.as_tensor, batch(model.config))
    sentences, parameters = (x[:, :1], x_mask[:1], y[:2], y_mask[:2]), dict(model.named_parameters())
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(*sentences)
    torch.testing.assert_close(loss, model.loss(*sentences))
    gradients = torch.autograd.grad(loss.mean(), list(parameters.values()))
    wanted = torch.func.grad(lambda p: torch.func.functional_call(model, p, sentences).mean())(parameters)
    torch.testing.assert_close(list(gradients), list(wanted.values()))


@in_flax
def test_a_program_is_as_long_for_long_sentences_and_of_full_precision(adapter: Any) -> None:
    """One step for all words; accelerators multiply matrices in fewer bits where nothing is said."""
    jax, programs = adapter.jax, []
    for kind, changes in (("deep", {"rnn_lexical_model": True}), ("transformer tied all", {})):
        model = model_of(adapter, kind, **changes)
        graph, state, rest = adapter.nnx.split(model, adapter.nnx.Param, ...)
        loss = lambda state, *sentences: adapter.nnx.merge(graph, state, rest).loss(*sentences).mean()  # noqa: B023, E731
        for repeated in (1, 3):
            sentences = (np.concatenate([part] * repeated, axis=part.ndim - 2) for part in batch(model.config))
            x, x_mask, y, y_mask = sentences
            program = jax.make_jaxpr(jax.grad(loss))(state, x, x_mask.astype("f4"), y, y_mask.astype("f4"))
            programs.append(str(program))
    assert programs[0].count(" = ") == programs[1].count(" = ")
    for program in programs:
        highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert program.count("dot_general[") == highest > 0


@in_flax
def test_dropout_is_drawn_from_the_stream_of_the_model(adapter: Any) -> None:
    """Named dropout, anew at every call, also within nnx.jit; a model that was made without one is not trained."""
    nnx, config = adapter.nnx, CONFIGS["layer"].replace(rnn_dropout_hidden=0.3)
    parameters, sentences = random_parameters(config, "float32"), batch(config)
    streams = nnx.Rngs(0, dropout=1), nnx.Rngs(2, dropout=1), None
    first, other, without = (adapter.nematus.RNNSearch(config, parameters, rngs=rngs) for rngs in streams)
    for model in (first, other, without):
        model.train()
    loss = first.loss(*sentences)
    np.testing.assert_array_equal(loss, other.loss(*sentences))
    assert abs(first.loss(*sentences) - loss).min() > 1e-3
    compiled = nnx.jit(lambda model: model(*sentences))
    assert abs(compiled(first) - compiled(first)).min() > 1e-3
    with pytest.raises(ValueError, match=r"dropout: rngs is None, expected an nnx.Rngs in training"):
        without.loss(*sentences)


@in_tf
@pytest.mark.parametrize(("kind", "heads"), [("plain", 8), ("zero rela tied all", 2)])
def test_a_graph_serves_all_sentences(adapter: Any, kind: str, heads: int) -> None:
    model = model_of(adapter, kind, transformer_num_heads=heads)
    in_numpy = model_class("numpy", model.config)(model.config, random_parameters(model.config, "float32"))
    x, x_mask, y, y_mask = batch(model.config)
    for sentences in ((x, x_mask, y, y_mask), (x[:, :2, 2:], x_mask[:2, 2:], y[:, 2:], y_mask[:, 2:])):
        for _ in range(2):
            np.testing.assert_allclose(model.loss(*sentences).numpy(), in_numpy.loss(*sentences), rtol=1e-5)
        result, wanted = (one.translate(*sentences[:2], 2, 4) for one in (model, in_numpy))
        np.testing.assert_array_equal(result.sequences, wanted.sequences)
        np.testing.assert_allclose(result.scores, wanted.scores, rtol=1e-4)
    compiled = adapter.tf.function(model.loss, jit_compile=True)
    np.testing.assert_allclose(compiled(*sentences).numpy(), in_numpy.loss(*sentences), rtol=1e-5)
    assert len(model.graphs.traced) == 3  # the loss; what comes before the first step of a search, and a step
    assert {graph.experimental_get_tracing_count() for graph in model.graphs.traced.values()} == {1}


@in_tf
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("kind", ["deep", "tied all", "transformer smoothed labels"])
def test_a_model_is_saved_and_comes_back(adapter: Any, kind: str, tmp_path: Path) -> None:
    """To the bit, and with the names of Nematus; in a new process, too, with what docs/porting.md says to import."""
    model, keras, tf = model_of(adapter, kind), adapter.keras, adapter.tf
    rows, sentences = variables(model.config), batch(model.config)
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
        arrays = {name: weight.numpy() for name, weight in copy.by_name().items()}
        same(arrays, random_parameters(model.config, "float32"))
    np.testing.assert_array_equal(again(sentences, training=True), model.loss(*sentences, training=True))
    with pytest.raises(ValueError, match=r"the file lacks \['.*'\].*expected the weights by their names"):
        model_of(adapter, "prelu").load_weights(tmp_path / "model.weights.h5")
    if kind == "tied all":
        program = "import keras, rmsnorm.nematus.tf_models as models; from sys import argv;"
        program += "print(type(keras.saving.load_model(argv[1])) is models.RNNSearch)"
        assert printed("-c", program, tmp_path / "model.keras").endswith("True\n")


@in_tf
def test_fit_makes_the_loss_fall(adapter: Any) -> None:
    """To half in some steps, in a graph; the loss is what the method says."""
    keras, tf, model = adapter.keras, adapter.tf, model_of(adapter, "tied decoder")
    sentences = tuple(map(tf.constant, batch(model.config)))
    with pytest.raises(AttributeError, match=r"loss is a method that fit minimises, .*; call compile without loss="):
        model.compile(keras.optimizers.Adam(0.02), loss="mse")
    model.compile(keras.optimizers.Adam(0.02))
    with adapter.quick():
        before = model.loss(*sentences).numpy().mean()
    data = tf.data.Dataset.from_tensors((sentences,)).repeat(5)
    losses = model.fit(data, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[0] < before
    assert losses[-1] < 0.5 * before
    with adapter.quick():  # each method has a graph of its own, of seconds
        np.testing.assert_allclose(model.evaluate(data, verbose=0), model.loss(*sentences).numpy().mean(), rtol=1e-5)


@in_tf
def test_a_graph_drops_what_eager_mode_drops(adapter: Any) -> None:
    """By the seed of the model, and anew at every call."""
    model, losses = model_of(adapter, "transformer rms", **dict.fromkeys(WITHOUT_DROPOUT, 0.3)), []
    for where in (nullcontext(), adapter.quick()):
        model.seed.state.assign([3, 0])
        with where:
            losses += [model.loss(*batch(model.config), training=True).numpy() for _ in range(2)]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    assert abs(losses[0] - losses[1]).max() > 1e-3
