"""RNNSearch and the Transformer as Flax NNX modules, whose parameters have the names of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import Any, ClassVar

import jax
from flax import nnx
from jax import numpy as jnp

from rmsnorm.nematus import protocol
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.flax import operations
from rmsnorm.nematus.models import rnnsearch, transformer
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.specification import errors


class Scope(nnx.Module):
    """Parameters below one name."""


class Named(Scope):
    """A module whose parameters have names with slashes, as ``gru0/state_to_gates``; nested modules in its state."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            *scopes, leaf = name.split("/")
            module: nnx.Module = self
            for scope in scopes:
                if not hasattr(module, scope):
                    setattr(module, scope, Scope())
                module = getattr(module, scope)
            setattr(module, leaf, nnx.Param(jnp.array(value)))  # a copy, because an optimizer may donate the array

    def by_name(self) -> dict[str, jax.Array]:
        state = nnx.to_flat_state(nnx.state(self, nnx.Param))
        return {"/".join(map(str, path)): value[...] for path, value in state}


class Model(protocol.Model, Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence.

    A new model is in evaluation mode. In its state, Nematus's names are paths. The stream ``dropout`` of ``rngs``,
    which training with dropout needs, is forked.
    """

    operations: ClassVar[Any] = operations

    def __init__(self, config: Config, parameters: Mapping[str, Any], *, rngs: nnx.Rngs | None = None) -> None:
        Named.__init__(self, parameters)
        self.config = config
        self.deterministic = True
        self.rngs = nnx.data(None) if rngs is None else rngs.dropout.fork()

    def __call__(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> jax.Array:
        """The loss, for wrappers that train a module."""
        return self.loss(x, x_mask, y, y_mask)

    def is_training(self) -> bool:
        return not self.deterministic

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], jax.Array]:
        values, key, config = self.by_name(), self._key() if training else None, self.config

        def run(function: Any, *arrays: Any, **options: Any) -> Any:
            return _run(values, key, *arrays, function=function, config=config, options=tuple(options.items()))

        return run, next(iter(values.values()))

    def _key(self) -> jax.Array | None:
        """The key of dropout in training; None if nothing is dropped.

        Raises:
            ValueError: the model was made without rngs.
        """
        own = f"{self.config.model_type}_drop"
        if not any(rate for name, rate in vars(self.config).items() if name.startswith(own)):
            return None
        if self.rngs is None:
            raise errors.out_of_domain("dropout", "rngs", None, "an nnx.Rngs in training", "make the model with one")
        return self.rngs()


# Users need not compile a model; in another jit, grad or vmap its functions become a part of that.
@bind(jax.jit, inline=True, static_argnames=("function", "config", "options"))
def _run(
    values: dict[str, jax.Array], key: jax.Array | None, *arrays: Any, function: Any, config: Config, options: Any
) -> Any:
    random = None if key is None else (jax.random.fold_in(key, number) for number in count())
    p = Parameters(operations, values, config.norm, eps=config.eps, random=random)
    return function(p, config, *arrays, **dict(options))


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    Example:
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: jnp.zeros(row.shape) for row in variables(config)})
        >>> x, y = jnp.array([[[3], [2], [0]]]), jnp.array([[1], [0]])
        >>> round(model.loss(x, jnp.ones((3, 1)), y, jnp.ones((2, 1))).item(), 4)  # 2 log 3
        2.1972
    """

    network: ClassVar[Any] = rnnsearch


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    Example:
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: jnp.zeros(row.shape) for row in variables(config)})
        >>> x, y = jnp.array([[[3], [2], [0]]]), jnp.array([[1], [0]])
        >>> round(model.loss(x, jnp.ones((3, 1)), y, jnp.ones((2, 1))).item(), 4)  # 2 log 3
        2.1972
    """

    network: ClassVar[Any] = transformer
