"""The recurrent cells of rmsnorm.nematus.protocol.Cells as functions, and as NNX modules; all are time-major."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial as bind
from typing import Any, Final, Literal

import jax
from flax import nnx
from jax import numpy as jnp
from jax.nn import initializers

from rmsnorm.nematus import protocol
from rmsnorm.nematus.cells import PARTIAL, CellNorm, Shapes, gru_shapes, initial, lstm_shapes, nematus_gru_shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.flax import operations
from rmsnorm.nematus.flax.model import Named
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.recurrent import CELLS
from rmsnorm.specification import dtypes, errors

__all__ = ["GRU", "LSTM", "NematusGRU", "gru", "lstm", "nematus_gru"]


# In another jit, grad or vmap it becomes a part of that. GRUs alone have biases, masking and reverse.
@bind(jax.jit, inline=True, static_argnums=0, static_argnames=("norm", "partial", "biases", "masking", "reverse"))
def _run(
    cell: str, parameters: Mapping[str, jax.Array], *arrays: Any, norm: CellNorm, partial: float, **options: Any
) -> Any:
    return CELLS[cell](Parameters(operations, parameters, norm, partial=partial), *arrays, **options)


_cells: Final = protocol.Cells(_run)
nematus_gru, gru, lstm = _cells.nematus_gru, _cells.gru, _cells.lstm


class _Layer(Named):
    """A layer with parameters of the shapes that ``shapes`` returns; initial values as in Nematus."""

    shapes: Callable[..., Shapes]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        dtype = errors.dtype_named(type(self).__name__, "param_dtype", param_dtype)
        wide = dtypes.arithmetic(dtype)  # 16 bits have no orthogonal matrices

        def new(kind: str, shape: tuple[int, ...]) -> jax.Array:
            if kind == "orthogonal":
                count, square = shape[1] // hidden_size, (hidden_size, hidden_size)
                return jnp.hstack([initializers.orthogonal()(rngs.params(), square, wide) for _ in range(count)])
            if kind == "normal":
                return initializers.normal(0.01)(rngs.params(), shape, wide)
            return jnp.full(shape, float(kind == "ones"))

        shapes = self.shapes(input_size, hidden_size, norm=norm)
        super().__init__({name: new(initial(name), shape).astype(dtype) for name, shape in shapes.items()})
        self.hidden_size, self.norm, self.partial = hidden_size, norm, partial

    def begin(self, x: jax.Array, state: jax.Array | None) -> jax.Array:
        return jnp.zeros((x.shape[1], self.hidden_size), x.dtype) if state is None else state


class NematusGRU(_Layer):
    """Nematus's GRU with deep transition, as nematus_gru computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        biases, masking, reverse, norm, partial: as for nematus_gru.
        param_dtype: of the parameters.
        rngs: for their initial values.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = NematusGRU(3, 4, biases=("input", "state"), norm="rms", rngs=nnx.Rngs(0))
        >>> layer(jnp.zeros((5, 2, 3))).shape
        (5, 2, 4)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        biases: Sequence[Bias] = ("input",),
        masking: Literal["zero", "carry"] = "zero",
        reverse: bool = False,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.biases, self.masking, self.reverse = tuple(biases), masking, reverse
        super().__init__(input_size, hidden_size, norm=norm, partial=partial, param_dtype=param_dtype, rngs=rngs)

    def shapes(self, input_size: int, hidden_size: int, norm: CellNorm) -> Shapes:
        return nematus_gru_shapes(input_size, hidden_size, self.biases, norm)

    def __call__(self, x: jax.Array, h0: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return nematus_gru(
            x, self.begin(x, h0), self.by_name(), biases=self.biases, mask=mask, masking=self.masking,
            reverse=self.reverse, norm=self.norm, partial=self.partial,
        )  # fmt: skip


class GRU(_Layer):
    """The GRU of the authors' Theano code, as gru computes it.

    Args, Raises: as NematusGRU, but for biases, masking and reverse.

    Example:
        >>> layer = GRU(3, 4, norm="rms", rngs=nnx.Rngs(0))
        >>> layer(jnp.zeros((5, 2, 3)), mask=jnp.ones((5, 2))).shape
        (5, 2, 4)
    """

    shapes = staticmethod(gru_shapes)

    def __call__(self, x: jax.Array, h0: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return gru(x, self.begin(x, h0), self.by_name(), mask=mask, norm=self.norm, partial=self.partial)


class LSTM(_Layer):
    """The LSTM of the authors' Theano code, as lstm computes it.

    Args, Raises: as NematusGRU, but for biases, masking and reverse.

    Example:
        >>> layer = LSTM(3, 4, norm="rms", rngs=nnx.Rngs(0))
        >>> h, c = layer(jnp.zeros((5, 2, 3)))
        >>> h.shape, c.shape
        ((5, 2, 4), (5, 2, 4))
    """

    shapes = staticmethod(lstm_shapes)

    def __call__(
        self, x: jax.Array, state: tuple[jax.Array, jax.Array] | None = None, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(h, c), both (length, batch, hidden_size). Without a state (h0, c0) both start with zeros."""
        h, c = (self.begin(x, first) for first in state or (None, None))
        return lstm(x, h, c, self.by_name(), mask=mask, norm=self.norm, partial=self.partial)
