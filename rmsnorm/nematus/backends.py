"""The models of the frameworks by name: RNNSearch and Transformer, called with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final

import numpy as np

from rmsnorm.nematus.config import Config
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import framework

_CLASSES: Final = {"rnn": "RNNSearch", "transformer": "Transformer"}


def model_class(name: str, config: Config) -> Any:
    """The class of the framework for this config; it makes a model from a config and parameters.

    ModuleNotFoundError if the framework is not installed, ValueError if there is no such framework.

    >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
    >>> model_class("numpy", config)
    <class 'rmsnorm.nematus.numpy_models.RNNSearch'>
    """
    row = framework("nematus", name)
    if row.missing is not None:
        raise errors.missing_framework(row.missing, row.extra)
    return getattr(import_module(f"rmsnorm.nematus.{row.key}_models"), _CLASSES[config.model_type])


class ArrayModel:
    """A model of any framework, called with NumPy arrays, in the dtype of the parameters, without dropout.

    Of ``logits``, ``loss`` and ``translate``. Errors are those of model_class.
    """

    def __init__(self, name: str, config: Config, parameters: Mapping[str, Any]) -> None:
        make, self.key = model_class(name, config), framework("nematus", name).key
        self._is_wide = any(array.dtype == np.float64 for array in parameters.values())
        with self._precision():
            self.model = make(config, parameters)
        if self.key == "torch":
            self.model.eval().requires_grad_(False)

    def _precision(self) -> AbstractContextManager[Any]:
        """Where JAX computes in float64, if the parameters are."""
        if self.key != "flax" or not self._is_wide:
            return nullcontext()
        return import_module("rmsnorm.flax_impl.private").enable_x64(True)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*sentences: Any, **options: Any) -> Any:
            with self._precision():
                result = getattr(self.model, name)(*sentences, **options)
                return type(result)(*map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)

        return call
