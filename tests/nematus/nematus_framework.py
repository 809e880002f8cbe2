"""What the tests ask of a framework, so that one test holds for Nematus's models and cells in all of them.

``numpy_nematus``, ``torch_nematus``, ``tf_nematus`` and ``flax_nematus`` each have

- ``KEY``: the name of the framework; ``nematus``: its folder of the package; ``Model``: a model as below;
- ``array(value, dtype=None)``: a NumPy array as an array of the framework; ``numpy(array)``: the way back;
- ``quick()``: a context where float64 is known and nothing is compiled, which takes longer than a short sentence;
- ``wide()``: a context where float64 is known. All but ``numpy_nematus`` also have
- ``pull_back(cell, inputs, cotangents, **options)``: the outputs of a cell and the gradients of its inputs;
- ``overwrite(model)``, ``new_cell(cell, size, state, **options)``, and but for ``tf_nematus`` ``load(layer, weights)``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from nematus_models import (
    WITHOUT_DROPOUT,
    batch,
    check_beams,
    check_directions,
    check_gradients,
    config_of,
    random_parameters,
    reference,
)

# Two computations of one thing in another order: numbers are below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}

# The norms of the recorded runs; those of zero are called Z.
RUNS = {"A2s": "layer", "A4": "rms", "A7b": "rms", "B": "rms", "F1": "layer", "L1": "rms", "M1": "layer"}
RUNS |= {"Z1": "rms", "Z2": "layer", "Z3": "rms"}

golden_too = pytest.mark.parametrize("adapter", ["numpy", "torch", "tf", "flax"], indirect=True)


class Model:
    """A model of one framework, as ``own``. NumPy arrays in, NumPy arrays out, in one mode.

    It is made of a config, parameters, ``training`` and a seed for what is dropped. Subclasses have ``gradients``: the
    loss of each sentence, and the gradients of their mean by the names of the parameters.
    """

    own: Any
    of_all: dict[str, Any] = {}  # noqa: RUF012  (arguments of every method, and of loss)
    of_loss: dict[str, Any] = {}  # noqa: RUF012

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The result of the method of that name."""
        result = getattr(self.own, name)(*arguments, **options, **self.of_all)
        return sys.modules[type(self).__module__].numpy(result)

    def encode(self, x: Any, x_mask: Any) -> Any:
        return self.call("encode", x, x_mask)

    def logits(self, x: Any, x_mask: Any, y: Any, **options: Any) -> Any:
        return self.call("logits", x, x_mask, y, **options)

    def loss(self, *sentences: Any) -> Any:
        return self.call("loss", *sentences, **self.of_loss)

    def translate(self, *arguments: Any, **options: Any) -> Any:
        return self.own.translate(*arguments, **options)

    def gradient_errors(self, sentences: Any, wanted: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """For each gradient of the mean loss the error and the size, as norms."""
        gradients = self.gradients(*sentences)[1]
        assert gradients.keys() == wanted.keys()
        norm = np.linalg.norm
        return {name: (norm(gradients[name].astype(np.float64) - value), norm(value)) for name, value in wanted.items()}


def exact_gradients(config: Any, parameters: Any, sentences: Any, *, training: bool = False) -> dict[str, Any]:
    """The gradients of the mean loss by PyTorch in float64, which test_models.py compares with differences."""
    pytest.importorskip("torch")
    import torch_nematus

    wide = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    return torch_nematus.Model(config, wide, training=training).gradients(*sentences)[1]


def check_close(result: Any, wanted: Any, dtype: str = "float64") -> None:
    assert result.dtype == dtype
    np.testing.assert_allclose(result, wanted, rtol=0, atol=EXACT[dtype] * max(1.0, abs(wanted).max()))


def check_run(adapter: Any, name: str) -> None:
    """Compares with what Nematus or zero computed in float32 of TensorFlow, translations token for token.

    zero smooths labels in training. Its arrays have the batch first, as only a Transformer's have here.
    """
    run, is_zero, is_wide = reference(name), name.startswith("Z"), adapter.KEY == "numpy"
    config, parameters, own = run.model(RUNS[name])
    is_transformer = config.model_type == "transformer"
    model, trained = (adapter.Model(config, parameters, training=training) for training in (False, is_zero))
    x, x_mask, y, y_mask = run.sentences

    def check_array(name: str, result: Any, mask: Any) -> None:
        wanted = run.arrays[name].swapaxes(0, 1) if is_zero and not is_transformer else run.arrays[name]
        assert result.dtype == ("float64" if is_wide else "float32")
        assert abs(result - wanted)[(mask.T if is_transformer else mask) > 0].max() <= 2e-5

    check_array("logits", model.logits(x, x_mask, y), y_mask + is_zero)
    if is_zero and not is_transformer and adapter.KEY == "flax":  # takes a quarter of a minute for the rest
        return
    np.testing.assert_allclose(trained.loss(*run.sentences), run.arrays["loss_per_sentence"], rtol=1e-5)
    if is_zero:
        check_array("encoder_output", model.encode(x, x_mask), x_mask)
        plain = model if is_transformer else adapter.Model(config.replace(label_smoothing=0.0), parameters)
        for wanted in (run.arrays["loss_per_sentence_nosmooth"], run.arrays["score"]):
            np.testing.assert_allclose(plain.loss(*run.sentences), wanted, rtol=1e-5)
        assert check_beams(run, model, 10, rtol=2**-24) == 3  # the rounding of the recorded score
    else:
        assert check_beams(run, model, 12) == (2 if name == "B" else 4)
    if is_wide:
        return
    gradients = trained.gradients(*run.sentences)[1]
    for bias in [name for name in gradients if name.endswith(("k_map/b_0", "feed_logits/b_0"))]:
        # It moves all scores of a query together, which the softmax does not see: what zero has is rounding.
        assert np.linalg.norm(gradients.pop(bias)) <= 1e-6
        assert run.probes[own.pop(bias)][0] <= 1e-6
    check_gradients(gradients, own, run.probes, bound=1.5e-5 if is_zero else 3e-5)


def check_kind(framework: Any, kind: str, dtype: str = "float64", **changes: Any) -> None:
    """Compares states, logits and losses with the golden's, gradients with differences of its losses, and translations.

    Only the gradients of PyTorch in float64; all others are compared with these. A Transformer is in training mode, and
    so is what comes from zero, whose sentences have one more place, which is empty in all.
    """
    import numpy_nematus

    config = config_of(kind).replace(**WITHOUT_DROPOUT, **changes)
    parameters, sentences, is_zero = random_parameters(config, dtype), batch(config), config.dialect == "zero"
    if is_zero:
        sentences = tuple(np.pad(part, [(0, 0)] * (part.ndim - 2) + [(0, 1), (0, 0)]) for part in sentences)
    x, x_mask, y, _ = sentences
    training = is_zero or config.model_type == "transformer"
    golden, model = (where.Model(config, parameters, training=training) for where in (numpy_nematus, framework))
    check_close(model.encode(x, x_mask), golden.encode(x, x_mask), dtype)
    check_close(model.loss(*sentences), golden.loss(*sentences), dtype)
    for options in ({}, {"stepwise": True})[: 1 + (not training)]:  # RNNSearch also has the rules of decoding
        check_close(model.logits(x, x_mask, y, **options), golden.logits(x, x_mask, y, **options), dtype)
    if framework.KEY == "torch" and dtype == "float64":
        losses = lambda moved: type(golden)(config, moved, training=training).loss(*sentences).mean()  # noqa: E731
        check_directions(losses, parameters, model.gradients(*sentences)[1])
    else:
        errors = model.gradient_errors(sentences, exact_gradients(config, parameters, sentences, training=training))
        largest = max(size for _, size in errors.values())
        for name, (error, size) in errors.items():  # in zero some are rounding alone
            assert error <= GRADIENT[dtype] * size + 1e-14 * is_zero * largest, name
    if dtype == "float32":
        return
    for size, length, alpha in ((2, 1, None),) if is_zero else ((1, 6, 0.0), (3, 6, 0.5))[framework.KEY == "flax" :]:
        result, wanted = (one.translate(x, x_mask, size, length, normalization_alpha=alpha) for one in (model, golden))
        np.testing.assert_array_equal(result.sequences, wanted.sequences)
        np.testing.assert_allclose(result.scores, wanted.scores, rtol=1e-6 if is_zero else 1e-12)
