"""Recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

As functions of their parameters, as cells for keras.layers.RNN and as layers. Sequences of the functions are
time-major: x (length, batch, features), mask (length, batch), states (batch, features); those of the layers are
batch-major, as Keras has them. The dtype is that of the arguments. Keras is to run on TensorFlow. In a function with
jit_compile=True the tape is to be inside, as for every loop of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import tensorflow as tf

from rmsnorm.nematus.cells import PARTIAL, CellNorm, check_norm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.tf.parameters import Graphs, Parameters, leaves, normalize, project

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
    more = [] if from_input is None else [from_input]
    if bias == "outside":
        more.append((p["gates_bias"], p["proposal_bias"]))
    r, u = tf.split(tf.sigmoid(sum((each for each, _ in more), gates)), 2, -1)
    candidate = tf.tanh(sum((each for _, each in more), r * proposal))
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: tf.Tensor, from_input: tuple[tf.Tensor, tf.Tensor], biases: Sequence[Bias], first: int = 0
) -> tf.Tensor:
    """One step of gru<first> with what comes from the input, then of the GRUs after it, without any."""
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

    def step(h: tf.Tensor, given: Any) -> tf.Tensor:
        gates, proposal, *masks = given
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
    """Nematus's GRU with deep transition.

        r, u = sigmoid(norm(h U) + norm(x W + b))        h' = u h + (1 - u) tanh(r norm(h Ux) + norm(x Wx + bx))

    Args:
        x: (length, batch, features).
        h0: (batch, state).
        parameters: by Nematus's names, ``gru0/state_to_gates`` and so on; transitions ``gru1/...`` have no input.
        biases: where each GRU of a step adds its bias: inside the norm of what comes from the ``input`` or from the
            ``state``, ``outside`` of both, or ``none``. As many as there are GRUs.
        mask: (length, batch), 1 where there is a word.
        masking: ``zero`` multiplies the state by the mask; ``carry`` keeps the old state, as Theano does.
        reverse: from the last word to the first.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        The states, (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

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
    """The GRU of the authors' Theano code: ``gru``, ``lngru``, ``rlngru``.

        r, u = sigmoid(norm(h U; s3) + norm(x W + b; s1))
        h' = u h + (1 - u) tanh(r norm(h Ux; s4) + norm(x Wx + bx; s2)),    then m h' + (1 - m) h

    Args:
        x: (length, batch, features).
        h0: (batch, state).
        parameters: W, U, b, Wx, Ux, bx; with a norm the gains s1 to s4; with LayerNorm the offsets b1 to b4 too.
        mask: m, (length, batch), any numbers.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        The states, (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

    Source: Zhang & Sennrich 2019, layers.py.

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
    """The LSTM of the authors' Theano code: ``lstm``, ``lnlstm``, ``rlnlstm``.

        i, f, o, g = norm(x W + b; s1) + norm(h U; s2) + b,    sigmoid of i, f, o and tanh of g
        c' = f c + i g,    then m c' + (1 - m) c;    h' = o tanh(norm(c'; s3)),    then m h' + (1 - m) h

    b is added twice, as that code does.

    Args:
        x: (length, batch, features).
        h0, c0: (batch, state).
        parameters: W, U, b; with a norm the gains s1 to s3; with LayerNorm the offsets b1 to b3 too.
        mask: m, (length, batch), any numbers.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        (h, c), each (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

    Source: Zhang & Sennrich 2019, README and layers.py.

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
    check_norm(norm)
    given = [tf.convert_to_tensor(each) for each in (x, *state)]
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}
    masks = [] if mask is None else [tf.convert_to_tensor(mask)]
    return _graphs.run(function, values, *given, *masks, norm=norm, **options)


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
    return tf.scan(lambda state, given: lstm_step(p, *state, *given), (below, *masks), (h0, c0))


def lstm_step(
    p: Parameters, h: tf.Tensor, c: tf.Tensor, below: tf.Tensor, m: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    i, f, o, g = tf.split(below + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4, -1)
    new_c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = tf.sigmoid(o) * tf.tanh(normalize(p, new_c, "s3", "b3"))
    return new_h if m is None else m * new_h + (1 - m) * h, new_c
