"""Nematus's models in Flax: against runs of Nematus, against the golden, and as modules.

XLA takes seconds to compile a model, so most of this runs operation by operation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from flax import nnx  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm.nematus.flax import parameters as flax_parameters  # noqa: E402
from rmsnorm.nematus.flax import rnnsearch as flax_rnnsearch  # noqa: E402
from rmsnorm.nematus.flax import transformer as flax_transformer  # noqa: E402
from rmsnorm.nematus.flax.parameters import Parameters  # noqa: E402
from rmsnorm.nematus.flax.rnnsearch import RNNSearch  # noqa: E402
from rmsnorm.nematus.flax.transformer import Transformer  # noqa: E402
from rmsnorm.nematus.names import variables  # noqa: E402
from rmsnorm.nematus.numpy import rnnsearch, transformer  # noqa: E402
from rmsnorm.nematus.numpy.output import log_softmax  # noqa: E402

EXACT = 1e-12  # two float64 computations of one thing in another order: some hundred roundings of numbers below 10
GRADIENT = 1e-10  # relative to what a gradient adds up, numbers of both signs
QUIET = dict.fromkeys([f"transformer_dropout_{part}" for part in ("embeddings", "residual", "relu", "attn")], 0.0)
RATES = {f"rnn_dropout_{part}": 0.3 for part in ("embedding", "hidden", "source", "target")}


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def _op_by_op(_x64: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In float64, with the formula in place of rms_norm, which is some hundred operations there."""

    def formula(a: Any, gain: Any, offset: Any, *, variant: str, partial: float | None) -> Any:
        assert (variant, partial) == ("nematus", None)
        y = a / jnp.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * gain
        return y if offset is None else y + offset

    monkeypatch.setattr(flax_parameters, "rms_norm", formula)
    with jax.disable_jit():
        yield


def pair(kind: str, dtype: str = "float64", **changes: Any) -> tuple[Any, Any]:
    """The golden and its mirror; a Transformer in training, where it smooths labels, and without dropout."""
    if kind.startswith("transformer "):
        config = transformer_of(kind.removeprefix("transformer ")).replace(**{**QUIET, **changes})
        given = random_parameters(config, dtype)
        model = Transformer(config, given, rngs=nnx.Rngs(0))
        model.train()
        return transformer.Transformer(config, given), model
    config = config_of(kind).replace(**changes)
    given = random_parameters(config, dtype)
    return rnnsearch.RNNSearch(config, given), RNNSearch(config, given, rngs=nnx.Rngs(0))


def mean_loss(model: Any, *sentences: Any) -> tuple[Any, Any]:
    loss = model.loss(*sentences)
    return loss.mean(), loss


def by_name(gradients: Any) -> dict[str, Any]:
    return {"/".join(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(gradients)}


def close(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT * max(1.0, abs(np.asarray(wanted)).max()))


@pytest.mark.parametrize(("name", "norm"), [("A2s", "layer"), ("A4", "rms"), ("A7b", "rms"), ("B", "rms")])
def test_what_nematus_computed(name: str, norm: str) -> None:
    """float32 of TensorFlow: logits to 2e-5, gradients to 1e-4 of their norm, translations token for token."""
    run = reference(name)
    config, given, own = run.model(norm)
    model: Any = (Transformer if name == "A7b" else RNNSearch)(config, given)
    x, x_mask, y, y_mask = run.sentences
    words = y_mask.T > 0 if name == "A7b" else y_mask > 0
    logits = model.logits(x, x_mask, y)
    assert logits.dtype == jnp.float32
    assert abs(np.asarray(logits) - run.arrays["logits"])[words].max() <= 2e-5
    gradients, loss = nnx.grad(mean_loss, has_aux=True)(model, x, x_mask, y, y_mask)
    np.testing.assert_allclose(loss, run.arrays["loss_per_sentence"], rtol=1e-5)
    check_gradients(by_name(gradients), own, run.probes)
    assert check_beams(run, model, 2e-5) == (2 if name == "B" else 4)


@pytest.mark.usefixtures("_x64")
def test_what_theano_nematus_computed() -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, given, _ = run.model("rms")
    x, x_mask, y, y_mask = run.sentences
    wide = {name: value.astype(np.float64) for name, value in given.items()}
    for dialect in ("theano", "tensorflow-v0.3"):
        model = RNNSearch(config.replace(dialect=dialect), wide)
        logits, loss = nnx.jit(lambda model: (model.logits(x, x_mask, y), model.loss(x, x_mask, y, y_mask)))(model)
        assert abs(np.asarray(logits) - run.arrays["theano_logits"])[y_mask > 0].max() <= 1e-12
        np.testing.assert_allclose(loss, run.arrays["theano_loss"], rtol=1e-12)


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("kind", [*KINDS, *(f"transformer {kind}" for kind in TRANSFORMERS)])
def test_everything_is_the_goldens(kind: str) -> None:
    """Of the gradients the product with a random direction: they are JAX's own, forward as backward."""
    golden, model = pair(kind)
    x, x_mask, y, y_mask = batch(golden.config)
    training = {"training": True} if kind.startswith("transformer ") else {}
    close(model.encode(x, x_mask), golden.encode(x, x_mask))
    close(model.logits(x, x_mask, y), golden.logits(x, x_mask, y))
    if not training:
        close(model.logits(x, x_mask, y, stepwise=True), golden.logits(x, x_mask, y, stepwise=True))

    graph, state = nnx.split(model, nnx.Param, ...)[0], nnx.state(model, nnx.Param)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda value: jnp.asarray(rng.standard_normal(value.shape)), state)
    rest = nnx.state(model, nnx.RngState)
    loss, slope = jax.jvp(
        lambda state: nnx.merge(graph, state, rest).loss(x, x_mask, y, y_mask), (state,), (direction,)
    )
    close(loss, golden.loss(x, x_mask, y, y_mask, **training))
    gradients, along = golden.gradients(x, x_mask, y, y_mask, **training), by_name(direction)
    assert along.keys() == gradients.keys()
    products = [(along[name] * gradient).sum() for name, gradient in gradients.items()]
    assert abs(slope.mean() - sum(products)) <= GRADIENT * np.linalg.norm(products)

    translations = model.translate(x, x_mask, 3, 6, normalization_alpha=0.5)
    best = golden.translate(x, x_mask, 3, 6, normalization_alpha=0.5)
    np.testing.assert_array_equal(translations.sequences, best.sequences)
    np.testing.assert_allclose(translations.scores, best.scores, rtol=1e-12)


@pytest.mark.usefixtures("_op_by_op")
def test_a_mixture_is_of_probabilities() -> None:
    _, model = pair("mixture")
    x, x_mask, y, _ = batch(model.config)
    logits = np.asarray(model.logits(x, x_mask, y))
    np.testing.assert_allclose(log_softmax(logits), logits, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_op_by_op")
def test_smoothed_labels_of_the_transformer_only_in_training() -> None:
    golden, model = pair("transformer smoothed labels")
    sentences = batch(golden.config)
    for mode in (True, False):
        model.train() if mode else model.eval()
        close(model.loss(*sentences), golden.loss(*sentences, training=mode))


def test_a_program_is_as_long_for_long_sentences_and_of_full_precision() -> None:
    """One step for all words; accelerators multiply matrices in fewer bits where nothing is said."""
    config = config_of("deep").replace(rnn_lexical_model=True)
    model = RNNSearch(config, random_parameters(config, "float32"))
    _, other = pair("transformer tied all", "float32")
    programs: list[str] = []
    for repeated in (1, 3):
        x, x_mask, y, y_mask = (np.concatenate([each] * repeated, axis=each.ndim - 2) for each in batch(config))
        loss = jax.grad(lambda p, *sentences: flax_rnnsearch._loss(p, config, *sentences, None).mean())
        programs.append(str(jax.make_jaxpr(loss)(model._parameters(), x, x_mask.astype("f4"), y, y_mask.astype("f4"))))
    assert programs[0].count(" = ") == programs[1].count(" = ")
    x, x_mask, y, y_mask = batch(other.config)
    programs.append(str(jax.make_jaxpr(other.loss)(x, x_mask, y, y_mask)))
    for program in programs:
        highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert program.count("dot_general[") == highest > 0


@pytest.mark.parametrize("kind", ["layer", "transformer rms"])
def test_compiled_once_for_all_calls_of_one_shape(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a configuration that no other test has; so is every step of a translation, whatever came before it."""
    _, model = pair(kind, "float32", translation_maxlen=77)
    room: Any = flax_transformer if kind.startswith("transformer ") else flax_rnnsearch
    traced: list[Any] = []
    decode = room._decode
    monkeypatch.setattr(room, "_decode", lambda *given, **named: traced.append(1) or decode(*given, **named))
    x, x_mask, y, _ = batch(model.config)
    first = model.logits(x, x_mask, y)
    np.testing.assert_array_equal(model.logits(x, x_mask, y), first)
    assert len(traced) == 1
    model.translate(x, x_mask, 2, 6)
    assert len(traced) == 2


@pytest.mark.parametrize("kind", ["layer", "transformer rms"])
def test_training_makes_the_loss_fall(kind: str) -> None:
    """To half in some steps of optax, within nnx.jit; with other words dropped in every step."""
    optax = pytest.importorskip("optax")
    _, model = pair(kind, "float32", **({} if kind.startswith("transformer ") else {"rnn_dropout_hidden": 0.01}))
    model.train()
    sentences = batch(model.config)
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        (loss, _), gradients = nnx.value_and_grad(mean_loss, has_aux=True)(model, *sentences)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies by integers
            optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.rngs.count[...]) == (0 if kind.startswith("transformer ") else 15)


@pytest.mark.parametrize("kind", ["tied all", "transformer tied all"])
def test_a_state_has_the_names_of_nematus_and_comes_back(kind: str, tmp_path: Any) -> None:
    """Through orbax; a state without anything but parameters."""
    orbax = pytest.importorskip("orbax.checkpoint")
    golden, _ = pair(kind)
    given = random_parameters(golden.config, "float32")
    room: Any = Transformer if kind.startswith("transformer ") else RNNSearch
    graph, state = nnx.split(room(golden.config, given))
    assert sorted("/".join(path) for path, _ in nnx.to_flat_state(state)) == sorted(given)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
        checkpointer.wait_until_finished()
        fresh = nnx.merge(graph, checkpointer.restore(tmp_path / "model", jax.tree.map(jnp.zeros_like, state)))
    assert fresh.by_name().keys() == given.keys()
    for name, value in fresh.by_name().items():
        np.testing.assert_array_equal(value, given[name], err_msg=name)
    x, x_mask, _, _ = batch(golden.config)
    wanted = golden.encode(x, x_mask)
    np.testing.assert_allclose(fresh.encode(x, x_mask), wanted, rtol=0, atol=2e-5 * max(1.0, abs(wanted).max()))


def test_a_model_does_not_share_memory_with_what_it_is_made_of() -> None:
    config = config_of("plain")
    given = random_parameters(config, "float32")
    before = {name: value.copy() for name, value in given.items()}
    for source in (given, {name: jnp.asarray(value.copy()) for name, value in given.items()}):
        for value in RNNSearch(config, source).by_name().values():
            value.delete()  # as an optimizer does that is given the model away
        for name, value in source.items():
            np.testing.assert_array_equal(value, before[name])


def test_a_mapped_model() -> None:
    """Two models at once, each with gradients of its own, to float32's rounding."""
    config = config_of("plain")
    models = [RNNSearch(config, random_parameters(config, "float32", seed)) for seed in (0, 1)]
    sentences = batch(config)
    graph, state = nnx.split(models[0])
    stacked = jax.tree.map(lambda *each: jnp.stack(each), state, nnx.state(models[1]))
    gradient = jax.grad(lambda state: nnx.merge(graph, state).loss(*sentences).mean())
    found = by_name(jax.jit(jax.vmap(gradient))(stacked))
    for index, model in enumerate(models):
        for name, wanted in by_name(jax.jit(gradient)(nnx.state(model))).items():
            assert np.linalg.norm(found[name][index] - wanted) <= 1e-5 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("kind", ["mixture", "transformer rms"])
def test_a_model_in_bfloat16(kind: str) -> None:
    """Within some roundings of 2^-9 of logits below 10; losses are of float32."""
    golden, _ = pair(kind)
    x, x_mask, y, y_mask = batch(golden.config)
    given = {name: jnp.asarray(value, jnp.bfloat16) for name, value in golden.parameters.items()}
    model: Any = type(pair(kind, "float32")[1])(golden.config, given)
    logits, loss = nnx.jit(lambda model: (model.logits(x, x_mask, y), model.loss(x, x_mask, y, y_mask)))(model)
    wanted = golden.logits(x, x_mask, y)
    assert logits.dtype in (jnp.bfloat16, jnp.float32)  # of a mixture log-probabilities
    assert abs(np.asarray(logits, np.float64) - wanted).max() <= 0.02 * abs(wanted).max() + 0.1
    assert loss.dtype == jnp.float32


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


@pytest.fixture
def masks(_op_by_op: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those that a model has used."""
    found: dict[str, Any] = {}
    original = Parameters.drop

    def record(self: Any, name: str, x: Any) -> Any:
        mask = self.masks.get(self.scope + name)
        if mask is not None:
            found[self.scope + name] = np.asarray(mask)
        return original(self, name, x)

    monkeypatch.setattr(Parameters, "drop", record)
    return found


def test_what_is_dropped_with_which_rate(masks: dict[str, Any]) -> None:
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
    given = random_parameters(config)
    still = RNNSearch(config, given).loss(*batch(config))
    for part, names in wanted.items():
        masks.clear()
        model = RNNSearch(config.replace(**{f"rnn_dropout_{part}": 0.3}), given, rngs=nnx.Rngs(0))
        model.train()
        loss = model.loss(*batch(config))
        assert masks.keys() == names
        for name, mask in masks.items():
            assert set(mask.ravel().tolist()) <= {0.0, 1 / 0.7}, name
        assert len({mask.tobytes() for mask in masks.values()}) > len(masks) / 2, "masks of their own"
        assert abs(loss - still).min() > 1e-6


@pytest.mark.parametrize("kind", ["deep", "mixture", "factors", "tied decoder"])
def test_a_dropped_input_is_a_dropped_row_of_the_matrix(kind: str, masks: dict[str, Any]) -> None:
    """Which holds for one sentence, and only if all steps have the same mask; words are dropped as their embeddings."""
    config = config_of(kind).replace(**RATES)
    given = random_parameters(config)
    model = RNNSearch(config, given, rngs=nnx.Rngs(9))
    model.train()
    words = np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    loss = model.loss(*sentences)
    assert all({0.0} < set(masks[f"{side} words"].ravel().tolist()) for side in ("source", "target"))
    if kind == "tied decoder":  # of its hidden layer, which no matrix of its own follows
        assert masks["decoder/next_word_predictor/hidden_to_logits/W"].shape == (1, config.embedding_size)
        assert abs(loss - model.loss(*sentences)).min() > 1e-6
        return
    for name, mask in masks.items():
        if name in given:
            given[name] *= mask.T
    for table, ids, mask in (
        *((f"encoder/embedding/embeddings{f'_{i}' if i else ''}", each, "source words") for i, each in enumerate(x)),
        ("decoder/embedding/embeddings", y[:-1], "target words"),
    ):
        for word, factor in zip(ids[:, 0], masks[mask][:, 0, 0], strict=True):
            given[table][word] *= factor
    close(RNNSearch(config, given).loss(*sentences), loss)


def test_dropout_only_in_training() -> None:
    """Compiled; from the stream of the model, another mask at every call."""
    config = config_of("layer").replace(**RATES)
    given = random_parameters(config, "float32")
    model = RNNSearch(config, given, rngs=nnx.Rngs(0, dropout=1))
    quiet = RNNSearch(config_of("layer"), given)
    sentences = batch(config)
    wanted = quiet.loss(*sentences)
    np.testing.assert_array_equal(model.loss(*sentences), wanted)
    translations = quiet.translate(*sentences[:2], 3, 4)
    model.train()
    first = model.loss(*sentences)
    assert abs(first - wanted).min() > 1e-3
    assert abs(first - model.loss(*sentences)).min() > 1e-3
    np.testing.assert_array_equal(model.translate(*sentences[:2], 3, 4).scores, translations.scores)
    again = RNNSearch(config, given, rngs=nnx.Rngs(2, dropout=1))
    again.train()
    np.testing.assert_array_equal(again.loss(*sentences), first)
    without = RNNSearch(config, given)
    without.train()
    with pytest.raises(ValueError, match=r"dropout: rngs is None, expected an nnx.Rngs in training"):
        without.loss(*sentences)


@pytest.mark.usefixtures("_op_by_op")
def test_dropout_of_the_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a matrix, halved, is multiplied with or gives."""
    monkeypatch.setattr(
        flax_transformer, "_dropout", lambda key: lambda x, rate, shared=(): x if key is None else x * (1 - rate)
    )
    plain = transformer_of("rms").replace(**QUIET)
    given = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    undropped = Transformer(plain, given).logits(x, x_mask, y)
    halved = {
        "transformer_dropout_residual": ("context_projection/dense_layer_weights", "ff_layer_2/dense_layer_weights"),
        "transformer_dropout_relu": ("ff_layer_1/dense_layer_weights",),
        "transformer_dropout_attn": ("values_projection/dense_layer_weights",),
        "transformer_drophead": ("context_projection/dense_layer_weights",),
    }
    for rate, ends in halved.items():
        same = {name: value / 2 if name.endswith(ends) else value for name, value in given.items()}
        if rate == "transformer_dropout_residual":
            same |= {name: same[name] / 2 for name in same if name.endswith("ff_layer_2/dense_layer_biases")}
        model = Transformer(plain.replace(**{rate: 0.5}), given, rngs=nnx.Rngs(0))
        model.train()
        dropped = model.logits(x, x_mask, y)
        close(dropped, Transformer(plain, same).logits(x, x_mask, y))
        assert abs(dropped - undropped).max() > 0.1
        model.eval()
        np.testing.assert_array_equal(model.logits(x, x_mask, y), undropped)
    monkeypatch.setattr(
        flax_transformer, "_dropout", lambda key: lambda x, rate, shared=(): x if key is None or not rate else 0 * x
    )
    model = Transformer(plain.replace(transformer_dropout_embeddings=0.5), given, rngs=nnx.Rngs(0))
    model.train()
    logits = np.asarray(model.logits(x, x_mask, y))  # nothing is left of words and places
    np.testing.assert_allclose(logits, np.broadcast_to(logits[:1, :1], logits.shape), rtol=0, atol=EXACT)


def test_what_drops_in_the_transformer() -> None:
    """A quarter, the rest made larger; whole heads of sentences; another mask at every call; nothing without a key."""
    drop, ones = flax_transformer._dropout(jax.random.key(0)), jnp.ones((40, 5, 8, 6))
    first, heads = np.asarray(drop(ones, 0.25)), np.asarray(drop(ones, 0.25, shared=(1, 3)))
    for each, count in ((first, ones.size), (heads, 40 * 8)):
        assert set(each.ravel().tolist()) == {0.0, float(np.float32(4 / 3))}
        assert abs((each == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / count) ** 0.5
    assert (heads == heads[:, :1, :, :1]).all()
    assert (np.asarray(drop(ones, 0.25)) != first).any()
    assert flax_transformer._dropout(None)(ones, 0.25) is ones


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_errors(kind: str) -> None:
    """As the golden's, for JAX's arrays as for NumPy's."""
    _, model = pair(kind)
    x, x_mask, y, y_mask = (jnp.asarray(each) for each in batch(model.config))
    with pytest.raises(ValueError, match=r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)"):
        model.encode(x[0], x_mask)
    with pytest.raises(TypeError, match=r"logits: x is dtype\('float64'\).*expected an array of integers"):
        model.logits(x.astype(float), x_mask, y)
    with pytest.raises(ValueError, match=r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary"):
        model.loss(jnp.where(x == x.max(), 9, x), x_mask, y, y_mask)
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


@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_errors_of_what_is_traced(kind: str) -> None:
    """Shapes and dtypes; values are not there to be looked at, and an id that is none gives NaN."""
    _, model = pair(kind, "float32")
    x, x_mask, y, y_mask = (jnp.asarray(each) for each in batch(model.config))
    with pytest.raises(ValueError, match=r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y"):
        jax.eval_shape(model.loss, x, x_mask, y, y_mask[:2])
    with pytest.raises(TypeError, match=r"logits: y is dtype\('float32'\).*expected an array of integers"):
        jax.eval_shape(model.logits, x, x_mask, y.astype(jnp.float32))
    assert jax.eval_shape(model.encode, x + 99, 0 * x_mask).dtype == jnp.float32
    table = next(value for name, value in model.by_name().items() if "embedding" in name)
    assert np.isnan(jax.jit(lambda ids: jnp.take(table, ids, axis=0))(jnp.array([99]))).all()


def test_the_package_loads_none_of_this() -> None:
    rooms = [f"rmsnorm.flax_impl.{room}" for room in ("parameters", "recurrent", "output", "rnnsearch", "transformer")]
    program = f"import sys, rmsnorm.flax_impl; print([room for room in {rooms} if room in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "[]\n"
