"""Nematus's models in Keras: against runs of Nematus, against the golden, and as Keras models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nematus_models import (
    KINDS,
    TRANSFORMERS,
    batch,
    check_beams,
    check_gradients,
    config_of,
    random_parameters,
    reference,
    transformer_of,
)

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from rmsnorm.nematus.names import variables  # noqa: E402
from rmsnorm.nematus.numpy import rnnsearch, transformer  # noqa: E402
from rmsnorm.nematus.numpy.output import log_softmax  # noqa: E402
from rmsnorm.nematus.tf import parameters as tf_parameters  # noqa: E402
from rmsnorm.nematus.tf.rnnsearch import RNNSearch  # noqa: E402
from rmsnorm.nematus.tf.transformer import Transformer  # noqa: E402

# Two computations of one thing in another order: logits are below 10, and so are some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}
QUIET = dict.fromkeys([f"transformer_dropout_{part}" for part in ("embeddings", "residual", "relu", "attn")], 0.0)
RATES = {f"rnn_dropout_{part}": 0.3 for part in ("embedding", "hidden", "source", "target")}
NUMPY_2 = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"  # where Keras saves


@pytest.fixture
def eagerly() -> Any:
    """Without graphs, whose tracing takes longer than short sequences."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def pair(kind: str, dtype: str = "float64", **changes: Any) -> tuple[Any, Any]:
    """The golden and its mirror; a Transformer without dropout."""
    if kind.startswith("transformer "):
        config = transformer_of(kind.removeprefix("transformer ")).replace(**QUIET)
        given = random_parameters(config, dtype)
        return transformer.Transformer(config, given), Transformer(config, given)
    config = config_of(kind).replace(**changes)
    given = random_parameters(config, dtype)
    return rnnsearch.RNNSearch(config, given), RNNSearch(config, given)


def loss_and_gradients(model: Any, *sentences: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Of the mean loss, by name; those of embeddings as arrays, too."""
    with tf.GradientTape() as tape:
        loss = model.loss(*sentences, **options)
        mean = tf.reduce_mean(loss)
    weights = model.by_name()
    found = tape.gradient(mean, list(weights.values()))
    return loss, {name: tf.convert_to_tensor(each) for name, each in zip(weights, found, strict=True)}


def check_all_gradients(found: Any, wanted: dict[str, Any], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name].numpy() - gradient) <= bound * np.linalg.norm(gradient), name


@pytest.mark.parametrize(
    ("name", "norm", "eager"),
    [("A2s", "layer", False), ("A4", "rms", True), ("A7b", "rms", False), ("B", "rms", False)],
)
def test_what_nematus_computed(name: str, norm: str, eager: bool, request: pytest.FixtureRequest) -> None:
    """float32 of TensorFlow: logits to 2e-5, gradients to 1e-4 of their norm, translations token for token."""
    if eager:
        request.getfixturevalue("eagerly")
    run = reference(name)
    config, given, own = run.model(norm)
    model: Any = (Transformer if name == "A7b" else RNNSearch)(config, given)
    x, x_mask, y, y_mask = run.sentences
    words = y_mask.T > 0 if name == "A7b" else y_mask > 0
    logits = model.logits(x, x_mask, y)
    assert logits.dtype == "float32"
    assert abs(logits.numpy() - run.arrays["logits"])[words].max() <= 2e-5
    loss, found = loss_and_gradients(model, x, x_mask, y, y_mask)
    np.testing.assert_allclose(loss.numpy(), run.arrays["loss_per_sentence"], rtol=1e-5)
    check_gradients({name: value.numpy() for name, value in found.items()}, own, run.probes)
    assert check_beams(run, model, 2e-5) == (2 if name == "B" else 4)


@pytest.mark.usefixtures("eagerly")
def test_what_theano_nematus_computed() -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, given, _ = run.model("rms")
    given = {name: value.astype("float64") for name, value in given.items()}
    x, x_mask, y, y_mask = run.sentences
    for dialect in ("theano", "tensorflow-v0.3"):
        model = RNNSearch(config.replace(dialect=dialect), given)
        assert abs(model.logits(x, x_mask, y).numpy() - run.arrays["theano_logits"])[y_mask > 0].max() <= 1e-12
        losses = model.loss(x, x_mask, y, y_mask).numpy()
        np.testing.assert_allclose(losses, run.arrays["theano_loss"], rtol=1e-12)


def check_golden(kind: str, dtype: str, **changes: Any) -> tuple[Any, Any]:
    golden, model = pair(kind, dtype, **changes)
    x, x_mask, y, y_mask = batch(golden.config)
    training = {"training": True} if kind.startswith("transformer ") else {}

    def close(found: Any, wanted: Any) -> None:
        assert found.dtype == dtype
        scale = max(1.0, abs(wanted).max())
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=EXACT[dtype] * scale)

    close(model.encode(x, x_mask), golden.encode(x, x_mask))
    close(model.logits(x, x_mask, y), golden.logits(x, x_mask, y))
    if not training:
        close(model.logits(x, x_mask, y, stepwise=True), golden.logits(x, x_mask, y, stepwise=True))
    loss, found = loss_and_gradients(model, x, x_mask, y, y_mask, **training)
    close(loss, golden.loss(x, x_mask, y, y_mask, **training))
    check_all_gradients(found, golden.gradients(x, x_mask, y, y_mask, **training), GRADIENT[dtype])
    return golden, model


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("kind", [*KINDS, *(f"transformer {kind}" for kind in TRANSFORMERS)])
def test_everything_is_the_goldens(kind: str) -> None:
    golden, model = check_golden(kind, "float64")
    x, x_mask, _, _ = batch(golden.config)
    for beam_size, alpha in (1, 0.0), (3, 0.5):
        found = model.translate(x, x_mask, beam_size, 6, normalization_alpha=alpha)
        wanted = golden.translate(x, x_mask, beam_size, 6, normalization_alpha=alpha)
        np.testing.assert_array_equal(found.sequences, wanted.sequences)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plain", {"dialect": "theano", "rnn_enc_depth": 2, "rnn_dec_depth": 2, "rnn_lexical_model": True}),
        ("tied mixture", {"dialect": "tensorflow-v0.3", "rnn_dec_depth": 3, "rnn_dec_deep_context": True}),
        ("transformer smoothed labels", {}),
    ],
)
def test_in_graphs_everything_is_the_goldens(kind: str, changes: dict[str, Any]) -> None:
    check_golden(kind, "float32", **changes)


def test_a_graph_serves_all_sentences() -> None:
    golden, model = pair("plain", "float32")
    x, x_mask, y, y_mask = batch(golden.config)
    for sentences in ((x, x_mask, y, y_mask), (x[:, :2, 2:], x_mask[:2, 2:], y[:, 2:], y_mask[:, 2:])):
        for _ in range(2):
            np.testing.assert_allclose(model.loss(*sentences).numpy(), golden.loss(*sentences), rtol=1e-5)
        model.translate(*sentences[:2], 2, 4)
    assert len(model.graphs.traced) == 3  # the loss; what comes before the first step of a search, and a step
    assert {each.experimental_get_tracing_count() for each in model.graphs.traced.values()} == {1}


@pytest.mark.usefixtures("eagerly")
@pytest.mark.filterwarnings(NUMPY_2)
@pytest.mark.parametrize("kind", ["deep", "tied all", "transformer tied all"])
def test_a_model_is_saved_and_comes_back(kind: str, tmp_path: Any) -> None:
    """To the bit, and with the names of Nematus."""
    golden, model = pair(kind, "float32")
    assert sorted(weight.name for weight in model.weights) == [
        row.name.replace("/", ".") for row in variables(golden.config)
    ]
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.models.load_model(tmp_path / "model.keras")
    zeros = {row.name: np.zeros(row.shape, np.float32) for row in variables(golden.config)}
    fresh = type(model)(golden.config, zeros)
    fresh.load_weights(tmp_path / "model.weights.h5")
    restored = type(model)(golden.config, zeros)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
    x, x_mask, y, _ = batch(golden.config)
    wanted = model.logits(x, x_mask, y).numpy()
    for each in (again, fresh, restored):
        assert each.config == golden.config
        assert type(each) is type(model)
        np.testing.assert_array_equal(each.logits(x, x_mask, y).numpy(), wanted)
        for name, weight in each.by_name().items():
            np.testing.assert_array_equal(weight.numpy(), golden.parameters[name].astype(np.float32), err_msg=name)
    other = RNNSearch(config_of("prelu"), random_parameters(config_of("prelu"), "float32"))
    with pytest.raises(ValueError, match=r"the file lacks \['.*'\].*expected the weights by their names"):
        other.load_weights(tmp_path / "model.weights.h5")


def test_a_model_does_not_share_memory_with_what_it_is_made_of() -> None:
    config = config_of("plain")
    for given in (random_parameters(config), {k: tf.constant(v) for k, v in random_parameters(config).items()}):
        before = {name: np.asarray(value).copy() for name, value in given.items()}
        for weight in RNNSearch(config, given).weights:
            weight.assign_add(tf.ones(weight.shape, weight.dtype))
        for name, value in given.items():
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.filterwarnings(NUMPY_2)
def test_fit_makes_the_loss_fall(tmp_path: Any) -> None:
    """To half in some steps; the loss is what the method says; a loaded model goes on as the one that was saved."""
    _, model = pair("tied decoder", "float32")
    sentences = tuple(map(tf.constant, batch(model.config)))
    data = tf.data.Dataset.from_tensors((sentences,))
    model.compile(keras.optimizers.Adam(0.02))
    before = model.loss(*sentences).numpy().mean()
    losses = model.fit(data.repeat(5), epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[0] < before
    assert losses[-1] < 0.5 * before
    np.testing.assert_allclose(model.evaluate(data, verbose=0), model.loss(*sentences).numpy().mean(), rtol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.iterations == 15
    losses = [[each.train_on_batch(sentences) for _ in range(2)] for each in (model, again)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "transformer layer"])
def test_the_gradients_of_a_compiled_function(kind: str) -> None:
    """By XLA."""
    golden, model = pair(kind, "float32")
    sentences = batch(golden.config)
    function = tf.function(lambda *each: loss_and_gradients(model, *each), jit_compile=True)
    loss, found = function(*map(tf.constant, sentences))
    np.testing.assert_allclose(loss.numpy(), golden.loss(*sentences), rtol=1e-5)
    check_all_gradients(found, golden.gradients(*sentences), GRADIENT["float32"])


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("kind", ["mixture", "transformer rms"])
def test_a_model_in_bfloat16(kind: str) -> None:
    """Within some roundings of 2^-9 of logits below 10; losses are of float32."""
    golden, model = pair(kind, "float32")
    x, x_mask, y, y_mask = batch(golden.config)
    model = type(model)(golden.config, {k: tf.cast(v, tf.bfloat16) for k, v in golden.parameters.items()})
    logits = model.logits(x, x_mask, y)
    wanted = golden.logits(x, x_mask, y)
    assert logits.dtype in ("bfloat16", "float32")  # of a mixture log-probabilities
    assert abs(logits.numpy().astype(float) - wanted).max() <= 0.02 * abs(wanted).max() + 0.1
    assert model.loss(x, x_mask, y, y_mask).dtype == "float32"
    assert np.isfinite(model.translate(x, x_mask, 2, 4).scores).all()


# What Nematus drops, read from its rnn_model.py and layers.py.
OF_WORDS = [
    "decoder/base/gru0/input_to_gates",
    "decoder/base/gru0/input_to_proposal",
    "decoder/lexical",
    "decoder/next_word_predictor/hidden_to_logits/W",
    "decoder/next_word_predictor/lexical_to_logits/W",
    "decoder/next_word_predictor/prev_emb_to_hidden/W",
    *(
        f"encoder/{stack}-stack/level0/gru0/input_to_{part}"
        for stack in ("backward", "forward")
        for part in ("gates", "proposal")
    ),
]


def dropping(monkeypatch: pytest.MonkeyPatch, config: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A model in float64, and the masks of its last call, made so that none is 1 everywhere."""
    made: dict[str, Any] = {}
    original = tf_parameters.Dropout.__call__

    def record(self: Any, name: str, x: Any, *, whole: bool = False) -> Any:
        y = original(self, name, x, whole=whole)
        if self.rates[name]:
            made[name] = y / tf.where(x == 0, tf.ones_like(x), x) if whole else self.masks[name]
        return y

    monkeypatch.setattr(tf_parameters.Dropout, "__call__", record)
    return RNNSearch(config, random_parameters(config)), lambda: {name: mask.numpy() for name, mask in made.items()}


@pytest.mark.usefixtures("eagerly")
def test_what_is_dropped_with_which_rate() -> None:
    """Of every matrix the input, with a mask of its own; scores of the attention stay."""
    config = config_of("deep").replace(rnn_lexical_model=True)
    matrices = {row.name for row in variables(config) if len(row.shape) == 2}
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    wanted = {
        "embedding": set(OF_WORDS),
        "hidden": matrices - set(OF_WORDS),
        "source": {"source words"},
        "target": {"target words"},
    }
    for part, names in wanted.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            model, masks = dropping(monkeypatch, config.replace(**{f"rnn_dropout_{part}": 0.3}))
            loss = model.loss(*batch(config), training=True).numpy()
            assert set(masks()) == names
            for name, mask in masks().items():
                np.testing.assert_allclose(mask * (mask - 1 / 0.7), 0, atol=1e-12, err_msg=name)
            assert abs(loss - model.loss(*batch(config)).numpy()).max() > 1e-6


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(("kind", "seed"), [("deep", 1), ("mixture", 0), ("factors", 0)])
def test_a_dropped_input_is_a_dropped_row_of_the_matrix(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds for one sentence, and only if all steps have the same mask; words are dropped as their embeddings."""
    config = config_of(kind).replace(**{**RATES, "rnn_dropout_source": 0.5, "rnn_dropout_target": 0.5})
    model, masks = dropping(monkeypatch, config)
    words = np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    model.seed.state.assign([seed, 0])
    loss = model.loss(*sentences, training=True)
    found = masks()
    assert all({0.0} < set(found[f"{side} words"][:, 0, 0]) for side in ("source", "target"))
    given = random_parameters(config)
    for name, mask in found.items():
        if name in given:
            given[name] *= mask.T
    for table, ids, mask in (
        *((f"encoder/embedding/embeddings{f'_{i}' if i else ''}", each, "source words") for i, each in enumerate(x)),
        ("decoder/embedding/embeddings", y[:-1], "target words"),
    ):
        for word, factor in zip(ids[:, 0], found[mask][:, 0, 0], strict=True):
            given[table][word] *= factor
    np.testing.assert_allclose(RNNSearch(config, given).loss(*sentences).numpy(), loss.numpy(), rtol=1e-12)


@pytest.mark.parametrize("kind", ["tied decoder", "transformer rms"])
def test_dropout_only_in_training(kind: str) -> None:
    """In a graph as without one, by the seed of the model, another time anew; a translation drops nothing."""
    golden, quiet = pair(kind, "float32")
    rates = RATES if kind == "tied decoder" else dict.fromkeys(QUIET, 0.3)
    model = type(quiet)(golden.config.replace(**rates), random_parameters(golden.config, "float32"))
    x, x_mask, y, y_mask = batch(golden.config)
    wanted = quiet.loss(x, x_mask, y, y_mask).numpy()
    np.testing.assert_array_equal(model.loss(x, x_mask, y, y_mask).numpy(), wanted)
    translations = [each.translate(x, x_mask, 2, 4) for each in (model, quiet)]
    np.testing.assert_array_equal(translations[0].scores, translations[1].scores)
    losses = []
    for eagerly in (False, True):
        tf.config.run_functions_eagerly(eagerly)
        model.seed.state.assign([3, 0])
        losses += [model.loss(x, x_mask, y, y_mask, training=True).numpy() for _ in range(2)]
    tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    assert abs(losses[0] - wanted).min() > 1e-3
    assert abs(losses[0] - losses[1]).min() > 1e-3


@pytest.mark.usefixtures("eagerly")
def test_dropout_of_the_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a matrix, halved, is multiplied with or gives."""
    monkeypatch.setattr(keras.random, "dropout", lambda x, rate, seed: x * (1 - rate))
    plain = transformer_of("rms").replace(**QUIET)
    given = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    undropped = Transformer(plain, given).logits(x, x_mask, y).numpy()
    halved = {
        "transformer_dropout_residual": ("context_projection/dense_layer_weights", "ff_layer_2/dense_layer_weights"),
        "transformer_dropout_relu": ("ff_layer_1/dense_layer_weights",),
        "transformer_drophead": ("context_projection/dense_layer_weights",),
        "transformer_dropout_attn": ("context_projection/dense_layer_weights",),
    }
    for rate, ends in halved.items():
        same = {name: value / 2 if name.endswith(ends) else value for name, value in given.items()}
        if rate == "transformer_dropout_residual":
            same |= {name: same[name] / 2 for name in same if name.endswith("ff_layer_2/dense_layer_biases")}
        model = Transformer(plain.replace(**{rate: 0.5}), given)
        logits = model.logits(x, x_mask, y, training=True).numpy()
        np.testing.assert_allclose(logits, Transformer(plain, same).logits(x, x_mask, y).numpy(), rtol=0, atol=1e-12)
        assert abs(logits - undropped).max() > 0.1
        np.testing.assert_array_equal(model.logits(x, x_mask, y).numpy(), undropped)

    monkeypatch.setattr(keras.random, "dropout", lambda x, rate, seed: x * 0)
    model = Transformer(plain.replace(transformer_dropout_embeddings=0.5), given)
    logits = model.logits(x, x_mask, y, training=True).numpy()  # nothing is left of words and places
    np.testing.assert_allclose(logits, np.broadcast_to(logits[:1, :1], logits.shape))
    assert (model.logits(x, x_mask, y).numpy().std((0, 1)) > 0.01).all()


@pytest.mark.usefixtures("eagerly")
def test_what_the_transformer_drops_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads whole, attention by its weights."""
    shapes: dict[float, set[Any]] = {}

    def record(x: Any, rate: float, seed: Any) -> Any:
        shapes.setdefault(rate, set()).add(tuple(x.shape))
        return x

    monkeypatch.setattr(keras.random, "dropout", record)
    config = transformer_of("rms").replace(**QUIET).replace(transformer_drophead=0.25, transformer_dropout_attn=0.5)
    Transformer(config, random_parameters(config)).logits(*batch(config)[:3], training=True)
    assert shapes == {0.25: {(3, 2, 1, 1)}, 0.5: {(3, 2, 4, 4)}}


@pytest.mark.usefixtures("eagerly")
def test_smoothed_labels_of_the_transformer_only_in_training() -> None:
    golden, model = pair("transformer smoothed labels")
    sentences = batch(golden.config)
    for training in (True, False):
        wanted = golden.loss(*sentences, training=training)
        np.testing.assert_allclose(model.loss(*sentences, training=training).numpy(), wanted, rtol=1e-12)
        np.testing.assert_allclose(model(sentences, training=training).numpy(), wanted, rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_a_mixture_is_of_probabilities() -> None:
    _, model = pair("mixture")
    x, x_mask, y, _ = batch(model.config)
    logits = model.logits(x, x_mask, y).numpy()
    np.testing.assert_allclose(log_softmax(logits), logits, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_errors(kind: str) -> None:
    """As the golden's, for tensors as for arrays."""
    _, model = pair(kind)
    x, x_mask, y, y_mask = (tf.constant(each) for each in batch(model.config))
    with pytest.raises(ValueError, match=r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)"):
        model.encode(x[0], x_mask)
    with pytest.raises(TypeError, match=r"logits: x is dtype\('float32'\).*expected an array of integers"):
        model.logits(tf.cast(x, tf.float32), x_mask, y)
    with pytest.raises(ValueError, match=r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary"):
        model.loss(tf.where(x == tf.reduce_max(x), tf.constant(9, x.dtype), x), x_mask, y, y_mask)
    with pytest.raises(ValueError, match=r"loss: an id of y is -1, expected 0 to 7, the vocabulary"):
        model.loss(x, x_mask, y - 1, y_mask)
    with pytest.raises(ValueError, match=r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)"):
        model.translate(x, x_mask[1:])
    with pytest.raises(ValueError, match=r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y"):
        model.loss(x, x_mask, y, y_mask[:2])
    with pytest.raises(ValueError, match=r"logits: y is \(4, 2\), expected the shape \(length, 3\)"):
        model.logits(x, x_mask, y[:, :2])
    with pytest.raises(ValueError, match=r"translate: beam_size is 0, expected an integer >= 1"):
        model.translate(x, x_mask, 0)
    with pytest.raises(ValueError, match=r"translate: beam_size is 9, expected at most 8, the target vocabulary"):
        model.translate(x, x_mask, 9)
