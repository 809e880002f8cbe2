"""What the tests ask of a framework, so that one test holds for Nematus's models and cells in all of them.

``numpy_nematus``, ``torch_nematus``, ``tf_nematus`` and ``flax_nematus`` each have

- ``Model``: a model as below;
- ``array(value, dtype=None)``: a NumPy array as an array of the framework; ``numpy(array)``: the way back;
- ``quick()``: a context where float64 is known and nothing is compiled, which takes longer than a short sentence;
- ``wide()``: a context where float64 is known;
- ``nematus``: its folder of the package. All but ``numpy_nematus`` also have
- ``pull_back(cell, inputs, cotangents, **options)``: the outputs of a cell and the gradients of its inputs;
- ``overwrite(model)``, ``masks(monkeypatch)``, ``scale_dropout(monkeypatch, keep=...)`` for the tests of models
  (``masks`` is in ``numpy_nematus``, too);
- ``new_cell(cell, size, state, **options)``, and but for ``tf_nematus`` ``load(layer, weights)``, for those of cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nematus_models import WITH_DROPOUT, check_directions, random_parameters

from rmsnorm.nematus.models.parameters import Parameters

# Two computations of one thing in another order: logits are below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}


class Model:
    """A model of one framework, as ``own``. NumPy arrays in, NumPy arrays out, in one mode.

    Args:
        config, parameters: as for the model.
        training: whether it is in training mode.
        seed: for what is dropped in training.
    """

    own: Any

    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        raise NotImplementedError

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The result of the method of that name."""
        raise NotImplementedError

    def gradients(self, *sentences: Any) -> tuple[Any, dict[str, Any]]:
        """The loss of each sentence, and the gradients of their mean by the names of the parameters."""
        raise NotImplementedError

    def gradient_errors(self, sentences: Any, wanted: dict[str, Any]) -> tuple[Any, dict[str, tuple[float, float]]]:
        """The loss of each sentence, and for each gradient of their mean the error and the size, as norms."""
        loss, gradients = self.gradients(*sentences)
        assert gradients.keys() == wanted.keys()
        errors = {name: np.linalg.norm(gradients[name].astype(np.float64) - wanted[name]) for name in wanted}
        return loss, {name: (error, np.linalg.norm(wanted[name])) for name, error in errors.items()}

    def scores(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> tuple[Any, Any]:
        """Logits and losses."""
        return self.logits(x, x_mask, y), self.loss(x, x_mask, y, y_mask)

    def encode(self, x: Any, x_mask: Any) -> Any:
        return self.call("encode", x, x_mask)

    def logits(self, x: Any, x_mask: Any, y: Any, **options: Any) -> Any:
        return self.call("logits", x, x_mask, y, **options)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Any:
        return self.call("loss", x, x_mask, y, y_mask)

    def called(self, *sentences: Any) -> Any:
        """The result of calling the model itself, for what trains it."""
        return self.call("__call__", *sentences)

    def translate(self, *arguments: Any, **options: Any) -> Any:
        return self.own.translate(*arguments, **options)


def masks(monkeypatch: pytest.MonkeyPatch, numpy: Any) -> dict[str, Any]:
    """The masks of dropout by name, as NumPy arrays; filled where RNNSearch drops."""
    made: dict[str, Any] = {}
    drop = Parameters.drop

    def record(self: Any, name: str, x: Any) -> Any:
        mask = self.masks.get(self.scope + name)
        if mask is not None:
            made[self.scope + name] = numpy(mask)
        return drop(self, name, x)

    monkeypatch.setattr(Parameters, "drop", record)
    return made


def exact_gradients(config: Any, parameters: Any, sentences: Any, *, training: bool = False) -> dict[str, Any]:
    """The gradients of the mean loss by PyTorch in float64, which test_models.py compares with differences."""
    pytest.importorskip("torch")
    import torch_nematus

    wide = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    return torch_nematus.Model(config, wide, training=training).gradients(*sentences)[1]


def check_close(result: Any, wanted: Any) -> None:
    bound = EXACT[result.dtype.name] * max(1.0, abs(wanted).max())
    np.testing.assert_allclose(result, wanted, rtol=0, atol=bound)


def check_everything(
    framework: Any, golden: Any, model: Any, sentences: Any, dtype: str, *, training: bool = False,
    stepwise: bool = False, floor: float = 0.0,
) -> None:  # fmt: skip
    """Compares states, logits and losses with the golden's, and gradients with differences of its losses.

    Only those of PyTorch in float64; all others are compared with these.

    Args:
        training: whether the models are in training mode.
        stepwise: whether there are logits by the rules of decoding.
        floor: how far a gradient may be off, of the norm of the largest one, where rounding is all that it is.
    """
    x, x_mask, y, _ = sentences
    pairs = [(one.encode(x, x_mask), one.logits(x, x_mask, y), one.loss(*sentences)) for one in (model, golden)]
    if stepwise:
        pairs.append(tuple(one.logits(x, x_mask, y, stepwise=True) for one in (model, golden)))
    for result, wanted in (*zip(*pairs[:2], strict=True), *pairs[2:]):
        assert result.dtype == dtype
        check_close(result, wanted)
    config, parameters = golden.own.config, golden.own.parameters
    if framework.__name__ == "torch_nematus" and dtype == "float64":
        check_directions(
            lambda moved: type(golden)(config, moved, training=training).loss(*sentences).mean(),
            parameters,
            model.gradients(*sentences)[1],
        )
        return
    gradients = exact_gradients(config, parameters, sentences, training=training)
    errors = model.gradient_errors(sentences, gradients)[1]
    largest = max(size for _, size in errors.values())
    for name, (error, size) in errors.items():
        assert error <= GRADIENT[dtype] * size + floor * largest, name


def lose_words(framework: Any, config: Any, masks: dict[str, Any]) -> tuple[Any, Any, int]:
    """A model with dropout, one sentence that lost some words on both sides, and the seed of that.

    config: of the model without dropout.
    masks: as ``masks(monkeypatch)`` of the framework fills it; then of this sentence.
    """
    config = config.replace(**WITH_DROPOUT)
    words = np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    for seed in range(100):
        model = framework.Model(config, random_parameters(config), training=True, seed=seed)
        model.loss(*sentences)
        if all({0.0} < set(masks[f"{side} words"].ravel()) for side in ("source", "target")):
            return model, sentences, seed
    raise AssertionError("no seed drops words on both sides")
