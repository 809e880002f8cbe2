"""What Nematus's and zero's models drop out in training, in every framework that has gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from nematus_framework import check_close
from nematus_models import FACTORS, RELA, WITH_DROPOUT, WITHOUT_DROPOUT, batch, config_of, random_parameters

from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.names import table, variables


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
    matrices = {row.name for row in variables(config) if len(row.shape) == 2}
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    rates = {"embedding": 0.1, "hidden": 0.2, "source": 0.3, "target": 0.4}
    rate_of = dict.fromkeys(matrices, rates["hidden"]) | dict.fromkeys(FROM_WORDS, rates["embedding"])
    rate_of |= {"source words": rates["source"], "target words": rates["target"]}
    config = config.replace(**{f"rnn_dropout_{part}": rate for part, rate in rates.items()})
    adapter.Model(config, random_parameters(config), training=True).loss(*batch(config))
    assert masks.keys() == rate_of.keys()
    for name, mask in masks.items():
        np.testing.assert_allclose(mask * (mask - 1 / (1 - rate_of[name])), 0, atol=1e-12, err_msg=name)
        assert mask.any(), name
    assert len({mask.tobytes() for mask in masks.values()}) > len(masks) / 2, "masks of their own"


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
@pytest.mark.parametrize("kind", ["layer", "transformer rms", RELA, "zero rnn"])
def test_dropout_only_in_training(adapter: Any, kind: str) -> None:
    """By a seed, and another time anew, a rate in one place at a time; a translation drops nothing."""
    quiet = config_of(kind).replace(**WITHOUT_DROPOUT, label_smoothing=0.0)
    names = list(WITHOUT_DROPOUT) if quiet.model_type == "transformer" else ["rnn_dropout_embedding"]
    parameters, sentences = random_parameters(quiet), batch(quiet)
    wanted = adapter.Model(quiet, parameters).loss(*sentences)
    for name in names[: 1 if adapter.KEY == "flax" else None]:
        config = quiet.replace(**{name: 0.5})
        np.testing.assert_array_equal(adapter.Model(config, parameters).loss(*sentences), wanted)
        model = adapter.Model(config, parameters, training=True, seed=3)
        losses = [model.loss(*sentences) for _ in range(2)]
        assert abs(losses[0] - wanted).max() > 1e-3, name
        assert abs(losses[0] - losses[1]).max() > 1e-3, name
        again = adapter.Model(config, parameters, training=True, seed=3)
        np.testing.assert_array_equal(again.loss(*sentences), losses[0])
    how = sentences[:2], 3, 6
    plain = adapter.Model(quiet, parameters)
    np.testing.assert_array_equal(*(one.translate(*how[0], *how[1:]).scores for one in (model, plain)))
    if kind == "zero rnn":  # with all features of the output layer lost, every word is as likely
        lost = adapter.Model(config.replace(rnn_dropout_embedding=1 - 1e-6), parameters, training=True)
        np.testing.assert_allclose(lost.loss(*sentences), np.log(config.target_vocab_size), rtol=1e-6)


@pytest.mark.usefixtures("quick")
def test_where_the_transformer_drops(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a scaled matrix is multiplied with or gives."""
    plain = config_of("transformer rms").replace(**WITHOUT_DROPOUT)
    parameters = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    undropped = adapter.Model(plain, parameters).logits(x, x_mask, y)
    operations = adapter.Model(plain, parameters).own.operations
    monkeypatch.setattr(operations, "dropout", lambda x, rate, random: x * (1 - rate))
    if adapter.KEY == "torch":  # whose attention drops by itself
        functional = adapter.torch.nn.functional
        attention = functional.scaled_dot_product_attention
        halved = lambda q, k, v, bias, rate: attention(q, k, v, bias) * (1 - rate)  # noqa: E731
        monkeypatch.setattr(functional, "scaled_dot_product_attention", halved)
    context, values = (f"{part}_projection/dense_layer_weights" for part in ("context", "values"))
    for name, *ends in (
        ("dropout_residual", context, "ff_layer_2/dense_layer_weights", "ff_layer_2/dense_layer_biases"),
        ("dropout_relu", "ff_layer_1/dense_layer_weights"),
        ("dropout_attn", values),
        ("drophead", context),
    ):
        same = {name: value / 2 if name.endswith(tuple(ends)) else value for name, value in parameters.items()}
        config = plain.replace(**{f"transformer_{name}": 0.5})
        logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)
        check_close(logits, adapter.Model(plain, same).logits(x, x_mask, y))
        assert abs(logits - undropped).max() > 0.1
    monkeypatch.setattr(operations, "dropout", lambda x, rate, random: 0 * x)
    config = plain.replace(transformer_dropout_embeddings=0.5)
    logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)  # without words and positions
    check_close(logits, np.broadcast_to(logits[:1, :1], logits.shape))


@pytest.mark.usefixtures("quick")
def test_what_the_transformer_drops_as_a_whole(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of sentences; attention by its weights. At the rates of the config, with another mask at every call."""
    config = config_of("transformer rms").replace(**WITHOUT_DROPOUT)
    config = config.replace(transformer_drophead=0.25, transformer_dropout_attn=0.5)
    model, masks = adapter.Model(config, random_parameters(config), training=True), defaultdict(list)
    dropout = model.own.operations.dropout

    def record(x: Any, rate: float, random: Any) -> Any:
        masks[rate].append(adapter.numpy(dropout(1 + 0 * x, rate, random)))
        return x

    monkeypatch.setattr(model.own.operations, "dropout", record)
    for _ in range(2):
        model.logits(*batch(config)[:3])
    assert masks.keys() == {0.25, 0.5} - ({0.5} if adapter.KEY == "torch" else set())  # whose attention drops by itself
    for rate, own in masks.items():
        assert {mask.shape for mask in own} == {(3, 2, 1, 1) if rate == 0.25 else (3, 2, 4, 4)}
        kept = np.stack(own) * (1 - rate)
        assert len({mask.tobytes() for mask in kept}) > (3 if rate == 0.25 else 11)
        np.testing.assert_allclose(kept * (kept - 1), 0, atol=1e-12)
        assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
