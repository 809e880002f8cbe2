"""RNNSearch and the Transformer in NumPy, the golden: scores, losses and translations. All of it is float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from rmsnorm.nematus import protocol
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.numpy import rnnsearch, transformer
from rmsnorm.nematus.numpy.parameters import Array, Parameters


class Model(protocol.Model):
    """A model whose arithmetic is all float64."""

    operations: ClassVar[Any] = SimpleNamespace(
        cached=None, rows=getitem, to_host=np.asarray, checked=lambda check, ids, mask: check(ids, mask),
        as_ids=lambda ids, like: ids, cast=lambda mask, like: mask,
    )  # fmt: skip

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Array | None]:
        p = Parameters(self.parameters, self.config.norm, eps=self.config.eps)
        return lambda function, *arrays, **options: function(p, self.config, *arrays, **options), None


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    Example:
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    network: ClassVar[Any] = rnnsearch


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    Example:
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: np.zeros(row.shape) for row in variables(config)})
        >>> x, y = np.array([[[3], [2], [0]]]), np.array([[1], [0]])
        >>> model.loss(x, np.ones((3, 1)), y, np.ones((2, 1))).round(4)  # 2 log 3
        array([2.1972])
    """

    network: ClassVar[Any] = transformer
