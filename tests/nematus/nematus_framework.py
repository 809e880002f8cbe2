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
from nematus_models import check_directions

# Two computations of one thing in another order: numbers are below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}

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


def check_everything(framework: Any, golden: Any, model: Any, sentences: Any, dtype: str, floor: float = 0.0) -> None:
    """Compares states, logits and losses with the golden's, and gradients with differences of its losses.

    Only those of PyTorch in float64; all others are compared with these. A Transformer is in training mode, and so is
    what comes from zero. A gradient may be off by ``floor`` of the norm of the largest one, where it is rounding alone.
    """
    x, x_mask, y, _ = sentences
    config, parameters = golden.own.config, golden.own.parameters
    check_close(model.encode(x, x_mask), golden.encode(x, x_mask), dtype)
    check_close(model.loss(*sentences), golden.loss(*sentences), dtype)
    is_stepwise = config.model_type == "rnn" and config.dialect != "zero"  # has logits by the rules of decoding
    for options in ({}, {"stepwise": True})[: 1 + is_stepwise]:
        check_close(model.logits(x, x_mask, y, **options), golden.logits(x, x_mask, y, **options), dtype)
    if framework.KEY == "torch" and dtype == "float64":
        losses = lambda moved: type(golden)(config, moved, training=not is_stepwise).loss(*sentences).mean()  # noqa: E731
        check_directions(losses, parameters, model.gradients(*sentences)[1])
        return
    wanted = exact_gradients(config, parameters, sentences, training=not is_stepwise)
    errors = model.gradient_errors(sentences, wanted)
    largest = max(size for _, size in errors.values())
    for name, (error, size) in errors.items():
        assert error <= GRADIENT[dtype] * size + floor * largest, name
