"""Recurrent layers as Flax NNX modules: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major, as for the functions in ``recurrent``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax import numpy as jnp
from jax.nn import initializers

from rmsnorm import dtypes
from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_shapes, lstm_shapes, nematus_gru_shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.flax.parameters import Named
from rmsnorm.nematus.flax.recurrent import gru, lstm, nematus_gru

__all__ = ["GRU", "LSTM", "NematusGRU"]


class _Cell(Named):
    """A layer with parameters of these shapes; initial values as in Nematus."""

    def __init__(
        self,
        hidden_size: int,
        shapes: Mapping[str, tuple[int, ...]],
        norm: CellNorm,
        partial: float,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        wide = dtypes.arithmetic(jnp.dtype(param_dtype).name)  # 16 bits have no orthogonal matrices

        def initial(name: str, shape: tuple[int, ...]) -> jax.Array:
            leaf = name.rpartition("/")[2]
            if len(shape) == 1:
                return jnp.full(shape, float(leaf[0] == "s" or leaf == "new_std"))
            if not leaf.startswith(("U", "state")):
                return initializers.normal(0.01)(rngs.params(), shape, wide)
            count = shape[1] // hidden_size
            squares = (hidden_size, hidden_size)
            return jnp.hstack([initializers.orthogonal()(rngs.params(), squares, wide) for _ in range(count)])

        super().__init__({name: initial(name, shape).astype(param_dtype) for name, shape in shapes.items()})
        self.hidden_size, self.norm, self.partial = hidden_size, norm, partial

    def zeros(self, x: jax.Array) -> jax.Array:
        return jnp.zeros((x.shape[1], self.hidden_size), x.dtype)


class NematusGRU(_Cell):
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
        shapes = nematus_gru_shapes(input_size, hidden_size, biases, norm)
        super().__init__(hidden_size, shapes, norm, partial, param_dtype, rngs)
        self.biases, self.masking, self.reverse = tuple(biases), masking, reverse

    def __call__(self, x: jax.Array, h0: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        h0 = self.zeros(x) if h0 is None else h0
        return nematus_gru(
            x, h0, self.by_name(), biases=self.biases, mask=mask, masking=self.masking, reverse=self.reverse,
            norm=self.norm, partial=self.partial,
        )  # fmt: skip


class GRU(_Cell):
    """The GRU of the authors' Theano code, as gru computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        norm, partial: as for gru.
        param_dtype: of the parameters.
        rngs: for their initial values.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = GRU(3, 4, norm="rms", rngs=nnx.Rngs(0))
        >>> layer(jnp.zeros((5, 2, 3)), mask=jnp.ones((5, 2))).shape
        (5, 2, 4)
    """

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
        super().__init__(hidden_size, gru_shapes(input_size, hidden_size, norm), norm, partial, param_dtype, rngs)

    def __call__(self, x: jax.Array, h0: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        h0 = self.zeros(x) if h0 is None else h0
        return gru(x, h0, self.by_name(), mask=mask, norm=self.norm, partial=self.partial)


class LSTM(_Cell):
    """The LSTM of the authors' Theano code, as lstm computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        norm, partial: as for lstm.
        param_dtype: of the parameters.
        rngs: for their initial values.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = LSTM(3, 4, norm="rms", rngs=nnx.Rngs(0))
        >>> h, c = layer(jnp.zeros((5, 2, 3)))
        >>> h.shape, c.shape
        ((5, 2, 4), (5, 2, 4))
    """

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
        super().__init__(hidden_size, lstm_shapes(input_size, hidden_size, norm), norm, partial, param_dtype, rngs)

    def __call__(
        self, x: jax.Array, state: tuple[jax.Array, jax.Array] | None = None, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(h, c), both (length, batch, hidden_size). Without a state (h0, c0) both start with zeros."""
        h0, c0 = state or (self.zeros(x), self.zeros(x))
        return lstm(x, h0, c0, self.by_name(), mask=mask, norm=self.norm, partial=self.partial)
