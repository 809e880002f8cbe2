"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial as bind
from typing import Any, Literal

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.flax.parameters import Parameters, compiled, leaves, normalise, project

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_input(p: Parameters, x: jax.Array, bias: Bias) -> tuple[jax.Array, jax.Array]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    inside = bias == "input"
    gates = project(p, x, "input_to_gates", "gates_bias" if inside else None, leaves(p, "gates_x_norm/"))
    proposal = project(p, x, "input_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_x_norm/"))
    return gates, proposal


def nematus_step(p: Parameters, h: jax.Array, from_input: tuple[jax.Array, jax.Array] | None, bias: Bias) -> jax.Array:
    """One step of a Nematus GRU.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    inside = bias == "state"
    gates = project(p, h, "state_to_gates", "gates_bias" if inside else None, leaves(p, "gates_state_norm/"))
    proposal = project(
        p, h, "state_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_state_norm/")
    )
    terms = [] if from_input is None else [from_input]
    if bias == "outside":
        terms.append((p["gates_bias"], p["proposal_bias"]))
    r, u = jnp.split(jax.nn.sigmoid(sum((of_gates for of_gates, _ in terms), gates)), 2, axis=-1)
    candidate = jnp.tanh(sum((of_proposal for _, of_proposal in terms), r * proposal))
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: jax.Array, from_input: tuple[jax.Array, jax.Array], biases: Sequence[Bias], first: int = 0
) -> jax.Array:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, None, bias)
    return h


@bind(compiled, static_argnames=("biases", "masking", "reverse"))
def nematus_level(
    p: Parameters,
    x: jax.Array,
    h0: jax.Array,
    biases: tuple[Bias, ...],
    *,
    mask: jax.Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> jax.Array:
    """A level of GRUs over a sequence."""

    def step(h: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        from_input, m = inputs
        new = nematus_deep_step(p, h, from_input, biases)
        if m is not None:
            new = m * new + (1 - m) * h if masking == "carry" else m * new
        return new, new

    from_input = nematus_input(p / "gru0", x, biases[0])
    return lax.scan(step, h0, (from_input, _column(mask, x)), reverse=reverse)[1]


def _column(mask: jax.Array | None, x: jax.Array) -> jax.Array | None:
    return None if mask is None else mask.astype(x.dtype)[..., None]


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
        >>> weights = {"gru0/state_to_gates": jnp.ones((1, 2)), "gru0/state_to_proposal": jnp.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": jnp.ones((1, 2)), "gru0/input_to_proposal": jnp.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": jnp.zeros(2), "gru0/proposal_bias": jnp.zeros(1)}
        >>> states = nematus_gru(jnp.zeros((2, 1, 1)), jnp.ones((1, 1)), weights)
        >>> [round(h.item(), 4) for h in states]
        [0.8988, 0.802]
    """
    p = Parameters(parameters, norm, partial=partial)
    return nematus_level(p, x, h0, tuple(biases), mask=mask, masking=masking, reverse=reverse)


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
        >>> weights = {"W": jnp.ones((1, 2)), "U": jnp.ones((1, 2)), "b": jnp.zeros(2)}
        >>> weights |= {"Wx": jnp.ones((1, 1)), "Ux": jnp.ones((1, 1)), "bx": jnp.zeros(1)}
        >>> states = gru(jnp.zeros((2, 1, 1)), jnp.ones((1, 1)), weights, mask=jnp.array([[1.0], [0.0]]))
        >>> [round(h.item(), 4) for h in states]
        [0.8988, 0.8988]
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    return nematus_gru(x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)


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
        >>> weights = {"W": jnp.ones((1, 4)), "U": jnp.ones((1, 4)), "b": jnp.zeros(4)}
        >>> h, c = lstm(jnp.zeros((1, 1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1)), weights)
        >>> round(h.item(), 4), round(c.item(), 4)
        (0.6277, 1.2878)
    """
    return _lstm(Parameters(parameters, norm, partial=partial), x, h0, c0, mask)


@compiled
def _lstm(
    p: Parameters, x: jax.Array, h0: jax.Array, c0: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    def step(state: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[Any, Any]:
        new = lstm_step(p, *state, *inputs)
        return new, new

    below = project(p, x, "W", "b", ("s1", "b1"))
    return lax.scan(step, (h0, c0), (below, _column(mask, x)))[1]


def lstm_step(
    p: Parameters, h: jax.Array, c: jax.Array, below: jax.Array, m: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    i, f, o, g = jnp.split(below + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4, axis=-1)
    new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = jax.nn.sigmoid(o) * jnp.tanh(normalise(p, new_c, "s3", "b3"))
    return new_h if m is None else m * new_h + (1 - m) * h, new_c
