"""What the tests ask of a framework, so that one test holds for Nematus's models and cells in all of them.

``numpy_nematus``, ``torch_nematus``, ``tf_nematus`` and ``flax_nematus`` each have

- ``KEY``: the name of the framework; ``nematus``: its module of models; ``Model``: a model as below;
- ``array(value, dtype=None)``: a NumPy array as an array of the framework; ``numpy(array)``: the way back;
- ``quick()``: a context where float64 is known and nothing is compiled; ``wide()``: one where float64 is known.
  All but ``numpy_nematus`` also have
- ``new_cell(cell, size, state, **options)``: a recurrent layer; ``load(layer, weights)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import CONFIGS, WITHOUT_DROPOUT, Reference, batch, random_parameters, reference

# Two computations of one thing in another order: numbers are below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}

golden_too = pytest.mark.parametrize("adapter", ["numpy", "torch", "tf", "flax"], indirect=True)


class Model:
    """A model of one framework, ``own``, of a config, parameters, ``training`` and a seed. NumPy arrays in and out.

    Subclasses have ``numpy``, and ``gradients``: of the mean loss, by the names of the parameters.
    """

    own: Any
    options: dict[str, Any] = {}  # noqa: RUF012  (arguments of every method)

    def __getattr__(self, name: str) -> Any:
        """The method encode, logits or loss."""

        def call(*sentences: Any, **options: Any) -> Any:
            return self.numpy(getattr(self.own, name)(*sentences, **options, **self.options))

        return call

    def translate(self, *arguments: Any, **options: Any) -> Any:
        return self.own.translate(*arguments, **options)

    def gradient_errors(self, sentences: Any, wanted: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """For each gradient of the mean loss the error and the size, as norms."""
        gradients, norm = self.gradients(*sentences), np.linalg.norm
        assert gradients.keys() == wanted.keys()
        return {name: (norm(gradients[name].astype(np.float64) - value), norm(value)) for name, value in wanted.items()}


def check_close(result: Any, wanted: Any, dtype: str = "float64") -> None:
    assert result.dtype == dtype
    np.testing.assert_allclose(result, wanted, rtol=0, atol=EXACT[dtype] * max(1.0, abs(wanted).max()))


def check_run(adapter: Any, name: str) -> None:
    """Compares with what Nematus or zero computed in float32 of TensorFlow, translations token for token.

    zero smooths labels in training. Its arrays have the batch first, as only a Transformer's have here.
    """
    run, is_zero = reference(name), name.startswith("Z")
    config, parameters, own = run.model()
    is_transformer = config.model_type == "transformer"
    model, trained = (adapter.Model(config, parameters, training=training) for training in (False, is_zero))
    x, x_mask, y, y_mask = run.sentences

    def check_array(name: str, result: Any, mask: Any) -> None:
        wanted = run.arrays[name].swapaxes(0, 1) if is_zero and not is_transformer else run.arrays[name]
        assert result.dtype == ("float64" if adapter.KEY == "numpy" else "float32")
        assert abs(result - wanted)[(mask.T if is_transformer else mask) > 0].max() <= 2e-5

    check_array("logits", model.logits(x, x_mask, y), y_mask + is_zero)
    np.testing.assert_allclose(trained.loss(*run.sentences), run.arrays["loss_per_sentence"], rtol=1e-5)
    if adapter.KEY == "flax":  # compiles all the rest for a quarter of a minute: tests/cli translates B with it
        return
    if is_zero:
        check_array("encoder_output", model.encode(x, x_mask), x_mask)
        plain = model if is_transformer else adapter.Model(config.replace(label_smoothing=0.0), parameters)
        for wanted in (run.arrays["loss_per_sentence_nosmooth"], run.arrays["score"]):
            np.testing.assert_allclose(plain.loss(*run.sentences), wanted, rtol=1e-5)
        assert check_beams(run, model, 10, rtol=2**-24) == 3  # the rounding of the recorded score
    else:
        assert check_beams(run, model, 12) == (2 if name == "B" else 4)
    if adapter.KEY == "numpy":
        return
    gradients, bound = trained.gradients(*run.sentences), 1.5e-5 if is_zero else 3e-5
    assert gradients.keys() == own.keys()
    for parameter, gradient in gradients.items():
        norm, *products = run.probes[own[parameter]]
        if parameter.endswith(("k_map/b_0", "feed_logits/b_0")):
            # It moves all scores of a query together, which the softmax does not see: what zero has is rounding.
            assert max(np.linalg.norm(gradient), norm) <= 1e-6
            continue
        assert abs(np.linalg.norm(gradient) - norm) <= bound * norm, parameter
        for k, product in enumerate(products, start=1):  # that of an error e with a vector c is at most |e| |c|
            cosines = np.cos(k * np.arange(gradient.size))
            error = abs(gradient.ravel() @ cosines - product)
            assert error <= bound * norm * np.linalg.norm(cosines), (parameter, k)


def check_beams(run: Reference, model: Any, max_length: int, rtol: float = 0) -> int:
    """Compares every beam, best first, token for token, and scores to 2e-5. Returns how many there were."""
    names = [name.removesuffix("_sequences") for name in run.arrays if name.endswith("_sequences")]
    for name in names:
        beam, alpha, *_ = f"{name}_alpha0".split("_")
        how = {"normalization_alpha": float(alpha.removeprefix("alpha"))}
        result = model.translate(*run.sentences[:2], int(beam.removeprefix("beam")), max_length, **how)
        sequences, scores = run.beam(name)
        np.testing.assert_array_equal(result.sequences, sequences, err_msg=name)
        np.testing.assert_allclose(result.scores, scores, rtol=rtol, atol=2e-5)
    return len(names)


def exact_gradients(config: Any, parameters: Any, sentences: Any, *, training: bool = False) -> dict[str, Any]:
    """The gradients of the mean loss by PyTorch in float64; recorded runs have those of the programs."""
    pytest.importorskip("torch")
    import torch_nematus

    wide = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    return torch_nematus.Model(config, wide, training=training).gradients(*sentences)


def check_kind(framework: Any, kind: str, dtype: str = "float64") -> None:
    """Compares states, logits, losses and translations with the golden's, and gradients with PyTorch's in float64.

    A Transformer is in training mode, and so is what comes from zero, whose sentences have one more place, which is
    empty in all.
    """
    import numpy_nematus

    config = CONFIGS[kind].replace(**WITHOUT_DROPOUT)
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
    if (framework.KEY, dtype) != ("torch", "float64"):
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
