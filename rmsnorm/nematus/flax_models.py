"""RNNSearch, the Transformer and the recurrent cells in Flax, as modules whose parameters have Nematus's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from itertools import count
from typing import Any, ClassVar, Final

import jax
from flax import nnx
from jax import numpy as jnp

from rmsnorm.nematus import cells, flax_operations, protocol
from rmsnorm.nematus.config import Config, Norm
from rmsnorm.nematus.models.parameters import PARTIAL, Parameters
from rmsnorm.specification import errors

__all__ = ["RNNSearch", "Recurrent", "Transformer", "gru", "lstm"]


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

    operations: ClassVar[Any] = flax_operations

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
    p = Parameters(flax_operations, values, config.norm, eps=config.eps, random=random)
    return function(p, config, *arrays, **dict(options))


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch."""


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer."""


_jit: Final = bind(jax.jit, inline=True, static_argnames=("norm", "partial"))
gru, lstm = _jit(bind(cells.gru, flax_operations)), _jit(bind(cells.lstm, flax_operations))


class Recurrent(Named):
    """A layer of one of the authors' cells: see rmsnorm.nematus.cells. kind is ``gru`` or ``lstm``.

    Example:
        >>> layer = Recurrent("lstm", 3, 4, norm="rms", rngs=nnx.Rngs(0))
        >>> [states.shape for states in layer(jnp.zeros((5, 2, 3)), mask=jnp.ones((5, 2)))]
        [(5, 2, 4), (5, 2, 4)]
    """

    def __init__(
        self,
        kind: cells.Kind,
        input_size: int,
        hidden_size: int,
        *,
        norm: Norm = "none",
        partial: float = PARTIAL,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        dtype = errors.dtype_named("Recurrent", "param_dtype", param_dtype)
        seed = int(jax.random.randint(rngs.params(), (), 0, 2**31 - 1))
        parameters = cells.new_parameters(kind, input_size, hidden_size, norm, seed)
        super().__init__({name: jnp.asarray(value, dtype) for name, value in parameters.items()})
        self.kind, self.hidden_size, self.norm, self.partial = kind, hidden_size, norm, partial

    def __call__(self, x: jax.Array, *states: jax.Array, mask: jax.Array | None = None) -> Any:
        """The states (length, batch, hidden_size), of an LSTM (h, c). Without first states these are zeros."""
        states = cells.first_states(self.kind, states, jnp.zeros((x.shape[1], self.hidden_size), x.dtype))
        cell = lstm if self.kind == "lstm" else gru
        return cell(x, *states, self.by_name(), mask=mask, norm=self.norm, partial=self.partial)
