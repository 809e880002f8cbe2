"""The recurrent cells of rmsnorm.nematus.protocol.Cells in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from rmsnorm.nematus import protocol
from rmsnorm.nematus.cells import CellNorm
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.numpy.parameters import Array, Parameters, normalise, project, sigmoid

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_input(p: Parameters, x: Array, bias: Bias) -> tuple[Array, Array]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    biases = ("gates_bias", "proposal_bias") if bias == "input" else (None, None)
    gates = project(p, x, "input_to_gates", biases[0], "gates_x_norm/")
    return gates, project(p, x, "input_to_proposal", biases[1], "proposal_x_norm/")


def nematus_step(p: Parameters, h: Array, bias: Bias, gates: Array | float = 0, proposal: Array | float = 0) -> Array:
    """One step of a Nematus GRU, with what the input adds to gates and proposal.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    biases = ("gates_bias", "proposal_bias") if bias == "state" else (None, None)
    gates = gates + project(p, h, "state_to_gates", biases[0], "gates_state_norm/")
    own = project(p, h, "state_to_proposal", biases[1], "proposal_state_norm/")
    if bias == "outside":
        gates, proposal = gates + p["gates_bias"], proposal + p["proposal_bias"]
    r, u = np.split(sigmoid(gates), 2, axis=-1)
    return u * h + (1 - u) * np.tanh(r * own + proposal)


def nematus_deep_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array], biases: Sequence[Bias], first: int = 0
) -> Array:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, biases[0], *from_input)
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, bias)
    return h


def nematus_level(
    p: Parameters,
    x: Array,
    h0: Array,
    mask: Array | None = None,
    *,
    biases: Sequence[Bias],
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


def lstm_sequence(p: Parameters, x: Array, h0: Array, c0: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """States and cells of the authors' LSTM over a sequence."""
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


def _run(
    cell: str, parameters: Mapping[str, Array], *arrays: Any, norm: CellNorm, partial: float, **options: Any
) -> Any:
    over: Any = nematus_level if cell == "gru" else lstm_sequence
    return over(Parameters(parameters, norm, partial=partial), *arrays, **options)


_cells: Final = protocol.Cells(_run)
nematus_gru, gru, lstm = _cells.nematus_gru, _cells.gru, _cells.lstm
