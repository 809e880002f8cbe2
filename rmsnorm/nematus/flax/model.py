"""The base class of RNNSearch and the Transformer: a module that computes what a network of models/ describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from rmsnorm import errors
from rmsnorm.nematus.flax import operations
from rmsnorm.nematus.flax.parameters import Named
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.shell import Shell

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model(Shell, Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence."""

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
        """See Shell. The functions are compiled."""
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
