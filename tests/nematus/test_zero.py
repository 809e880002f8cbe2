"""zero's models in every framework: against runs of zero, and against the golden; its options and its files."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
from nematus_framework import check_kind, check_run
from nematus_models import (
    RELA,
    WITHOUT_DROPOUT,
    ZERO,
    ZERO_RNN,
    batch,
    config_of,
    random_parameters,
    reference,
    search,
)

from rmsnorm.nematus import beam
from rmsnorm.nematus.config import read, write
from rmsnorm.nematus.numpy import Transformer
from rmsnorm.nematus.numpy.parameters import Parameters, normalise

RUNS = [*product(("numpy", "torch"), ("Z1", "Z2", "Z3")), *product(("tf", "flax"), ("Z2", "Z3"))]


@pytest.fixture
def eager_in_tensorflow(adapter: Any) -> Any:
    """The quickest way for a few calls: TensorFlow takes longer to trace, JAX to run operation by operation."""
    with adapter.quick() if adapter.KEY == "tf" else nullcontext():
        yield


@pytest.mark.usefixtures("eager_in_tensorflow")
@pytest.mark.parametrize(("adapter", "name"), RUNS, indirect=["adapter"])
def test_what_zero_computed(adapter: Any, name: str) -> None:
    check_run(adapter, name)


def test_the_norms_alone() -> None:
    """Rows from 1e-7 to 30 and a row of zeros, where eps decides: what the golden computes, and PyTorch's gradients."""
    norms = {name.removeprefix("norms/"): array for name, array in reference("Z1").arrays.items() if "norms/" in name}
    values = {name: norms[name].astype(float) for name in ("x", "scale", "offset", "upstream")}
    eps = float(norms["eps"])
    for name, norm, leaves in (("rms_norm", "rms", ("x", "scale")), ("layer_norm", "layer", ("x", "scale", "offset"))):
        own = {leaf: values[leaf] for leaf in leaves}
        y = normalise(Parameters(own, norm, eps=eps), values["x"], "scale", "offset")  # type: ignore[arg-type]
        np.testing.assert_allclose(y, norms[f"{name}/output"], rtol=2e-5, atol=2e-5)
        torch = pytest.importorskip("torch")
        from rmsnorm.nematus.models import parameters as models
        from rmsnorm.nematus.torch import operations

        tensors = {leaf: torch.tensor(value, requires_grad=True) for leaf, value in own.items()}
        p = models.Parameters(operations, tensors, norm, eps=eps)  # type: ignore[arg-type]
        models.normalise(p, tensors["x"], "scale", "offset").backward(torch.tensor(values["upstream"]))
        for leaf, tensor in tensors.items():
            wanted = norms[f"{name}/grad_{leaf}"]
            atol = 1e-4 * (np.abs(wanted).max(axis=-1, keepdims=True) if leaf == "x" else 1 + np.abs(wanted))
            assert (abs(tensor.grad.numpy() - wanted) <= atol).all(), leaf


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("adapter", "kind"),
    [
        *(("torch", kind) for kind in (*ZERO, *ZERO_RNN)),
        ("tf", RELA),
        ("tf", "zero rms"),
        ("tf", "zero rnn layer"),
        ("flax", RELA),
    ],
    indirect=["adapter"],
)
def test_every_framework_computes_what_the_golden_computes(adapter: Any, kind: str) -> None:
    """Scores, losses, gradients and translations in float64, of sentences with a place that is empty in all."""
    check_kind(adapter, kind)


def test_places_that_are_empty_in_all_sentences_do_not_count() -> None:
    """Not even in the positions of the words after them; but the first place stays."""
    config = config_of("zero rms")
    model = Transformer(config, random_parameters(config))
    x, x_mask, y, _ = batch(config)
    wanted = model.logits(x, x_mask, y)
    spread, spread_mask = np.insert(x, 1, 0, axis=1), np.insert(x_mask, 1, 0, axis=0)
    np.testing.assert_array_equal(model.logits(spread, spread_mask, np.insert(y, 1, 0, axis=0)), wanted)
    first, first_mask = np.insert(x, 0, 0, axis=1), np.insert(x_mask, 0, 0, axis=0)
    assert model.encode(first, first_mask).shape[1] == 1 + model.encode(x, x_mask).shape[1]


OPTIONS = {"model_name": "transformer", "hidden_size": 16, "embed_size": 16, "num_heads": 4}
KNOWN = {"norm": "rms", "source_vocab_sizes": (9,), "target_vocab_size": 8}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"label_smooth": 1.5, "ema_decay": -1.0}, {"label_smoothing": 0.0, "exponential_smoothing": 0.0}),
        ({"label_smooth": 0.3, "ema_decay": 0.99}, {"label_smoothing": 0.3, "exponential_smoothing": 0.99}),
        ({"dropout": None, "attention_dropout": -1}, {"transformer_dropout_embeddings": 0.0}),
        ({"dtype_inf": 1e4, "dtype_epsilon": 1e-6}, {"masked_score": -1e4, "eps": 1e-6}),
        ({"decode_alpha": 1.0, "decode_length": 7}, {"normalization_alpha": 1.0, "translation_maxlen": 7}),
        ({"beam_search_temperature": 2.0, "beam_size": 9}, {"beam_temperature": 2.0, "beam_size": 9}),
        ({"shared_target_softmax_embedding": False}, {"tie_decoder_embeddings": False}),
        ({"model_name": "transformer_rela"}, {"relu_attention": True, "eps": 1e-8, "masked_score": -1e8}),
        ({"model_name": "transformer_aan"}, "model_name is 'transformer_aan', expected 'transformer', 'transformer_r"),
        ({"default_dtype": "float16"}, "default_dtype is 'float16', expected 'float32' or 'float64'.*not ported"),
        ({"model_name": "rnnsearch", "cell": "atr"}, "cell is 'atr', expected 'gru'; this part of zero is not ported"),
        ({"embed_size": 12}, "embedding_size is 12, expected the state_size of 16"),
        ({"num_heads": 3}, "transformer_num_heads is 3, expected a divisor of 16"),
        ({"dtype_epsilon": -1.0}, r"eps is -1.0, expected a number >= 0"),
        ({"dtype_inf": "1e8"}, "masked_score is None, expected a number"),
        ({"beam_search_temperature": 0}, "beam_temperature is 0, expected a number >= 1e-09"),
    ],
)
def test_options_of_zero(options: dict[str, Any], wanted: Any) -> None:
    """The fields of the config, or why they cannot be."""
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            read(OPTIONS | options, **KNOWN)
    else:
        config = read(OPTIONS | options, **KNOWN)
        assert wanted.items() <= vars(config).items()
        assert read(write(config), **KNOWN) == config


def test_the_rules_of_the_search_of_zero() -> None:
    """No end in the first place; the shorter sentence ends by force one word later; the longest one stays alive."""
    result = search("zero rms", [[0.1, 0.6, 0.0001, 0.2999]] * 2, [1, 3], 1, translation_maxlen=1)
    np.testing.assert_array_equal(result.sequences[:, 0], [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_allclose(result.scores[:, 0], np.log(0.6) * np.array([3, 4]), rtol=1e-6)
    p = np.array([[0.02, 0.04, 0.9, 0.04]])
    result = search("zero rms", p, [3], 2, translation_maxlen=1)
    np.testing.assert_array_equal(result.sequences[0, 0], [1, 2])
    cooler = search("zero rms", p, [3], 2, translation_maxlen=1, beam_temperature=2.0)
    p = np.sqrt(p[0])
    np.testing.assert_allclose(cooler.scores[0, 0], np.log(p[1] * p[2] / p.sum() ** 2), rtol=1e-6)
    # With noise every first word is drawn with its probability.
    p = [[0.25, 0.25, 1e-30, 0.5]] * 400
    result = search("zero rms", p, [0] * 400, 1, translation_maxlen=1, beam_noise=True)
    assert abs((result.sequences[:, 0, 0] == 3).mean() - 0.5) < 5 * (0.25 / 400) ** 0.5
    again, other = (
        search("zero rms", p, [0] * 400, 1, translation_maxlen=1, beam_noise=True, beam_seed=seed).sequences
        for seed in (1234, 7)
    )
    np.testing.assert_array_equal(again, result.sequences)
    assert (other != again).any()
    config = config_of("zero rms")
    seeds = {beam.plan(config, ids, [2], 1, 9, 1.0).seed for ids in ([[3, 2]], [[4, 2]])}
    assert len(seeds) == 2, "a batch does not have the noise of the batch before it"
    with pytest.raises(ValueError, match="translate: seed is -1, expected an integer >= 0"):
        beam.plan(config, [[3, 2]], [2], 1, 9, 1.0, seed=-1)


@pytest.mark.usefixtures("eager_in_tensorflow")
@pytest.mark.parametrize(
    ("adapter", "kind"), list(product(("torch", "tf", "flax"), (RELA, "zero rnn"))), indirect=["adapter"]
)
def test_dropout_of_zero_is_of_training_only(adapter: Any, kind: str) -> None:
    """A rate in one place at a time changes the loss in training, and nothing else."""
    config = config_of(kind).replace(**WITHOUT_DROPOUT, label_smoothing=0.0)
    names = list(WITHOUT_DROPOUT)[-2:-1] if adapter.KEY == "flax" else WITHOUT_DROPOUT  # in JAX what Nematus lacks
    names = ["rnn_dropout_embedding"] if config.model_type == "rnn" else names
    parameters, sentences = random_parameters(config, "float32"), batch(config)
    wanted = adapter.Model(config, parameters).loss(*sentences)
    for name in names:
        dropping = config.replace(**{name: 0.5})
        evaluated, trained = (adapter.Model(dropping, parameters, training=training) for training in (False, True))
        np.testing.assert_array_equal(evaluated.loss(*sentences), wanted)
        first = trained.loss(*sentences)
        assert (first != wanted).any(), name
        assert (trained.loss(*sentences) != first).any(), name
    if config.model_type == "rnn":  # with all features of the output layer lost, every word is as likely
        lost = adapter.Model(config.replace(rnn_dropout_embedding=1 - 1e-6), parameters, training=True)
        np.testing.assert_allclose(lost.loss(*sentences), np.log(config.target_vocab_size), rtol=1e-6)
