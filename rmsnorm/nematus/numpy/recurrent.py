"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.numpy.parameters import Array, Parameters, leaves, normalise, project, sigmoid

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_input(p: Parameters, x: Array, bias: Bias) -> tuple[Array, Array]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    biases = ("gates_bias", "proposal_bias") if bias == "input" else (None, None)
    gates = project(p, x, "input_to_gates", biases[0], leaves(p, "gates_x_norm/"))
    return gates, project(p, x, "input_to_proposal", biases[1], leaves(p, "proposal_x_norm/"))


def nematus_step(p: Parameters, h: Array, gates: Array | float, proposal: Array | float, bias: Bias) -> Array:
    """One step of a Nematus GRU, with what the input adds to gates and proposal.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    biases = ("gates_bias", "proposal_bias") if bias == "state" else (None, None)
    gates = gates + project(p, h, "state_to_gates", biases[0], leaves(p, "gates_state_norm/"))
    own = project(p, h, "state_to_proposal", biases[1], leaves(p, "proposal_state_norm/"))
    if bias == "outside":
        gates, proposal = gates + p["gates_bias"], proposal + p["proposal_bias"]
    r, u = np.split(sigmoid(gates), 2, axis=-1)
    return u * h + (1 - u) * np.tanh(r * own + proposal)


def nematus_deep_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array], biases: Sequence[Bias], first: int = 0
) -> Array:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, *from_input, biases[0])
    nothing = np.zeros((), h.dtype)
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, nothing, nothing, bias)
    return h


def nematus_level(
    p: Parameters,
    x: Array,
    h0: Array,
    biases: Sequence[Bias],
    *,
    mask: Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> Array:
    """A level of GRUs over a sequence."""
    gates, proposal = nematus_input(p / "gru0", x, biases[0])
    masks = np.ones(x.shape[:2], x.dtype) if mask is None else np.asarray(mask, x.dtype)
    carries = np.asarray(masking == "carry", x.dtype)
    states = np.empty((*x.shape[:2], h0.shape[-1]), np.result_type(x, h0))
    h = h0
    for t in range(len(x))[:: -1 if reverse else 1]:
        m = masks[t][:, None]
        h = m * nematus_deep_step(p, h, (gates[t], proposal[t]), biases) + carries * (1 - m) * h
        states[t] = h
    return states


def nematus_gru(
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Array:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> weights = {"gru0/state_to_gates": np.ones((1, 2)), "gru0/state_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": np.ones((1, 2)), "gru0/input_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": np.zeros(2), "gru0/proposal_bias": np.zeros(1)}
        >>> nematus_gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights).round(4).ravel()
        array([0.8988, 0.802 ])
    """
    p = Parameters(parameters, norm, partial=partial)
    return nematus_level(p, x, h0, biases, mask=mask, masking=masking, reverse=reverse)


def gru(
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Array:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> weights = {"W": np.ones((1, 2)), "U": np.ones((1, 2)), "b": np.zeros(2)}
        >>> weights |= {"Wx": np.ones((1, 1)), "Ux": np.ones((1, 1)), "bx": np.zeros(1)}
        >>> gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights, mask=np.array([[1.0], [0.0]])).round(4).ravel()
        array([0.8988, 0.8988])
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    return nematus_gru(x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)


def lstm(
    x: Array,
    h0: Array,
    c0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Array, Array]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> weights = {"W": np.ones((1, 4)), "U": np.ones((1, 4)), "b": np.zeros(4)}
        >>> h, c = lstm(np.zeros((1, 1, 1)), np.ones((1, 1)), np.ones((1, 1)), weights)
        >>> h.round(4).item(), c.round(4).item()
        (0.6277, 1.2878)
    """
    p = Parameters(parameters, norm, partial=partial)
    below = project(p, x, "W", "b", ("s1", "b1"))
    masks = np.ones(x.shape[:2], x.dtype) if mask is None else np.asarray(mask, x.dtype)
    states, h, c = [], h0, c0
    for from_input, m in zip(below, masks[:, :, None], strict=True):
        *gates, g = np.split(from_input + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4, axis=-1)
        i, f, o = (sigmoid(gate) for gate in gates)
        c = m * (f * c + i * np.tanh(g)) + (1 - m) * c
        h = m * o * np.tanh(normalise(p, c, "s3", "b3")) + (1 - m) * h
        states.append((h, c))
    hs, cs = (np.stack(arrays) for arrays in zip(*states, strict=True))
    return hs, cs
