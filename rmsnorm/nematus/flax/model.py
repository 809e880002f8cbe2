"""The base class of RNNSearch and the Transformer: a module that computes what a network of models/ describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from rmsnorm import errors
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.flax import operations, sentences
from rmsnorm.nematus.flax.parameters import Named
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.search import translate

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model(Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence."""

    network: ClassVar[Any]  # rnnsearch or transformer of models/

    def __init__(self, config: Config, parameters: Mapping[str, Any], *, rngs: nnx.Rngs | None = None) -> None:
        super().__init__(parameters)
        self.config = config
        self.deterministic = True
        self.rngs = nnx.data(None) if rngs is None else rngs.dropout.fork()

    def __call__(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """The loss, for wrappers that train a module."""
        return self.loss(x, x_mask, y, y_mask)

    def encode(self, x: Any, x_mask: Any) -> jax.Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters()
        return run(self.network.encode, *sentences.source("encode", x, x_mask, self.config, like))

    def logits(self, x: Any, x_mask: Any, y: Any) -> jax.Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters()
        return run(self.network.score, *sentences.both("logits", x, x_mask, y, None, self.config, like)[:3])

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters()
        batch = sentences.both("loss", x, x_mask, y, y_mask, self.config, like)
        return run(self.network.loss, *batch, training=not self.deterministic)

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters(drops=False)
        batch = sentences.source("translate", x, x_mask, self.config, like)
        return translate(self.network, self.config, operations, run, *batch, beam_size, max_length, normalization_alpha)

    def _with_parameters(self, *, drops: bool = True) -> tuple[Callable[..., Any], jax.Array]:
        """What calls a function of the network, compiled, with the parameters as they are now; and one of these."""
        values, key, config = self.by_name(), self._key() if drops else None, self.config

        def run(function: Any, *arrays: Any, **options: Any) -> Any:
            return _run(values, key, *arrays, function=function, config=config, options=tuple(options.items()))

        return run, next(iter(values.values()))

    def _key(self) -> jax.Array | None:
        """The key of dropout in training; None if nothing is dropped.

        Raises:
            ValueError: the model was made without rngs.
        """
        own = f"{self.config.model_type}_drop"
        if self.deterministic or not any(rate for name, rate in vars(self.config).items() if name.startswith(own)):
            return None
        if self.rngs is None:
            raise errors.out_of_domain("dropout", "rngs", None, "an nnx.Rngs in training", "make the model with one")
        return self.rngs()


# Users need not compile a model; in another jit, grad or vmap its functions become a part of that.
@bind(jax.jit, inline=True, static_argnames=("function", "config", "options"))
def _run(
    values: dict[str, jax.Array],
    key: jax.Array | None,
    *arrays: Any,
    function: Any,
    config: Config,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    random = None if key is None else (jax.random.fold_in(key, number) for number in count())
    p = Parameters(operations, values, config.norm, eps=config.eps, random=random)
    return function(p, config, *arrays, **dict(options))
