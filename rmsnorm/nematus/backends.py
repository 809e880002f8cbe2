"""The models of the wings by name, where they are written: RNNSearch and Transformer with arrays in and arrays out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm import errors
from rmsnorm.nematus.config import Config


class _Wing(NamedTuple):
    framework: str
    package: str
    folder: str


_WINGS: Final = {
    "numpy": _Wing("NumPy", "numpy", "numpy"),
    "torch": _Wing("PyTorch", "torch", "torch"),
    "keras": _Wing("TensorFlow", "tensorflow", "tf"),
    "flax": _Wing("Flax", "flax", "flax"),
}
_CLASS: Final = {"rnn": ("rnnsearch", "RNNSearch"), "transformer": ("transformer", "Transformer")}


def has(wing: str, config: Config) -> bool:
    """Whether the framework is installed, and the wing has the model.

    >>> has("numpy", Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3))
    True
    """
    _, package, folder = _WINGS[wing]
    return all(find_spec(each) for each in (package, f"rmsnorm.nematus.{folder}.{_CLASS[config.model_type][0]}"))


def model_of(wing: str, config: Config) -> Any:
    """The class, which makes a model of a config and its parameters.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: the wing has no such model.
    """
    framework, package, folder = _WINGS[wing]
    if find_spec(package) is None:
        raise errors.missing_framework(framework, folder)
    module, attribute = _CLASS[config.model_type]
    if not has(wing, config):
        raise ValueError(f"port: {framework} has no {attribute} here, expected a wing that has one; take numpy")
    return getattr(import_module(f"rmsnorm.nematus.{folder}.{module}"), attribute)


class Opened:
    """The model of a wing: its methods with NumPy arrays, in the dtype of the parameters, without dropout.

    Raises:
        ModuleNotFoundError, ValueError: as model_of.
    """

    def __init__(self, wing: str, config: Config, parameters: Mapping[str, Any]) -> None:
        make = model_of(wing, config)
        self._precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        if wing == "flax" and any(array.dtype == np.float64 for array in parameters.values()):
            self._precision = _float64
        with self._precision():
            self.model = make(config, parameters)
        if wing == "torch":
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


def _float64() -> AbstractContextManager[Any]:
    """JAX has it only where it is asked for."""
    import jax

    return jax.enable_x64(True)
