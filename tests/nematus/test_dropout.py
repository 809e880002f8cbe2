"""What Nematus's and zero's models drop out in training, in every framework that has gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_framework import check_close
from nematus_models import CONFIGS, RELA, WITHOUT_DROPOUT, batch, random_parameters

from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.names import variables

pytestmark = pytest.mark.usefixtures("quick")
# What Nematus drops, read from its rnn_model.py and layers.py: inputs of these matrices, which come from words.
OF_WORDS = ("decoder/base", "encoder/backward-stack/level0", "encoder/forward-stack/level0")
OF_OUTPUT = ("hidden_to_logits", "lexical_to_logits", "prev_emb_to_hidden")
FROM_WORDS = [f"{scope}/gru0/input_to_{part}" for scope in OF_WORDS for part in ("gates", "proposal")]
FROM_WORDS += ["decoder/lexical", *(f"decoder/next_word_predictor/{part}/W" for part in OF_OUTPUT)]


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_dropped_with_which_rate(adapter: Any, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every matrix the input, with a mask of its own; scores of the attention stay."""
    config = CONFIGS["deep"].replace(rnn_lexical_model=True)
    matrices = {row.name for row in variables(config) if len(row.shape) == 2}
    config = config.replace(tie_decoder_embeddings=tied)  # a tied matrix has its mask, too
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    rates = {"embedding": 0.1, "hidden": 0.2, "source": 0.3, "target": 0.4}
    rate_of = dict.fromkeys(matrices, rates["hidden"]) | dict.fromkeys(FROM_WORDS, rates["embedding"])
    rate_of |= {"source words": rates["source"], "target words": rates["target"]}
    masks: dict[str, Any] = {}
    drop = Parameters.drop

    def record(self: Any, name: str, x: Any) -> Any:
        result, mask = drop(self, name, x), self.masks.get(self.scope + name)
        if mask is not None:
            masks[self.scope + name] = own = adapter.numpy(mask)
            np.testing.assert_array_equal(adapter.numpy(result), adapter.numpy(x) * own)
        return result

    monkeypatch.setattr(Parameters, "drop", record)
    config = config.replace(**{f"rnn_dropout_{part}": rate for part, rate in rates.items()})
    adapter.Model(config, random_parameters(config), training=True).loss(*batch(config))
    assert masks.keys() == rate_of.keys()
    for name, mask in masks.items():
        np.testing.assert_allclose(mask * (mask - 1 / (1 - rate_of[name])), 0, atol=1e-12, err_msg=name)
        assert mask.any(), name
    assert len({mask.tobytes() for mask in masks.values()}) > len(masks) / 2, "masks of their own"


@pytest.mark.parametrize("kind", ["layer", "transformer rms", RELA, "zero rnn"])
def test_dropout_only_in_training(adapter: Any, kind: str) -> None:
    """By a seed, and another time anew, a rate in one place at a time; a translation drops nothing."""
    quiet = CONFIGS[kind].replace(**WITHOUT_DROPOUT, label_smoothing=0.0)
    names = list(WITHOUT_DROPOUT) if quiet.model_type == "transformer" else ["rnn_dropout_embedding"]
    parameters, sentences = random_parameters(quiet), batch(quiet)
    plain = adapter.Model(quiet, parameters)
    wanted = plain.loss(*sentences)
    for name in names[: 1 if adapter.KEY == "flax" else None]:
        config = quiet.replace(**{name: 0.5})
        np.testing.assert_array_equal(adapter.Model(config, parameters).loss(*sentences), wanted)
        model = adapter.Model(config, parameters, training=True, seed=3)
        losses = [model.loss(*sentences) for _ in range(2)]
        assert abs(losses[0] - wanted).max() > 1e-3, name
        assert abs(losses[0] - losses[1]).max() > 1e-3, name
        again = adapter.Model(config, parameters, training=True, seed=3)
        np.testing.assert_array_equal(again.loss(*sentences), losses[0])
    np.testing.assert_array_equal(*(one.translate(*sentences[:2], 3, 6).scores for one in (model, plain)))
    if kind == "zero rnn":  # with all features of the output layer lost, every word is as likely
        lost = adapter.Model(config.replace(rnn_dropout_embedding=1 - 1e-6), parameters, training=True)
        np.testing.assert_allclose(lost.loss(*sentences), np.log(config.target_vocab_size), rtol=1e-6)


def test_where_the_transformer_drops(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a scaled matrix is multiplied with or gives."""
    plain = CONFIGS["transformer rms"].replace(**WITHOUT_DROPOUT)
    parameters = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    undropped = adapter.Model(plain, parameters).logits(x, x_mask, y)
    operations = adapter.Model(plain, parameters).own.operations
    sizes: list[tuple[int, ...]] = []

    def halve(x: Any, rate: float, random: Any) -> Any:
        sizes.append(tuple(x.shape))
        return x * (1 - rate)

    monkeypatch.setattr(operations, "dropout", halve)
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
        sizes.clear()
        logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)
        check_close(logits, adapter.Model(plain, same).logits(x, x_mask, y))
        assert abs(logits - undropped).max() > 0.1
    assert {*sizes} == {(3, 2, 1, 1)}, "whole heads of a sentence"
    monkeypatch.setattr(operations, "dropout", lambda x, rate, random: 0 * x)
    config = plain.replace(transformer_dropout_embeddings=0.5)
    logits = adapter.Model(config, parameters, training=True).logits(x, x_mask, y)  # without words and positions
    check_close(logits, np.broadcast_to(logits[:1, :1], logits.shape))
