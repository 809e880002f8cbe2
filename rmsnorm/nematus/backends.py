"""The models of the frameworks by name: RNNSearch and Transformer, called with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial as bind
from importlib import import_module
from typing import Any, Final

import numpy as np

from rmsnorm.nematus.config import Config
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import framework

_CLASSES: Final = {"rnn": "RNNSearch", "transformer": "Transformer"}


def model_class(name: str, config: Config) -> Any:
    """The class of the framework for this config; it makes a model from a config and parameters.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: there is no such framework.

    >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
    >>> model_class("numpy", config)
    <class 'rmsnorm.nematus.numpy.model.RNNSearch'>
    """
    row = framework("nematus", name)
    if row.missing is not None:
        raise errors.missing_framework(row.missing, row.extra)
    return getattr(import_module(f"rmsnorm.nematus.{row.key}"), _CLASSES[config.model_type])


class ArrayModel:
    """A model of any framework, called with NumPy arrays, in the dtype of the parameters, without dropout.

    Raises:
        ModuleNotFoundError, ValueError: as model_class.
    """

    def __init__(self, name: str, config: Config, parameters: Mapping[str, Any]) -> None:
        make, self.key = model_class(name, config), framework("nematus", name).key
        self._precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.key == "flax" and any(array.dtype == np.float64 for array in parameters.values()):
            self._precision = bind(
                import_module("rmsnorm.flax_impl.private").enable_x64, True
            )  # else JAX computes in float32
        with self._precision():
            self.model = make(config, parameters)
        if self.key == "torch":
            self.model.eval().requires_grad_(False)

    def logits(self, *sentences: Any) -> Any:
        with self._precision():
            return np.asarray(self.model.logits(*sentences))

    def loss(self, *sentences: Any) -> Any:
        with self._precision():
            return np.asarray(self.model.loss(*sentences))

    def translate(self, *sentences: Any, **options: Any) -> tuple[Any, Any]:
        with self._precision():
            sequences, scores = self.model.translate(*sentences, **options)
        return np.asarray(sequences), np.asarray(scores)
