"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial as bind
from typing import Any, Literal

import jax

from rmsnorm.nematus.cells import PARTIAL, CellNorm
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.flax import operations
from rmsnorm.nematus.models import recurrent
from rmsnorm.nematus.models.parameters import Parameters

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_gru(
    x: jax.Array,
    h0: jax.Array,
    parameters: Mapping[str, jax.Array],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: jax.Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> jax.Array:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> from jax import numpy as jnp
        >>> weights = {"gru0/state_to_gates": jnp.ones((1, 2)), "gru0/state_to_proposal": jnp.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": jnp.ones((1, 2)), "gru0/input_to_proposal": jnp.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": jnp.zeros(2), "gru0/proposal_bias": jnp.zeros(1)}
        >>> states = nematus_gru(jnp.zeros((2, 1, 1)), jnp.ones((1, 1)), weights)
        >>> [round(h.item(), 4) for h in states]
        [0.8988, 0.802]
    """
    options = (("masking", masking), ("reverse", reverse))
    return _level(parameters, x, h0, mask, biases=tuple(biases), norm=norm, partial=partial, options=options)


def gru(
    x: jax.Array,
    h0: jax.Array,
    parameters: Mapping[str, jax.Array],
    *,
    mask: jax.Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> jax.Array:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> from jax import numpy as jnp
        >>> weights = {"W": jnp.ones((1, 2)), "U": jnp.ones((1, 2)), "b": jnp.zeros(2)}
        >>> weights |= {"Wx": jnp.ones((1, 1)), "Ux": jnp.ones((1, 1)), "bx": jnp.zeros(1)}
        >>> states = gru(jnp.zeros((2, 1, 1)), jnp.ones((1, 1)), weights, mask=jnp.array([[1.0], [0.0]]))
        >>> [round(h.item(), 4) for h in states]
        [0.8988, 0.8988]
    """
    own = recurrent.renamed(parameters, norm)
    return nematus_gru(x, h0, own, mask=mask, masking="carry", norm=norm, partial=partial)


def lstm(
    x: jax.Array,
    h0: jax.Array,
    c0: jax.Array,
    parameters: Mapping[str, jax.Array],
    *,
    mask: jax.Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[jax.Array, jax.Array]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> from jax import numpy as jnp
        >>> weights = {"W": jnp.ones((1, 4)), "U": jnp.ones((1, 4)), "b": jnp.zeros(4)}
        >>> h, c = lstm(jnp.zeros((1, 1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1)), weights)
        >>> round(h.item(), 4), round(c.item(), 4)
        (0.6277, 1.2878)
    """
    return _lstm(parameters, x, h0, c0, mask, norm=norm, partial=partial)


# Compiled; in another jit, grad or vmap they become a part of that.
@bind(jax.jit, inline=True, static_argnames=("biases", "norm", "partial", "options"))
def _level(
    parameters: Mapping[str, jax.Array],
    x: jax.Array,
    h0: jax.Array,
    mask: jax.Array | None,
    *,
    biases: tuple[Bias, ...],
    norm: CellNorm,
    partial: float,
    options: tuple[tuple[str, Any], ...],
) -> jax.Array:
    p = Parameters(operations, parameters, norm, partial=partial)
    return recurrent.nematus_level(p, x, h0, biases, mask, **dict(options))


@bind(jax.jit, inline=True, static_argnames=("norm", "partial"))
def _lstm(
    parameters: Mapping[str, jax.Array],
    x: jax.Array,
    h0: jax.Array,
    c0: jax.Array,
    mask: jax.Array | None,
    *,
    norm: CellNorm,
    partial: float,
) -> tuple[jax.Array, jax.Array]:
    return recurrent.lstm(Parameters(operations, parameters, norm, partial=partial), x, h0, c0, mask)
