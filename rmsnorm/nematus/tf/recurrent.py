"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments. In a function with jit_compile=True the tape must be inside, as for all loops of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import tensorflow as tf

from rmsnorm.nematus.cells import PARTIAL, CellNorm, check_norm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.tf.parameters import Graphs, Parameters, leaves, normalise, project

__all__ = ["gru", "lstm", "nematus_gru"]

_graphs: Final = Graphs()


def nematus_input(p: Parameters, x: tf.Tensor, bias: Bias) -> tuple[tf.Tensor, tf.Tensor]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    inside = bias == "input"
    gates = project(p, x, "input_to_gates", "gates_bias" if inside else None, leaves(p, "gates_x_norm/"))
    proposal = project(p, x, "input_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_x_norm/"))
    return gates, proposal


def nematus_step(p: Parameters, h: tf.Tensor, from_input: tuple[tf.Tensor, tf.Tensor] | None, bias: Bias) -> tf.Tensor:
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
    r, u = tf.split(tf.sigmoid(sum((of_gates for of_gates, _ in terms), gates)), 2, -1)
    candidate = tf.tanh(sum((of_proposal for _, of_proposal in terms), r * proposal))
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: tf.Tensor, from_input: tuple[tf.Tensor, tf.Tensor], biases: Sequence[Bias], first: int = 0
) -> tf.Tensor:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, None, bias)
    return h


def nematus_level(
    p: Parameters,
    x: tf.Tensor,
    h0: tf.Tensor,
    biases: Sequence[Bias],
    *,
    mask: tf.Tensor | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> tf.Tensor:
    """A level of GRUs over a sequence."""

    def step(h: tf.Tensor, inputs: Any) -> tf.Tensor:
        gates, proposal, *masks = inputs
        new = nematus_deep_step(p, h, (gates, proposal), biases)
        for m in masks:
            new = m * new + (1 - m) * h if masking == "carry" else m * new
        return new

    masks = [] if mask is None else [tf.cast(mask, x.dtype)[..., None]]
    return tf.scan(step, (*nematus_input(p / "gru0", x, biases[0]), *masks), h0, reverse=reverse)


def nematus_gru(
    x: tf.Tensor,
    h0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: tf.Tensor | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tf.Tensor:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> weights = {"gru0/state_to_gates": tf.ones((1, 2)), "gru0/state_to_proposal": tf.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": tf.ones((1, 2)), "gru0/input_to_proposal": tf.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": tf.zeros(2), "gru0/proposal_bias": tf.zeros(1)}
        >>> nematus_gru(tf.zeros((2, 1, 1)), tf.ones((1, 1)), weights).numpy().round(4).ravel()
        array([0.8988, 0.802 ], dtype=float32)
    """
    return _run(
        _nematus_gru, x, (h0,), parameters, mask,
        biases=tuple(biases), masking=masking, reverse=reverse, norm=norm, partial=partial,
    )  # fmt: skip


def gru(
    x: tf.Tensor,
    h0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    mask: tf.Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tf.Tensor:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> weights = {"W": tf.ones((1, 2)), "U": tf.ones((1, 2)), "b": tf.zeros(2)}
        >>> weights |= {"Wx": tf.ones((1, 1)), "Ux": tf.ones((1, 1)), "bx": tf.zeros(1)}
        >>> mask = tf.constant([[1.0], [0.0]])
        >>> gru(tf.zeros((2, 1, 1)), tf.ones((1, 1)), weights, mask=mask).numpy().round(4).ravel()
        array([0.8988, 0.8988], dtype=float32)
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    return nematus_gru(x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)


def lstm(
    x: tf.Tensor,
    h0: tf.Tensor,
    c0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    mask: tf.Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> weights = {"W": tf.ones((1, 4)), "U": tf.ones((1, 4)), "b": tf.zeros(4)}
        >>> h, c = lstm(tf.zeros((1, 1, 1)), tf.ones((1, 1)), tf.ones((1, 1)), weights)
        >>> h.numpy().round(4).ravel(), c.numpy().round(4).ravel()
        (array([0.6277], dtype=float32), array([1.2878], dtype=float32))
    """
    return _run(_lstm, x, (h0, c0), parameters, mask, norm=norm, partial=partial)


def _run(
    function: Any, x: Any, state: Any, parameters: Mapping[str, Any], mask: Any, *, norm: CellNorm, **options: Any
) -> Any:
    """The function as a graph; all arguments become tensors."""
    check_norm(norm)
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}
    tensors = [tf.convert_to_tensor(array) for array in ([x, *state] if mask is None else [x, *state, mask])]
    return _graphs.run(function, values, *tensors, norm=norm, **options)


def _nematus_gru(
    values: Any, x: tf.Tensor, h0: tf.Tensor, mask: tf.Tensor | None = None, *,
    biases: Sequence[Bias], norm: CellNorm, partial: float, **options: Any,
) -> tf.Tensor:  # fmt: skip
    return nematus_level(Parameters(values, norm, partial=partial), x, h0, biases, mask=mask, **options)


def _lstm(
    values: Any, x: tf.Tensor, h0: tf.Tensor, c0: tf.Tensor, mask: tf.Tensor | None = None, *,
    norm: CellNorm, partial: float,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    p = Parameters(values, norm, partial=partial)
    masks = [] if mask is None else [tf.cast(mask, x.dtype)[..., None]]
    below = project(p, x, "W", "b", ("s1", "b1"))
    return tf.scan(lambda state, inputs: lstm_step(p, *state, *inputs), (below, *masks), (h0, c0))


def lstm_step(
    p: Parameters, h: tf.Tensor, c: tf.Tensor, below: tf.Tensor, m: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    i, f, o, g = tf.split(below + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4, -1)
    new_c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = tf.sigmoid(o) * tf.tanh(normalise(p, new_c, "s3", "b3"))
    return new_h if m is None else m * new_h + (1 - m) * h, new_c
