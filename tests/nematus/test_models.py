"""Nematus's and zero's models in every framework: against runs of the programs, against the golden, and in training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy_nematus
import pytest
from nematus_framework import RUNS, check_kind, check_run, golden_too
from nematus_models import (
    KINDS,
    NO_NORMS,
    RELA,
    TRANSFORMERS,
    ZERO,
    ZERO_RNN,
    batch,
    config_of,
    random_parameters,
    reference,
)

from rmsnorm.nematus import numpy_operations
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.models.parameters import Parameters, normalise

EXACT = 1e-12  # two float64 computations of one thing in another order; logits are below 10


def golden(kind: str, **changes: Any) -> Any:
    config = config_of(kind).replace(**changes)
    return model_class("numpy", config)(config, random_parameters(config))


# In Keras and Flax others are compared with NumPy's models below. What B does in them is tests/cli/test_cli_port.py.
QUICK = {"numpy": [*RUNS], "torch": [*RUNS], "tf": ["Z2", "Z3"], "flax": ["Z2", "Z3"]}


@pytest.mark.parametrize(
    ("adapter", "name"),
    [pytest.param(key, name, marks=[] if name in QUICK[key] else pytest.mark.slow) for key in QUICK for name in RUNS],
    indirect=["adapter"],
)
def test_what_the_programs_computed(adapter: Any, name: str) -> None:
    with adapter.quick() if adapter.KEY == "tf" and name[0] == "Z" else nullcontext():  # it takes longer to trace
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


def test_the_norms_of_zero_alone() -> None:
    """Rows from 1e-7 to 30 and a row of zeros, where eps decides: what the golden computes, and PyTorch's gradients."""
    norms = {name.removeprefix("norms/"): array for name, array in reference("Z1").arrays.items() if "norms/" in name}
    values = {name: norms[name].astype(float) for name in ("x", "scale", "offset", "upstream")}
    eps, torch = float(norms["eps"]), pytest.importorskip("torch")
    from rmsnorm.nematus import torch_operations

    for name, norm, leaves in (("rms_norm", "rms", ("x", "scale")), ("layer_norm", "layer", ("x", "scale", "offset"))):
        own = {leaf: values[leaf] for leaf in leaves}
        tensors = {leaf: torch.tensor(value, requires_grad=True) for leaf, value in own.items()}
        p, q = Parameters(numpy_operations, own, norm, eps=eps), Parameters(torch_operations, tensors, norm, eps=eps)
        y = normalise(p, values["x"], "scale", "offset")
        np.testing.assert_allclose(y, norms[f"{name}/output"], rtol=2e-5, atol=2e-5)
        normalise(q, tensors["x"], "scale", "offset").backward(torch.tensor(values["upstream"]))
        for leaf, tensor in tensors.items():
            wanted = norms[f"{name}/grad_{leaf}"]
            atol = 1e-4 * (np.abs(wanted).max(axis=-1, keepdims=True) if leaf == "x" else 1 + np.abs(wanted))
            assert (abs(tensor.grad.numpy() - wanted) <= atol).all(), leaf


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
        *(("torch", "float64", kind) for kind in (*KINDS, *TRANSFORMERS, *NO_NORMS, *ZERO, *ZERO_RNN)),
        *(("torch", "float32", kind) for kind in DIFFERENT[::4]),
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
        np.testing.assert_allclose(model.loss(*alone), [loss], rtol=EXACT)
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


def test_parts_that_are_others_in_disguise() -> None:
    """A slope of 1 is linear and one of 0 relu; a mixture of one component, and a lexical model that adds nothing.

    Of mixtures and lexical models there is no recorded run.
    """
    x, x_mask, y, y_mask = batch(config_of("plain"))
    predictor = "decoder/next_word_predictor"

    def with_changes(model: Any, changes: dict[str, Any], **options: Any) -> Any:
        return type(model)(model.config.replace(**options), {**model.parameters, **changes})

    def same(model: Any, other: Any) -> None:
        np.testing.assert_allclose(*(one.logits(x, x_mask, y) for one in (model, other)), rtol=0, atol=EXACT)

    for size, kind in ((1.0, "linear"), (0.0, "relu")):
        slope = {f"{predictor}/hidden_prelu/slope": np.full(6, size)}
        same(golden(kind), with_changes(golden(kind), slope, output_hidden_activation="prelu"))

    mixture, lexical = golden("mixture"), golden("lexical")
    np.testing.assert_allclose(np.exp(mixture.logits(x, x_mask, y)).sum(axis=-1), 1, rtol=EXACT)
    certain = with_changes(mixture, {f"{predictor}/hidden_to_pi_logits/b": np.array([0.0, 800.0, 0.0])})
    of_one = {name: certain.parameters[name.replace("hidden_0", "hidden_1").replace("hidden_2", "hidden_1")]
              for name in certain.parameters}  # fmt: skip
    same(certain, with_changes(mixture, of_one))
    # That one component is a model with one more layer tanh(norm(hidden W + b)).
    W, b, gain = (mixture.parameters[f"{predictor}/hidden_to_mos_hidden_1/{leaf}"] for leaf in ("W", "b", "scale"))
    p = Parameters(numpy_operations, {"scale": gain}, "rms")
    plain = with_changes(mixture, {}, softmax_mixture_size=1)
    identity = {f"{predictor}/hidden_to_logits/W": np.eye(6), f"{predictor}/hidden_to_logits/b": np.zeros(6)}
    hidden = with_changes(plain, identity, target_vocab_size=6)
    deep = np.tanh(normalise(p, hidden.logits(x, x_mask, np.minimum(y, 5)) @ W + b, "scale", None))
    logits = deep @ mixture.parameters[f"{predictor}/hidden_to_logits/W"]
    logits += mixture.parameters[f"{predictor}/hidden_to_logits/b"]
    own = certain.logits(x, x_mask, np.minimum(y, 5))
    np.testing.assert_allclose(own, numpy_operations.log_softmax(logits), rtol=0, atol=EXACT)

    # Where all words of the source have one embedding, that is what is attended to: e = tanh(embedding).
    own = lexical.parameters
    lexical = with_changes(lexical, {"encoder/embedding/embeddings": 0 * own["encoder/embedding/embeddings"] + 0.5})
    silent = with_changes(lexical, {name: 0 * value for name, value in own.items() if "lexical_to" in name})
    same(silent, with_changes(silent, {}, rnn_lexical_model=False))
    e, part = np.tanh(np.full(6, 0.5)), f"{predictor}/lexical_to_logits"
    p = Parameters(numpy_operations, own, "layer") / "decoder/lexical"
    e = np.tanh(normalise(p, e @ p["W"] + p["b"], "new_std", "new_mean")) + e
    differences = lexical.logits(x, x_mask, y) - silent.logits(x, x_mask, y)
    added = e @ own[f"{part}/W"] + own[f"{part}/b"]
    np.testing.assert_allclose(differences, np.broadcast_to(added, differences.shape), rtol=0, atol=EXACT)

    deep = golden("deep of odd depth")  # whose high levels also read what is attended to; here as zeros
    inputs = {name: value for name, value in deep.parameters.items() if "high" in name and "/input_to_" in name}
    rows = deep.config.state_size
    deaf = with_changes(deep, {name: np.r_[value[:rows], 0 * value[rows:]] for name, value in inputs.items()})
    short = {name: value[:rows] for name, value in inputs.items()}
    same(deaf, with_changes(deaf, short, rnn_dec_deep_context=False))

    smoothed = golden("smoothed labels")  # (1 - s) -log p(y) + s mean(-log p), in training or not
    log_p = numpy_operations.log_softmax(smoothed.logits(x, x_mask, y))
    score = 0.9 * np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0] + 0.1 * log_p.mean(axis=-1)
    np.testing.assert_allclose(smoothed.loss(x, x_mask, y, y_mask), -(score * y_mask).sum(axis=0), rtol=EXACT)


def test_a_model_does_not_share_memory_with_what_it_is_made_of(adapter: Any) -> None:
    parameters = random_parameters(config_of("plain"), "float32")
    before = {name: value.copy() for name, value in parameters.items()}
    for source in (parameters, {name: adapter.array(value) for name, value in parameters.items()}):
        adapter.overwrite(adapter.Model(config_of("plain"), source).own)
        for name, value in source.items():
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(("kind", "dtype"), [("mixture", "bfloat16"), ("transformer rms", "float16")])
def test_a_model_in_16_bits(adapter: Any, kind: str, dtype: str) -> None:
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


@golden_too
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_a_wrong_batch_is_refused_in_a_sentence(adapter: Any, kind: str) -> None:
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
        r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary": (above, x_mask, y, y_mask),
        r"loss: an id of y is -1, expected 0 to 7, the vocabulary": (x, x_mask, y - 1, y_mask),
        r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y": (x, x_mask, y, y_mask[:2]),
        r"logits: x is dtype\('float64'\).*expected an array of integers": (array(sentences[0] * 1.0), x_mask, y),
        r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)": (x, x_mask[1:]),
        r"translate: beam_size is 9, expected at most 8, the target vocabulary": (x, x_mask, 9),
        r"translate: max_length is -1, expected an integer >= 1": (x, x_mask, 2, -1),
    }.items():
        with pytest.raises(TypeError if "dtype" in message else ValueError, match=message):
            getattr(model, message.partition(":")[0])(*arguments)
