"""RNNSearch, the Transformer and the recurrent cells in NumPy, the golden. The models compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any, ClassVar, Final

import numpy as np

from rmsnorm.nematus import cells, numpy_operations, protocol
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.models.parameters import Parameters

__all__ = ["RNNSearch", "Transformer", "gru", "lstm"]
_OPERATIONS: Final[Any] = numpy_operations  # all but dropout, which only gradients need


class Model(protocol.Model):
    """A model whose arithmetic is all float64."""

    operations: ClassVar[Any] = _OPERATIONS

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        p = Parameters(_OPERATIONS, self.parameters, self.config.norm, eps=self.config.eps)
        like = next(iter(self.parameters.values()))
        return lambda function, *arrays, **options: function(p, self.config, *arrays, **options), like


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch."""


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer."""


gru, lstm = bind(cells.gru, _OPERATIONS), bind(cells.lstm, _OPERATIONS)
