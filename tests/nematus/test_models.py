"""Nematus's models in every framework: against runs of Nematus, against the golden, and as models in training."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_framework import RUNS, check_close, check_kind, check_run, golden_too
from nematus_models import (
    FACTORS,
    KINDS,
    NO_NORMS,
    TRANSFORMERS,
    WITH_DROPOUT,
    WITHOUT_DROPOUT,
    batch,
    config_of,
    random_parameters,
    reference,
)

from rmsnorm.nematus.dialects import table
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.names import variables


# Others are compared with NumPy's models below. What B does in compiled Keras and Flax is tests/cli/test_cli_port.py.
@pytest.mark.parametrize(
    "adapter", ["numpy", "torch", *(pytest.param(key, marks=pytest.mark.slow) for key in ("tf", "flax"))], indirect=True
)
@pytest.mark.parametrize("name", [name for name in RUNS if "Z" not in name])
def test_what_nematus_computed(adapter: Any, name: str) -> None:
    check_run(adapter, name)


@golden_too
def test_what_theano_nematus_computed(adapter: Any) -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, parameters, _ = run.model("rms")
    parameters = {name: value.astype(np.float64) for name, value in parameters.items()}
    x, x_mask, y, y_mask = run.sentences
    with adapter.wide():
        for dialect in ("theano", "tensorflow-v0.3"):
            model = adapter.Model(config.replace(dialect=dialect), parameters)
            logits, loss = model.logits(x, x_mask, y), model.loss(x, x_mask, y, y_mask)
            assert abs(logits - run.arrays["theano_logits"])[y_mask > 0].max() <= 1e-12
            np.testing.assert_allclose(loss, run.arrays["theano_loss"], rtol=1e-12)


# The models are written once, over the operations of a framework: what PyTorch does with all of these, others do with
# those that differ in operations.
DIFFERENT = (
    "rms with offset", "deep of odd depth", "deep v0.3", "deep theano with offset", "tied all", "prelu", "tied mixture",
    "lexical", "transformer layer", "transformer tied decoder", "transformer smoothed labels", *NO_NORMS,
)  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("adapter", "dtype", "kind"),
    [
        *(("torch", "float64", kind) for kind in (*KINDS, *TRANSFORMERS, *NO_NORMS)),
        *(("torch", "float32", kind) for kind in DIFFERENT),
        *((key, "float64", kind) for key in ("tf", "flax") for kind in DIFFERENT),
    ],
    indirect=["adapter"],
)
def test_everything_is_the_goldens(adapter: Any, kind: str, dtype: str) -> None:
    check_kind(adapter, kind, dtype)


@pytest.mark.parametrize("adapter", ["tf"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plain", {"dialect": "theano", "rnn_enc_depth": 2, "rnn_dec_depth": 2, "rnn_lexical_model": True}),
        ("tied mixture", {"dialect": "tensorflow-v0.3", "rnn_dec_depth": 3, "rnn_dec_deep_context": True}),
        ("transformer smoothed labels", {}),
    ],
)
def test_in_graphs_everything_is_the_goldens(adapter: Any, kind: str, changes: dict[str, Any]) -> None:
    check_kind(adapter, kind, "float32", **changes)


def test_a_model_does_not_share_memory_with_what_it_is_made_of(adapter: Any) -> None:
    config = config_of("plain")
    parameters = random_parameters(config, "float32")
    before = {name: value.copy() for name, value in parameters.items()}
    for source in (parameters, {name: adapter.array(value) for name, value in parameters.items()}):
        adapter.overwrite(adapter.Model(config, source).own)
        for name, value in source.items():
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mixture", "bfloat16"), ("transformer rms", "bfloat16"), ("transformer rms", "float16")]
)
def test_a_model_in_bfloat16(adapter: Any, kind: str, dtype: str) -> None:
    """Within some roundings of 2^-9, or of 2^-11, of logits below 10; losses are of float32."""
    config, rounding = config_of(kind), {"bfloat16": 2.0**-9, "float16": 2.0**-11}[dtype]
    parameters, (x, x_mask, y, y_mask) = random_parameters(config, "float32"), batch(config)
    wanted = numpy_nematus.Model(config, parameters).logits(x, x_mask, y)
    model = adapter.Model(config, {name: adapter.array(value, dtype) for name, value in parameters.items()})
    is_flax, x_mask = adapter.KEY == "flax", adapter.array(x_mask, dtype)
    with nullcontext() if is_flax else adapter.quick():
        logits = model.logits(x, x_mask, y)
        assert logits.dtype.name in (dtype, "float32")  # a mixture gives log-probabilities
        assert abs(logits.astype(float) - wanted).max() <= (10 * abs(wanted).max() + 50) * rounding
        assert model.loss(x, x_mask, y, y_mask).dtype == np.float32
        if not is_flax:  # which would compile for seconds
            assert np.isfinite(model.translate(x, x_mask, 2, 4).scores).all()


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The masks of dropout by name, as NumPy arrays; filled where RNNSearch drops."""
    made: dict[str, Any] = {}
    drop = Parameters.drop

    def record(self: Any, name: str, x: Any) -> Any:
        if self.scope + name in self.masks:
            made[self.scope + name] = np.asarray(self.masks[self.scope + name])
        return drop(self, name, x)

    monkeypatch.setattr(Parameters, "drop", record)
    return made


# What Nematus drops, read from its rnn_model.py and layers.py: inputs of these matrices, which come from words.
OF_WORDS = ("decoder/base", "encoder/backward-stack/level0", "encoder/forward-stack/level0")
OF_OUTPUT = ("hidden_to_logits", "lexical_to_logits", "prev_emb_to_hidden")
FROM_WORDS = [f"{scope}/gru0/input_to_{part}" for scope in OF_WORDS for part in ("gates", "proposal")]
FROM_WORDS += ["decoder/lexical", *(f"decoder/next_word_predictor/{part}/W" for part in OF_OUTPUT)]


@pytest.mark.usefixtures("quick")
def test_what_is_dropped_with_which_rate(adapter: Any, masks: dict[str, Any]) -> None:
    """Of every matrix the input, with a mask of its own; scores of the attention stay."""
    config = config_of("deep").replace(rnn_lexical_model=True)
    parameters, sentences = random_parameters(config), batch(config)
    without = adapter.Model(config, parameters).loss(*sentences)
    matrices = {row.name for row in variables(config) if len(row.shape) == 2}
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    rates = {"embedding": 0.1, "hidden": 0.2, "source": 0.3, "target": 0.4}
    rate_of = dict.fromkeys(matrices, rates["hidden"]) | dict.fromkeys(FROM_WORDS, rates["embedding"])
    rate_of |= {"source words": rates["source"], "target words": rates["target"]}
    config = config.replace(**{f"rnn_dropout_{part}": rate for part, rate in rates.items()})
    loss = adapter.Model(config, parameters, training=True).loss(*sentences)
    assert masks.keys() == rate_of.keys()
    for name, mask in masks.items():
        np.testing.assert_allclose(mask * (mask - 1 / (1 - rate_of[name])), 0, atol=1e-12, err_msg=name)
        assert mask.any(), name
    assert len({mask.tobytes() for mask in masks.values()}) > len(masks) / 2, "masks of their own"
    assert abs(loss - without).max() > 1e-6


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["deep", "tied mixture"])
def test_a_dropped_input_is_a_dropped_row_of_the_matrix(adapter: Any, kind: str, masks: dict[str, Any]) -> None:
    """Of mixtures with factors, for one sentence, if all steps have the same mask; words as their embeddings."""
    config = config_of(kind).replace(**FACTORS, softmax_mixture_size=3)
    parameters, dropping, words = random_parameters(config), config.replace(**WITH_DROPOUT), np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    for seed in range(100):
        loss = adapter.Model(dropping, parameters, training=True, seed=seed).loss(*sentences)
        if all({0.0} < set(masks[f"{side} words"].ravel()) for side in ("source", "target")):
            break
    else:
        raise AssertionError("no seed drops words on both sides")
    assert abs(loss - adapter.Model(config, parameters).loss(*sentences)) > 1e-3
    if config.tie_decoder_embeddings:  # what it drops of its hidden layer is of no word that it reads
        matrix, output = parameters[table(config, "decoder")].T, "decoder/next_word_predictor/hidden_to_logits/W"
        assert masks[output].shape == (1, len(matrix))
        config, parameters = config.replace(tie_decoder_embeddings=False), {**parameters, output: matrix.copy()}
    for name in masks.keys() & parameters.keys():
        parameters[name] *= masks[name].T
    sources = [(table(config, "encoder", i), ids, "source words") for i, ids in enumerate(x)]
    for name, ids, side in (*sources, (table(config, "decoder"), y[:-1], "target words")):
        for word, factor in zip(ids[:, 0], masks[side][-len(ids) :, 0, 0], strict=True):  # nothing before the first
            parameters[name][word] *= factor
    np.testing.assert_allclose(adapter.Model(config, parameters).loss(*sentences), loss, rtol=1e-12)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("adapter", "kind"),
    [("torch", "rms"), ("torch", "transformer rms"), ("tf", "rms"), ("tf", "transformer rms"), ("flax", "layer")],
    indirect=["adapter"],
)
def test_dropout_only_in_training(adapter: Any, kind: str) -> None:
    """By a seed, and another time anew; a translation drops nothing. Graphs are in test_nematus_tf.py and _flax.py."""
    quiet = config_of(kind).replace(**(WITHOUT_DROPOUT if kind in TRANSFORMERS else {}))
    config = quiet.replace(**(dict.fromkeys(WITHOUT_DROPOUT, 0.3) if kind in TRANSFORMERS else WITH_DROPOUT))
    parameters, sentences = random_parameters(config), batch(config)
    without = adapter.Model(quiet, parameters)
    wanted = without.loss(*sentences)
    np.testing.assert_array_equal(adapter.Model(config, parameters).loss(*sentences), wanted)
    model = adapter.Model(config, parameters, training=True, seed=3)
    losses = [model.loss(*sentences) for _ in range(2)]
    assert abs(losses[0] - wanted).min() > 1e-3
    assert abs(losses[0] - losses[1]).min() > 1e-3
    translations = [one.translate(*sentences[:2], 3, 6) for one in (model, without)]
    np.testing.assert_array_equal(translations[0].scores, translations[1].scores)
    again = adapter.Model(config, parameters, training=True, seed=3)
    np.testing.assert_array_equal(again.loss(*sentences), losses[0])


@pytest.mark.usefixtures("quick")
def test_dropout_of_the_transformer(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a scaled matrix is multiplied with or gives."""
    plain = config_of("transformer rms").replace(**WITHOUT_DROPOUT)
    parameters = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    undropped = adapter.Model(plain, parameters).logits(x, x_mask, y)
    operations = adapter.Model(plain, parameters).own.operations
    monkeypatch.setattr(operations, "dropout", lambda x, rate, random, shared=(): x * (1 - rate))
    if adapter.KEY == "torch":  # whose attention drops by itself
        functional = adapter.torch.nn.functional
        attention = functional.scaled_dot_product_attention
        halved = lambda q, k, v, bias, rate: attention(q, k, v, bias) * (1 - rate)  # noqa: E731
        monkeypatch.setattr(functional, "scaled_dot_product_attention", halved)
    rates = {
        "residual": (
            "context_projection/dense_layer_weights",
            "ff_layer_2/dense_layer_weights",
            "ff_layer_2/dense_layer_biases",
        ),
        "relu": ("ff_layer_1/dense_layer_weights",),
        "attn": ("values_projection/dense_layer_weights",),
        "head": ("context_projection/dense_layer_weights",),
    }
    for rate, ends in rates.items():
        same = {name: value / 2 if name.endswith(ends) else value for name, value in parameters.items()}
        config = plain.replace(**{"transformer_drophead" if rate == "head" else f"transformer_dropout_{rate}": 0.5})
        logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)
        check_close(logits, adapter.Model(plain, same).logits(x, x_mask, y))
        assert abs(logits - undropped).max() > 0.1
        np.testing.assert_array_equal(adapter.Model(config, parameters).logits(x, x_mask, y), undropped)

    monkeypatch.setattr(operations, "dropout", lambda x, rate, random, shared=(): 0 * x)
    config = plain.replace(transformer_dropout_embeddings=0.5)
    logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)  # without words and positions
    check_close(logits, np.broadcast_to(logits[:1, :1], logits.shape))
    assert (adapter.Model(config, parameters).logits(x, x_mask, y).std((0, 1)) > 0.01).all()


@pytest.mark.usefixtures("quick")
def test_what_the_transformer_drops_as_a_whole(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of sentences; attention by its weights. At the rates of the config, with another mask at every call."""
    rates = {"transformer_drophead": 0.25, "transformer_dropout_attn": 0.5}
    config = config_of("transformer rms").replace(**WITHOUT_DROPOUT | rates)
    model, masks = adapter.Model(config, random_parameters(config), training=True), defaultdict(list)
    dropout = model.own.operations.dropout

    def record(x: Any, rate: float, *arguments: Any, **options: Any) -> Any:
        masks[rate].append(adapter.numpy(dropout(1 + 0 * x, rate, *arguments, **options)))
        return x

    monkeypatch.setattr(model.own.operations, "dropout", record)
    for _ in range(2):
        model.logits(*batch(config)[:3])
    assert masks.keys() == {0.25, 0.5} - ({0.5} if adapter.KEY == "torch" else set())  # whose attention drops by itself
    for rate, own in masks.items():
        assert {mask.shape for mask in own} == {(3, 2, 1, 1) if rate == 0.25 else (3, 2, 4, 4)}
        kept = np.stack(own) * (1 - rate)
        assert len(kept) == 12
        assert len({mask.tobytes() for mask in kept}) > (3 if rate == 0.25 else 11)
        assert (kept.std(axis=1).any(), kept.std(axis=2).any()) == (True, True)  # of sentences, and of heads
        np.testing.assert_allclose(kept * (kept - 1), 0, atol=1e-12)
        assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5


@golden_too
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_errors(adapter: Any, kind: str) -> None:
    """For arrays of the framework as for those of NumPy."""
    config = config_of(kind)
    model, array = adapter.Model(config, random_parameters(config)).own, adapter.array
    sentences = batch(config)
    x, x_mask, y, y_mask = map(array, sentences)
    above = array(np.where(sentences[0] == sentences[0].max(), 9, sentences[0]))
    for message, arguments in {
        r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)": (x[0], x_mask),
        r"encode: x_mask is 0, expected at least one word in every sentence": (x, x_mask * 0),
        r"logits: y is \(4, 2\), expected the shape \(length, 3\)": (x, x_mask, y[:, :2]),
        r"logits: y is \(0, 3\), expected the shape \(length, 3\)": (x, x_mask, y[:0]),
        r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary": (above, x_mask, y, y_mask),
        r"loss: an id of y is -1, expected 0 to 7, the vocabulary": (x, x_mask, y - 1, y_mask),
        r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y": (x, x_mask, y, y_mask[:2]),
        r"logits: x is dtype\('float64'\).*expected an array of integers": (array(sentences[0] * 1.0), x_mask, y),
        r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)": (x, x_mask[1:]),
        r"translate: beam_size is 0, expected an integer >= 1": (x, x_mask, 0),
        r"translate: beam_size is 9, expected at most 8, the target vocabulary": (x, x_mask, 9),
        r"translate: max_length is -1, expected an integer >= 1": (x, x_mask, 2, -1),
    }.items():
        with pytest.raises(TypeError if "dtype" in message else ValueError, match=message):
            getattr(model, message.partition(":")[0])(*arguments)
