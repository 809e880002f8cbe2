"""The recurrent cells of rmsnorm.nematus.protocol.Cells over whole sequences, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models.operations import Array
from rmsnorm.nematus.models.parameters import Parameters, normalise, project


def nematus_input(p: Parameters, x: Array, bias: Bias) -> tuple[Array, Array]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    gates_bias, proposal_bias = ("gates_bias", "proposal_bias") if bias == "input" else (None, None)
    gates = project(p, x, "input_to_gates", gates_bias, "gates_x_norm/")
    return gates, project(p, x, "input_to_proposal", proposal_bias, "proposal_x_norm/")


def nematus_step(p: Parameters, h: Array, from_input: tuple[Array, Array] | None, bias: Bias) -> Array:
    """One step of a Nematus GRU.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    gates_bias, proposal_bias = ("gates_bias", "proposal_bias") if bias == "state" else (None, None)
    gates = project(p, h, "state_to_gates", gates_bias, "gates_state_norm/")
    proposal = project(p, h, "state_to_proposal", proposal_bias, "proposal_state_norm/")
    terms = [] if from_input is None else [from_input]
    if bias == "outside":
        terms.append((p["gates_bias"], p["proposal_bias"]))
    r, u = p.ops.split(p.ops.sigmoid(sum((of_gates for of_gates, _ in terms), gates)), 2)
    candidate = p.ops.tanh(sum((of_proposal for _, of_proposal in terms), r * proposal))
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array], biases: Sequence[Bias], first: int = 0
) -> Array:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, None, bias)
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
    """The states of a level of GRUs over a sequence."""

    def step(state: tuple[Array, ...], inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        gates, proposal, *own = inputs
        new = nematus_deep_step(p, state[0], (gates, proposal), biases)
        for m in own:
            new = m * new + (1 - m) * state[0] if masking == "carry" else m * new
        return (new,), ()

    inputs = (*nematus_input(p / "gru0", x, biases[0]), *masks_of(p, mask, x))
    return p.ops.scan(step, (h0,), inputs, reverse=reverse)[0][0]


def masks_of(p: Parameters, mask: Array | None, x: Array) -> list[Array]:
    """The mask as columns for the steps of a sequence; nothing for no mask."""
    return [] if mask is None else [p.ops.cast(mask, x)[..., None]]


def lstm_sequence(p: Parameters, x: Array, h0: Array, c0: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """States and cells of the authors' LSTM over a sequence."""

    def step(state: tuple[Array, ...], inputs: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        h, c = state
        return lstm_step(p, h, c, *inputs), ()

    h, c = p.ops.scan(step, (h0, c0), (project(p, x, "W", "b", ("s1", "b1")), *masks_of(p, mask, x)))[0]
    return h, c


def lstm_step(p: Parameters, h: Array, c: Array, below: Array, m: Array | None = None) -> tuple[Array, Array]:
    """One step of the authors' LSTM: see rmsnorm.nematus.protocol.Cells.lstm."""
    ops = p.ops
    i, f, o, g = ops.split(below + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4)
    new_c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = ops.sigmoid(o) * ops.tanh(normalise(p, new_c, "s3", "b3"))
    return new_h if m is None else m * new_h + (1 - m) * h, new_c


CELLS: Final[Mapping[str, Callable[..., Any]]] = {"gru": nematus_level, "lstm": lstm_sequence}
