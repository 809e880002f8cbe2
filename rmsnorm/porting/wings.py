"""The models of the wings by name, where they are written: RNNSearch and Transformer with arrays in and arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.porting.config import Config

_FRAMEWORK: Final = {"numpy": ("NumPy", "numpy"), "torch": ("PyTorch", "torch")}
_CLASS: Final = {"rnn": ("rnnsearch", "RNNSearch"), "transformer": ("transformer", "Transformer")}


def has(wing: str, config: Config) -> bool:
    """Whether the framework is installed, and the wing has the model.

    >>> has("numpy", Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3))
    True
    """
    package = find_spec(_FRAMEWORK[wing][1])
    return package is not None and find_spec(f"rmsnorm.{wing}_impl.{_CLASS[config.model_type][0]}") is not None


class Opened:
    """The model of a wing: its methods with NumPy arrays, without dropout and gradients.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: the wing has no such model.
    """

    def __init__(self, wing: str, config: Config, parameters: Mapping[str, Any]) -> None:
        name, package = _FRAMEWORK[wing]
        if find_spec(package) is None:
            raise errors.missing_framework(name, wing)
        module, attribute = _CLASS[config.model_type]
        if not has(wing, config):
            raise ValueError(f"port: {name} has no {attribute} here, expected a wing that has one; take numpy")
        self.model = getattr(import_module(f"rmsnorm.{wing}_impl.{module}"), attribute)(config, parameters)
        if wing == "torch":
            self.model.eval().requires_grad_(False)

    def logits(self, *sentences: Any) -> Any:
        return np.asarray(self.model.logits(*sentences))

    def loss(self, *sentences: Any) -> Any:
        return np.asarray(self.model.loss(*sentences))

    def translate(self, *sentences: Any, **options: Any) -> tuple[Any, Any]:
        sequences, scores = self.model.translate(*sentences, **options)
        return np.asarray(sequences), np.asarray(scores)
