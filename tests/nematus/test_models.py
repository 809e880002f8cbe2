"""Nematus's and zero's models in every framework: against runs of the programs, against the golden, and in training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_framework import EXACT, check_kind, check_run, golden_too
from nematus_models import CONFIGS, KINDS, RELA, RUNS, batch, random_parameters, reference

from rmsnorm.nematus.backends import model_class


def golden(kind: str) -> Any:
    return model_class("numpy", CONFIGS[kind])(CONFIGS[kind], random_parameters(CONFIGS[kind]))


@pytest.mark.parametrize("name", RUNS)
@golden_too
def test_what_the_programs_computed(adapter: Any, name: str) -> None:
    with adapter.quick() if adapter.KEY == "tf" else nullcontext():  # it takes longer to trace
        check_run(adapter, name)


@golden_too
def test_what_theano_nematus_computed(adapter: Any) -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, parameters, _ = run.model()
    parameters = {name: value.astype(np.float64) for name, value in parameters.items()}
    x, x_mask, y, y_mask = run.sentences
    with adapter.wide():
        for dialect in ("theano", "tensorflow-v0.3"):
            model = adapter.Model(config.replace(dialect=dialect), parameters)
            assert abs(model.logits(x, x_mask, y) - run.arrays["theano_logits"])[y_mask > 0].max() <= 1e-12
            np.testing.assert_allclose(model.loss(x, x_mask, y, y_mask), run.arrays["theano_loss"], rtol=1e-12)


# The models are written once, over the operations of a framework: what PyTorch does with all of these, others do with
# those that together call every operation in each of its ways.
DIFFERENT = (
    "rms with offset", "deep v0.3", "tied all", "prelu", "tied mixture", "lexical", "transformer layer",
    "transformer tied decoder", "transformer smoothed labels", "transformer without norms",
)  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("adapter", "dtype", "kind"),
    [
        *(("torch", "float64", kind) for kind in CONFIGS),
        *(("torch", "float32", kind) for kind in DIFFERENT[::3]),
        *((key, "float64", kind) for key in ("tf", "flax") for kind in (*DIFFERENT, RELA)),
        *(("tf", "float64", kind) for kind in ("zero rms", "zero rnn layer")),
    ],
    indirect=["adapter"],
)
def test_a_framework_computes_what_the_golden_computes(adapter: Any, kind: str, dtype: str) -> None:
    """States, logits, losses, gradients and translations."""
    check_kind(adapter, kind, dtype)


@pytest.mark.parametrize("kind", [*KINDS, "transformer rms"])
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    """Nor whether words are scored or decoded, but in deep models of v0.3."""
    model = golden(kind)
    x, x_mask, y, y_mask = batch(model.config)
    for i, loss in enumerate(model.loss(x, x_mask, y, y_mask)):
        source, target = (int(mask[:, i].sum()) for mask in (x_mask, y_mask))
        alone = x[:, :source, [i]], x_mask[:source, [i]], y[:target, [i]], y_mask[:target, [i]]
        np.testing.assert_allclose(model.loss(*alone), [loss], rtol=EXACT["float64"])
    if kind in KINDS:
        error = abs(model.logits(x, x_mask, y) - model.logits(x, x_mask, y, stepwise=True)).max()
        assert error > 0.1 if kind == "deep v0.3" else error == 0


def test_places_that_are_empty_in_all_sentences_of_zero_do_not_count() -> None:
    """Not even in the positions of the words after them; but the first place stays."""
    model = golden("zero rms")
    x, x_mask, y, _ = batch(model.config)
    wanted = model.logits(x, x_mask, y)
    spread, spread_mask = np.insert(x, 1, 0, axis=1), np.insert(x_mask, 1, 0, axis=0)
    np.testing.assert_array_equal(model.logits(spread, spread_mask, np.insert(y, 1, 0, axis=0)), wanted)
    first, first_mask = np.insert(x, 0, 0, axis=1), np.insert(x_mask, 0, 0, axis=0)
    assert model.encode(first, first_mask).shape[1] == 1 + model.encode(x, x_mask).shape[1]


@pytest.mark.parametrize(("slope", "activation"), [(1.0, "linear"), (0.0, "relu")])
def test_activations_that_are_in_no_recorded_run(slope: float, activation: str) -> None:
    """They are a PReLU of that slope, which is in M1."""
    model = golden(activation)
    parameters = {**model.parameters, "decoder/next_word_predictor/hidden_prelu/slope": np.full(6, slope)}
    other = type(model)(model.config.replace(output_hidden_activation="prelu"), parameters)
    sentences = batch(model.config)[:3]
    np.testing.assert_allclose(model.logits(*sentences), other.logits(*sentences), rtol=0, atol=EXACT["float64"])


def test_a_model_does_not_share_memory_with_what_it_is_made_of(adapter: Any) -> None:
    parameters = random_parameters(CONFIGS["plain"], "float32")
    for source in (parameters, {name: adapter.array(value) for name, value in parameters.items()}):
        own = adapter.Model(CONFIGS["plain"], source).own.by_name()
        before = {name: np.array(adapter.numpy(value)) for name, value in own.items()}
        for value in source.values():
            value += 1  # in place, where an array can be changed
        for name, value in own.items():
            np.testing.assert_array_equal(adapter.numpy(value), before[name])


@pytest.mark.parametrize(("kind", "dtype"), [("mixture", "bfloat16"), ("transformer rms", "float16")])
def test_a_model_in_16_bits(adapter: Any, kind: str, dtype: str) -> None:
    """Within some roundings of 2^-9, or of 2^-11, of logits below 10; losses are of float32."""
    config, rounding = CONFIGS[kind], {"bfloat16": 2.0**-9, "float16": 2.0**-11}[dtype]
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


@golden_too
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_a_wrong_batch_is_refused_in_a_sentence(adapter: Any, kind: str) -> None:
    """For arrays of the framework as for those of NumPy."""
    model, sentences = adapter.Model(CONFIGS[kind], random_parameters(CONFIGS[kind])).own, batch(CONFIGS[kind])
    x, x_mask, y, y_mask = map(adapter.array, sentences)
    above = adapter.array(np.where(sentences[0] == sentences[0].max(), 9, sentences[0]))
    for message, arguments in {
        r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)": (x[0], x_mask),
        r"encode: x_mask is 0, expected at least one word in every sentence": (x, x_mask * 0),
        r"logits: y is \(4, 2\), expected the shape \(length, 3\)": (x, x_mask, y[:, :2]),
        r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary": (above, x_mask, y, y_mask),
        r"loss: an id of y is -1, expected 0 to 7, the vocabulary": (x, x_mask, y - 1, y_mask),
        r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y": (x, x_mask, y, y_mask[:2]),
        r"logits: x is dtype\('float64'\).*array of integers": (adapter.array(sentences[0] * 1.0), x_mask, y),
        r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)": (x, x_mask[1:]),
        r"translate: beam_size is 9, expected at most 8, the target vocabulary": (x, x_mask, 9),
        r"translate: max_length is -1, expected an integer >= 1": (x, x_mask, 2, -1),
    }.items():
        with pytest.raises(TypeError if "dtype" in message else ValueError, match=message):
            getattr(model, message.partition(":")[0])(*arguments)
